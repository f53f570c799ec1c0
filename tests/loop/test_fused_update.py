"""Old log-probs of the update's own forward pass: weights, gradients, metrics and columns as with a pass before it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_retool.config import Config, OptimizerConfig, load_config
from megatron_retool.config.old_log_probs import OldLogProbs, expected_updates, old_log_probs_source
from megatron_retool.loop.columns import mini_batch_rows
from megatron_retool.loop.fused_update import source_of
from megatron_retool.loop.state import TrainerState
from megatron_retool.loop.train import learn
from megatron_retool.parity.admission.tiny_model import save_model
from megatron_retool.parity.ranks import run_ranks
from megatron_retool.routed_experts import missing_expert
from megatron_retool.runs.step_timer import StepTimer
from megatron_retool.trajectory import Trajectory, TrajectoryBatch
from tests.kit import tiny_models
from tests.loop.segmented import cut, rollout

GROUPS, SIZE = 4, 4
SIZES = [f"data.train_batch_size={GROUPS}", f"rollout.train.n={SIZE}"]
ONE_UPDATE = [*SIZES, f"learner.mini_batch_size={GROUPS * SIZE}"]
TWO_UPDATES = [*SIZES, f"learner.mini_batch_size={GROUPS * SIZE // 2}"]
CORRECTION = "algorithm.rollout_correction"
GEO_MIS = [f"{CORRECTION}.rejection=['geometric_ratio 0.9 1.1']"]
TOKEN_MIS = [
    f"{CORRECTION}.mode=mask", f"{CORRECTION}.lower=0.5", f"{CORRECTION}.veto_threshold=null",
    f"{CORRECTION}.rejection=['sequence_max_k3 -inf 100', 'token_ratio 0.3 inf']", "algorithm.policy_loss=gspo",
    "algorithm.loss_aggregation=seq-mean-token-mean", "algorithm.entropy_coefficient=0.01", "algorithm.kl_in_loss=0.1",
]  # fmt: skip
CASES = {
    "geo_mis": (ONE_UPDATE, GEO_MIS, "auto"),
    "token_mis": (ONE_UPDATE, TOKEN_MIS, "auto"),
    "first_of_two": (TWO_UPDATES, GEO_MIS, "first_mini_batch"),
    "all_rejected": (ONE_UPDATE, [f"{CORRECTION}.rejection=['geometric_ratio 5 6']"], "auto"),
    "first_of_two_rejected": (TWO_UPDATES, GEO_MIS, "first_mini_batch"),
    "experts": (ONE_UPDATE, [*GEO_MIS, "learner.routing_replay=rollout"], "auto"),
}
MODELS = {"dense": "qwen2", "experts": "qwen3_moe"}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}},
    2: {
        "data": {},
        "context": {"context_parallel_size": 2},
        "pipeline": {"pipeline_model_parallel_size": 2},
        "tensor": {"tensor_model_parallel_size": 2},
        "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    },
}
STEPS = (1, 2)


class InProcess:
    """A LearnerGroup of one rank, in this process."""

    def __init__(self, learner: Any) -> None:
        self.learner = learner
        self.passes = 0

    async def log_probs(self, batch: TrajectoryBatch, *, sampling: Any, reference: bool = False) -> Any:
        self.passes += not reference
        return self.learner.log_probs(batch, reference=reference, sampling=sampling)

    async def update(self, batch: TrajectoryBatch, **options: Any) -> Any:
        return self.learner.update(batch, **options)

    async def update_fused(self, batch: TrajectoryBatch, **options: Any) -> Any:
        return self.learner.update_fused(batch, **options)


def collected(experts: bool) -> list[Trajectory]:
    """With ``experts``, those that an engine took: random ones, of which rows here and there are missing."""
    rng = np.random.default_rng(5)
    rows = [rollout(rng, group, index) for group in range(GROUPS) for index in range(SIZE)]
    for number, row in enumerate(rows):
        row.reward = float(number % 4 < 2)
        row.reward_info = {"overlong_filtered": number == 4}
    rows = [*rows[:6], *cut(rows[6], [2, 4]), *rows[7:]]
    for number, row in enumerate(rows if experts else []):
        chosen = rng.random((len(row.prompt_ids) + len(row.response_ids), 2, 4)).argsort(-1)[..., :2].astype(np.uint8)
        chosen[:: 3 + number] = missing_expert(np.uint8)
        row.routed_experts = chosen
    return rows


def sampled_by_an_engine(config: Config, rows: list[Trajectory], log_probs: np.ndarray, reject_first: bool) -> None:
    """Give the rollouts log-probs near the learner's: equal, shifted, scattered, or with a token far off."""
    rng = np.random.default_rng(7)
    batch = TrajectoryBatch.from_trajectories(rows)
    first = mini_batch_rows(config.trainer, config.learner, batch, STEPS[0])[0]
    ends = np.cumsum(batch.response_lengths)
    for number, row in enumerate(rows):
        count = len(row.response_ids)
        gap = rng.normal(0.0, 0.8 if number % 3 == 1 else 0.02, count)
        if row.loss_mask.any():
            gap -= gap[row.loss_mask].mean() - 0.2 * (number in (2, 11))
            if number in (5, 8) or (reject_first and number in first):
                gap[row.loss_mask.argmax()] -= 12.0
        own = log_probs[ends[number] - count : ends[number]]
        row.rollout_log_probs = np.where(row.loss_mask, own - gap, 0).astype(np.float32)


def learn_steps(layout: dict[str, Any], world_size: int, case: str, fuse: str, hf_dir: Path) -> dict[str, Any]:
    from megatron_retool.learner.learner import Learner

    sizes, algorithm, _ = CASES[case]
    settings = {"world_size": world_size, "dtype": "float32", "max_tokens_per_micro_batch": 64, **layout}
    learner_settings = [f"learner.{name}={value}" for name, value in settings.items()]
    config = load_config(None, [*sizes, *algorithm, *learner_settings, f"learner.fuse_old_log_probs={fuse}"])
    learner = Learner(
        config,
        optimizer=OptimizerConfig(lr=1e-4, eps=1e-4, clip_grad=0.0),
        total_optimizer_steps=9,
        hf_dir=hf_dir / ("experts" if case == "experts" else "dense"),
        with_reference=bool(config.algorithm.kl_in_loss),
    )
    rows = collected(experts=case == "experts")
    own = learner.log_probs(TrajectoryBatch.from_trajectories(rows))["log_probs"]
    sampled_by_an_engine(config, rows, own, reject_first=case == "first_of_two_rejected")
    group = InProcess(learner)
    phases = SimpleNamespace(training=lambda: asyncio.sleep(0))
    run: Any = SimpleNamespace(config=config, learner=group, critic=None, teachers=None, gpu_phases=phases)
    state = TrainerState.first(config)
    found: dict[str, Any] = {}
    for step in STEPS:
        state.step = step
        learned = asyncio.run(learn(run, state, rows, StepTimer()))
        parameters = [p for chunk in learner.model_chunks for p in chunk.parameters()]
        found[f"step {step}"] = {
            **learned.metrics,
            "skipped": learned.skipped,
            "columns": learned.batch.columns,
            "gradients": torch.cat([p.main_grad.reshape(-1) for p in parameters]),
            "weights": {name: tensor for bucket in learner.export_weights() for name, tensor in bucket},
            "lr": learner.learning_rate,
        }
    found["passes"] = group.passes
    return found


def cases_of(layout: str) -> list[str]:
    dense = list(CASES)[: {"one": 5, "data": 3, "context": 3}.get(layout, 2)]
    return [*dense, *(["experts"] if layout in ("one", "data") else [])]


def learn_in_all(world_size: int, hf_dir: Path) -> dict[str, Any]:
    return {
        f"{name} {case}": [learn_steps(layout, world_size, case, fuse, hf_dir) for fuse in ("never", CASES[case][2])]
        for name, layout in LAYOUTS[world_size].items()
        for case in cases_of(name)
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("fused")
    for name, family in MODELS.items():
        save_model(tiny_models.hf_model(family, num_hidden_layers=2), directory / "hf" / name)
    return {
        name: answer
        for world_size in LAYOUTS
        for name, answer in run_ranks(
            learn_in_all, world_size, directory / str(world_size), world_size, directory / "hf"
        ).items()
    }


NAMES = [f"{layout} {case}" for layouts in LAYOUTS.values() for layout in layouts for case in cases_of(layout)]


@pytest.mark.parametrize("name", NAMES)
def test_a_fused_step_is_one_with_a_pass(found: dict[str, Any], name: str) -> None:
    separate, fused = found[name]
    case = name.partition(" ")[2]
    two = case.startswith("first_of_two")
    assert (separate["passes"], fused["passes"]) == (len(STEPS), len(STEPS) if two else 0)
    for step in (f"step {number}" for number in STEPS):
        expected, answer = separate[step], fused[step]
        share = answer.pop("actor/fused_old_log_probs")
        assert (0.2 < share < 0.8) if two else share == 1.0
        assert expected.pop("actor/fused_old_log_probs") == 0.0 and answer.keys() == expected.keys()
        assert answer["skipped"] is expected["skipped"]
        assert answer["columns"].keys() == expected["columns"].keys()
        for column, values in expected["columns"].items():
            np.testing.assert_allclose(answer["columns"][column], values, rtol=1e-6, atol=1e-6, err_msg=column)
        if expected["skipped"] is None:  # else there is nothing to compare: a step with a pass computes none
            assert expected["gradients"].abs().max() > 1e-2
            torch.testing.assert_close(answer["gradients"], expected["gradients"], rtol=1e-5, atol=1e-6)
        for weight, tensor in expected["weights"].items():
            torch.testing.assert_close(answer["weights"][weight], tensor, rtol=1e-6, atol=1e-6)
        for metric, value in expected.items():
            if isinstance(value, float):
                assert answer[metric] == pytest.approx(value, rel=1e-5, abs=1e-6), metric


def test_the_cases_are_what_they_are_named_after(found: dict[str, Any]) -> None:
    geo, mis, rejected = (found[f"one {case}"][0]["step 1"] for case in ("geo_mis", "token_mis", "all_rejected"))
    assert geo["rollout_corr/veto_fraction"] > 0 and geo["rollout_corr/is_weight_max"] == 2.0
    assert geo["rollout_corr/rollout_rs_seq_masked_fraction"] > geo["rollout_corr/veto_fraction"]
    assert geo["rollout_corr/overlong_filtered"] > 0
    assert 0 < mis["rollout_corr/masked_fraction"] < 1
    assert rejected["skipped"] is not None and geo["skipped"] is None
    flips = found["one experts"][0]["step 1"]["columns"]["routing_flips"]
    assert np.isnan(flips).any() and np.nanmax(flips) > 0 and "routing_flips" not in geo["columns"]
    assert all(
        torch.equal(rejected["weights"][name], found["one all_rejected"][1]["step 2"]["weights"][name])
        for name in rejected["weights"]
    )
    # Zero gradients, with the other mini-batch's step after them: two steps of the schedule either way.
    assert found["one first_of_two_rejected"][1]["step 1"]["skipped"] is None


# --- where old log-probs come from --------------------------------------------------------------------------------


def source(*overrides: str, updates: int | None = None, cut_rollouts: int = 0) -> tuple[OldLogProbs, str]:
    config = load_config(None, [*ONE_UPDATE, *overrides])
    found = old_log_probs_source(
        config.learner,
        config.algorithm,
        expected_updates(config.learner, config.data, config.rollout) if updates is None else updates,
        cut_rollouts,
    )
    assert found.reason in found.sentence
    return found.source, found.reason


@pytest.mark.parametrize("fuse", ["auto", "first_mini_batch"])
@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([f"{CORRECTION}.batch_k3_limit=0.1"], "batch_k3_limit"),
        ([f"{CORRECTION}.batch_normalize=true"], "batch_normalize"),
        ([f"{CORRECTION}.denominator=post"], "denominator=post"),
        (["algorithm.kl_in_reward=0.1"], "kl_in_reward"),
        (
            [
                "algorithm.distillation.teachers=[{{path: a}}]",
                "algorithm.distillation.divergence=forward_kl",
                "algorithm.advantage=zero",
                "algorithm.dynamic_sampling.enable=false",
            ],
            "divergence",
        ),
        (["algorithm.advantage=gae", "algorithm.dynamic_sampling.enable=false"], "critic"),
        (["algorithm.advantage={own}:advantage"], "given old log-probs"),
        (["learner.routing_replay=old_log_probs"], "records the experts"),
    ],
)
def test_what_needs_the_pass_keeps_it_and_is_named(
    tmp_path: Path, overrides: list[str], reason: str, fuse: str
) -> None:
    own = tmp_path / "own.py"
    own.write_text("def advantage(batch): return batch.per_token(batch.rewards)\n")
    given = [override.format(own=own) for override in overrides]
    where, why = source(f"learner.fuse_old_log_probs={fuse}", *given)
    assert where is OldLogProbs.PASS and reason in why


def test_one_update_is_fused_and_several_as_the_setting_says() -> None:
    assert (
        source()[0] is source(f"{CORRECTION}.batch_normalize=true", f"{CORRECTION}.mode=none")[0] is OldLogProbs.UPDATE
    )
    assert source("learner.fuse_old_log_probs=never")[0] is OldLogProbs.PASS
    first = "learner.fuse_old_log_probs=first_mini_batch"
    assert source(first)[0] is OldLogProbs.UPDATE
    assert source(updates=2) == (OldLogProbs.PASS, "2 updates follow a batch")
    assert source(first, updates=2)[0] is OldLogProbs.FIRST_UPDATE
    replay = "learner.routing_replay=rollout"
    assert source(replay)[0] is OldLogProbs.UPDATE and source(first, replay, updates=2)[0] is OldLogProbs.PASS
    assert (
        source(cut_rollouts=3) == (OldLogProbs.PASS, source(cut_rollouts=3)[1])
        and "3 rollouts" in source(cut_rollouts=3)[1]
    )
    bypass = [f"{CORRECTION}.bypass_old_log_probs=true", f"{CORRECTION}.mode=none"]
    assert source(*bypass)[0] is OldLogProbs.ENGINE


def test_a_batch_with_fewer_rollouts_or_longer_ones_decides_anew() -> None:
    config = load_config(None, TWO_UPDATES)
    rng = np.random.default_rng(0)
    rows = [rollout(rng, group, index) for group in range(2) for index in range(8)]
    assert not source_of(config.learner, config.algorithm, TrajectoryBatch.from_trajectories(rows)).fused
    assert source_of(config.learner, config.algorithm, TrajectoryBatch.from_trajectories(rows[:8])).fused
    whole = next(row for row in rows if len(row.response_ids) >= 6)
    segments = TrajectoryBatch.from_trajectories(cut(whole, [2, 4]))
    tokens = int(segments.total_lengths.sum())
    for budget, fused in ((tokens, True), (tokens - 1, False)):
        narrow = load_config(None, [*TWO_UPDATES, f"learner.max_tokens_per_micro_batch={budget}"])
        assert source_of(narrow.learner, narrow.algorithm, segments).fused is fused
