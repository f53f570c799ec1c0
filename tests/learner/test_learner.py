"""What a Learner does apart from computing right numbers: schedules, stages, the reference, the critic, bad input."""

from __future__ import annotations

import dataclasses
import gc
import gzip
import json
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_retool.algorithms.prefix_tree import prefix_tree
from megatron_retool.config import AlgorithmConfig, Config, ConfigError, LearnerConfig, OptimizerConfig
from megatron_retool.learner import shared_packing
from megatron_retool.parity.admission.tiny_model import hf_log_probs, random_batch, save_model, with_copies
from megatron_retool.parity.ranks import run_ranks
from megatron_retool.trajectory import TrajectoryBatch
from tests.kit.tiny_models import hf_model

LENGTHS = [(5, 20), (9, 3), (4, 12), (13, 31), (6, 1)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(hf_model("qwen2", num_hidden_layers=2), tmp_path_factory.mktemp("model"))


def _learner(model_dir: Path, optimizer: OptimizerConfig | None = None, steps: int = 10, **options: Any) -> Any:
    from megatron_retool.learner.learner import Learner

    settings = {key: options.pop(key) for key in list(options) if key in LearnerConfig.__dataclass_fields__}
    learner = LearnerConfig(**{"dtype": "float32", "max_tokens_per_micro_batch": 64, **settings})
    return Learner(
        Config(learner=learner, algorithm=options.pop("algorithm", AlgorithmConfig())),
        optimizer=optimizer or OptimizerConfig(lr=1e-3),
        total_optimizer_steps=steps,
        hf_dir=model_dir,
        **options,
    )


def _weights(learner: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in learner.export_weights() for name, tensor in bucket}


def _mini_batch(batch: TrajectoryBatch, advantages: float = 1.0) -> TrajectoryBatch:
    count = batch.num_response_tokens
    return batch.with_columns(
        old_log_probs=np.full(count, -4.0),
        advantages=np.full(count, advantages),
        loss_weights=batch.loss_mask / batch.loss_mask.sum(),
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_a_learner_that_nobody_has_is_collected(model_dir: Path, overlap: bool) -> None:
    settings = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    learner = _learner(model_dir, **settings)
    learner.update(_mini_batch(random_batch(LENGTHS)))
    gone = weakref.ref(learner.model_chunks[0])
    del learner
    gc.collect()
    assert gone() is None


def test_sft_loss_is_the_mean_cross_entropy_and_training_lowers_it(model_dir: Path) -> None:
    batch = random_batch(LENGTHS)
    learner = _learner(model_dir)
    log_probs, _ = hf_log_probs(hf_model("qwen2", num_hidden_layers=2), batch)
    expected = -log_probs[torch.from_numpy(batch.loss_mask)].mean().item()
    assert learner.sft_loss(batch) == pytest.approx(expected, rel=1e-5)
    losses = [learner.sft_update(batch)["loss"] for _ in range(8)]
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses == sorted(losses, reverse=True)
    assert learner.sft_loss(batch) < losses[-1]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 0.82, 0.64, 0.46, 0.28]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 0.914, 0.689, 0.411, 0.186]),
    ],
)
def test_learning_rate_schedules(model_dir: Path, schedule: str, expected: list[float]) -> None:
    optimizer = OptimizerConfig(lr=1e-3, min_lr=1e-4, schedule=schedule, warmup_steps=3)
    learner = _learner(model_dir, optimizer, steps=8)
    batch = random_batch(LENGTHS[:2])
    rates = [learner.sft_update(batch)["lr"] for _ in range(8)]
    np.testing.assert_allclose(np.array(rates) / 1e-3, expected, atol=2e-3)


def test_a_longer_run_goes_on_where_the_longer_schedule_stands(model_dir: Path, tmp_path: Path) -> None:
    """A cosine over four steps is at its end; the same four steps are half of one over eight."""
    batch = random_batch(LENGTHS[:2])
    optimizer = OptimizerConfig(lr=1e-3, min_lr=1e-4, schedule="cosine")
    short = _learner(model_dir, optimizer, steps=4)
    for _ in range(4):
        short.sft_update(batch)
    assert short.learning_rate == pytest.approx(1e-4)
    short.save(tmp_path / "learner")
    (tmp_path / "COMPLETE").touch()
    longer = _learner(model_dir, optimizer, steps=8)
    longer.load(tmp_path / "learner")
    rates = [longer.sft_update(batch)["lr"] for _ in range(4)]
    np.testing.assert_allclose(rates, [1e-4 + 9e-4 * (1 + np.cos(np.pi * k / 8)) / 2 for k in range(4, 8)], rtol=1e-5)


def test_a_new_stage_keeps_weights_and_forgets_the_optimizer(model_dir: Path) -> None:
    batch = random_batch(LENGTHS)
    learner = _learner(model_dir, OptimizerConfig(lr=1e-2))
    for _ in range(3):
        learner.sft_update(batch)
    before, loss = _weights(learner), learner.sft_loss(batch)
    learner.reset_optimizer(OptimizerConfig(lr=1e-4, schedule="cosine"), 5)
    assert learner.sft_loss(batch) == loss
    assert learner.sft_update(batch)["lr"] == pytest.approx(1e-4)
    after = _weights(learner)
    # Adam's first step moves every weight by at most lr; with old moments it would go by its own way.
    steps = torch.cat([(after[n] - w).abs().reshape(-1) for n, w in before.items()])
    assert 0.9e-4 < steps.max() <= 1.01e-4
    assert learner.sft_loss(batch) < loss


def test_the_reference_stays_where_it_was(model_dir: Path) -> None:
    batch = random_batch(LENGTHS)
    learner = _learner(model_dir, with_reference=True)
    first = learner.log_probs(batch)["log_probs"]
    learner.sft_update(batch)
    assert np.abs(learner.log_probs(batch)["log_probs"] - first).max() > 1e-3
    np.testing.assert_allclose(learner.log_probs(batch, reference=True)["log_probs"], first, atol=1e-6)


OWN_LOSS = """
from megatron_retool.registry import needs

@needs("reference", "critic", "entropy")
def loss(inputs, *, scale):
    gain = inputs.returns - inputs.values
    return -scale * gain * (inputs.log_probs - inputs.ref_log_probs) - 0.01 * inputs.entropy, {"gain": gain}
"""


def test_a_loss_of_ones_own_gets_the_columns_that_it_declares(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_LOSS)
    algorithm = AlgorithmConfig(policy_loss=f"{tmp_path}/own.py:loss", policy_loss_kwargs={"scale": 2.0})
    learner = _learner(model_dir, algorithm=algorithm)
    batch = random_batch(LENGTHS)
    before = learner.log_probs(batch)
    mini_batch = _mini_batch(batch, advantages=0.0).with_columns(ref_log_probs=np.full(batch.num_response_tokens, -4.0))
    with pytest.raises(ValueError, match="lacks the column.s. values, returns"):
        learner.update(mini_batch)
    half = np.full(batch.num_response_tokens, 0.5)
    metrics = learner.update(mini_batch.with_columns(values=-half, returns=half))
    assert metrics["actor/gain"] == pytest.approx(1.0)
    chosen = batch.loss_mask
    expected = -2.0 * (before["log_probs"][chosen] + 4.0) - 0.01 * before["entropy"][chosen]
    assert metrics["actor/pg_loss"] == pytest.approx(expected.mean(), rel=1e-4)
    assert learner.log_probs(batch)["log_probs"][chosen].mean() > before["log_probs"][chosen].mean()


def test_an_update_that_is_no_number_is_left_out(model_dir: Path) -> None:
    learner = _learner(model_dir)
    before = _weights(learner)
    batch = random_batch(LENGTHS)
    metrics = learner.update(_mini_batch(batch, advantages=float("inf")))
    assert metrics["actor/nonfinite_grad"] == 1.0
    assert all(torch.equal(before[name], tensor) for name, tensor in _weights(learner).items())
    metrics = learner.update(_mini_batch(batch))
    assert "actor/nonfinite_grad" not in metrics
    assert any(not torch.equal(before[name], tensor) for name, tensor in _weights(learner).items())


def test_an_update_above_the_bound_is_left_out(model_dir: Path) -> None:
    """Weights, moments and schedule go on as if the mini-batch had not been there."""
    optimizer = OptimizerConfig(lr=1e-3, schedule="linear", warmup_steps=1)
    batch = random_batch(LENGTHS)
    usual, spike = _mini_batch(batch), _mini_batch(batch, advantages=50.0)
    without = _learner(model_dir, optimizer, steps=8)
    expected = [without.update(usual) for _ in range(3)]
    assert "actor/skipped_by_grad_norm" not in expected[0]
    bound = 2 * max(metrics["actor/grad_norm"] for metrics in expected)
    bounded = _learner(model_dir, dataclasses.replace(optimizer, skip_grad_norm=bound), steps=8)
    found = [bounded.update(mini_batch) for mini_batch in (usual, spike, usual, spike, usual)]
    assert [metrics["actor/skipped_by_grad_norm"] for metrics in found] == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert found[1]["actor/grad_norm"] > bound and "actor/nonfinite_grad" not in found[1]
    for ours, theirs in zip(found[::2], expected, strict=True):
        assert (ours["actor/lr"], ours["actor/grad_norm"]) == (theirs["actor/lr"], theirs["actor/grad_norm"])
    assert all(torch.equal(tensor, _weights(bounded)[name]) for name, tensor in _weights(without).items())
    nonfinite = bounded.update(_mini_batch(batch, advantages=float("inf")))
    assert nonfinite["actor/nonfinite_grad"] == 1.0 and "actor/skipped_by_grad_norm" not in nonfinite


def test_rejected_tokens_do_not_count(model_dir: Path) -> None:
    """Weight 0 over a whole sequence is as if it were not there."""
    batch = random_batch(LENGTHS)
    full = _mini_batch(batch)
    weights = np.where(batch.sequence_ids == 3, 0, full.columns["loss_weights"])
    rejecting, without = _learner(model_dir), _learner(model_dir)
    first = rejecting.update(full.with_columns(loss_weights=weights))
    second = without.update(full.select([0, 1, 2, 4]))
    assert first["actor/pg_loss"] == pytest.approx(second["actor/pg_loss"], rel=1e-5)
    assert first["actor/grad_norm"] == pytest.approx(second["actor/grad_norm"], rel=1e-4)


def test_a_step_may_have_a_kl_coefficient_of_its_own(model_dir: Path) -> None:
    """The gradient with 0.2 for this step is that of a configuration with 0.2; with 0 there is no KL."""
    batch = random_batch(LENGTHS)
    batch = _mini_batch(batch).with_columns(ref_log_probs=np.full(batch.num_response_tokens, -3.0))
    scheduled = _learner(model_dir, algorithm=AlgorithmConfig(kl_in_loss=0.7))
    fixed = _learner(model_dir, algorithm=AlgorithmConfig(kl_in_loss=0.2))
    first, expected = scheduled.update(batch, kl_in_loss=0.2), fixed.update(batch)
    for name in ("actor/kl_loss", "actor/grad_norm"):
        assert first[name] == pytest.approx(expected[name], rel=1e-5)
    assert "actor/kl_loss" not in scheduled.update(batch, kl_in_loss=0.0)


def test_bfloat16_is_near_float32(model_dir: Path) -> None:
    batch = random_batch(LENGTHS)
    exact = _learner(model_dir).log_probs(batch)["log_probs"]
    for fp32_head in (False, True):
        learner = _learner(model_dir, dtype="bfloat16", fp32_lm_head=fp32_head)
        assert next(learner.model_chunks[0].parameters()).dtype is torch.bfloat16
        assert np.abs(learner.log_probs(batch)["log_probs"] - exact).max() < 0.2
        assert learner.sft_update(batch)["loss"] > learner.sft_update(batch)["loss"] > learner.sft_loss(batch)
        main = next(iter(learner.model_chunks[0].parameters())).main_grad
        assert main.dtype is torch.float32


def test_metrics_of_an_update(model_dir: Path) -> None:
    metrics = _learner(model_dir).update(_mini_batch(random_batch(LENGTHS)))
    wanted = ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "entropy", "grad_norm", "lr")
    assert {f"actor/{name}" for name in wanted} <= metrics.keys()
    assert metrics["global_seqlen/mean"] == sum(p + r for p, r in LENGTHS)
    assert all(isinstance(value, float) for value in metrics.values())


def test_an_update_plans_its_micro_batches_once(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches, balance and FLOPs go by one plan: trees of long sequences take seconds."""
    learner = _learner(model_dir, share_prefixes=True)
    learner.acceleration = dataclasses.replace(learner.acceleration, gpu_name="NVIDIA H100")
    batch = _mini_batch(with_copies(random_batch(LENGTHS), [(3, 0, 20)]))
    built: list[int] = []

    def counted(sequences: Any) -> Any:
        built.append(len(sequences))
        return prefix_tree(sequences)

    monkeypatch.setattr(shared_packing, "prefix_tree", counted)
    plan = learner.packer.plan(batch)
    of_one_plan, shared = len(built), sum(planned.tree.num_tokens for planned in plan.shares[0])
    assert of_one_plan and shared < batch.total_lengths.sum()
    metrics = learner.update(batch)
    assert len(built) == 2 * of_one_plan
    assert metrics["global_seqlen/balanced_max"] == shared and metrics["perf/mfu/actor"] > 0
    learner.log_probs(batch)
    assert len(built) == 3 * of_one_plan


def test_own_seconds_end_where_the_wait_for_other_ranks_begins(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = _learner(model_dir)
    batch = _mini_batch(random_batch(LENGTHS))
    from megatron_retool.learner import learner_state

    learner.update(batch)
    assert learner.own_seconds > 0
    monkeypatch.setattr(learner_state, "sum_gradients", lambda *_, **__: time.sleep(1.0))
    start = time.perf_counter()
    learner.update(batch)
    assert 0 < learner.own_seconds < time.perf_counter() - start - 1.0


def test_bad_input_names_what_is_wrong(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"warmup_steps=10 must be less than the 10"):
        _learner(model_dir, OptimizerConfig(warmup_steps=10), steps=10)
    with pytest.raises(ConfigError, match=r"min_lr=0.1 exceeds .*lr=0.01"):
        _learner(model_dir, OptimizerConfig(lr=0.01, min_lr=0.1))
    with pytest.raises(ConfigError, match=r"world_size=2, but this job has 1 process"):
        _learner(model_dir, world_size=2)
    with pytest.raises(ConfigError, match=r"role='judge'"):
        _learner(model_dir, role="judge")
    learner = _learner(model_dir)
    batch = random_batch(LENGTHS)
    with pytest.raises(ValueError, match=r"lacks the column\(s\) old_log_probs, advantages"):
        learner.update(batch.with_columns(loss_weights=batch.loss_mask))
    with pytest.raises(ValueError, match=r"lacks the column\(s\) keep"):
        learner.update_fused(_mini_batch(batch))
    with pytest.raises(ConfigError, match="without a reference policy"):
        learner.log_probs(batch, reference=True)
    with pytest.raises(ValueError, match=r"sequence 0 .*max_tokens_per_micro_batch=64"):
        learner.log_probs(random_batch([(30, 40)]))


# --- several ranks ---------------------------------------------------------------------------------------------------


def _critic_history(world: int, layouts: list[dict[str, Any]], model_dir: Path) -> list[Any]:
    """Two value updates in each layout: metrics, and the values afterwards."""
    batch = random_batch(LENGTHS)
    rng = np.random.default_rng(0)
    returns = rng.normal(0, 1, batch.num_response_tokens)
    answers = []
    for layout in layouts:
        learner = _learner(model_dir, OptimizerConfig(lr=1e-3), role="critic", world_size=world, **layout)
        history = []
        for _ in range(3):
            values = learner.values(batch)
            mini_batch = batch.with_columns(
                values=values, returns=returns, loss_weights=batch.loss_mask / batch.loss_mask.sum()
            )
            history.append((values, learner.update_critic(mini_batch)))
        answers.append(history)
    return answers


CRITIC_LAYOUTS: list[dict[str, Any]] = [
    {"tensor_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"pipeline_model_parallel_size": 2},
    {"context_parallel_size": 2},
    {},
]


def test_the_critic_learns_the_same_in_every_layout(model_dir: Path, tmp_path: Path) -> None:
    (expected,) = _critic_history(1, [{}], model_dir)
    assert not expected[0][0].any()  # the head starts at zero
    losses = [metrics["critic/vf_loss"] for _, metrics in expected]
    assert losses == sorted(losses, reverse=True)
    assert expected[0][1]["critic/lr"] == 1e-3
    answers = run_ranks(_critic_history, 2, tmp_path, 2, CRITIC_LAYOUTS, model_dir)
    for layout, history in zip(CRITIC_LAYOUTS, answers, strict=True):
        for (values, metrics), (expected_values, expected_metrics) in zip(history, expected, strict=True):
            np.testing.assert_allclose(values, expected_values, atol=2e-5, err_msg=str(layout))
            for name in ("critic/vf_loss", "critic/grad_norm"):
                assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-4), (layout, name)


def _few_sequences(model_dir: Path, world: int) -> list[float]:
    batch = random_batch(LENGTHS[:1])
    learner = _learner(model_dir, world_size=world)
    losses = [learner.sft_loss(batch), *(learner.sft_update(batch)["loss"] for _ in range(2))]
    return [*losses, learner.update(_mini_batch(batch))["actor/grad_norm"]]


def _sequence_ratios(model_dir: Path, world: int) -> list[float]:
    """GSPO, whose ratio is a mean over the response: a rank has to see more of it than its own tokens."""
    algorithm = AlgorithmConfig(policy_loss="gspo", clip_ratio_low=3e-4, clip_ratio_high=4e-4)
    learner = _learner(model_dir, world_size=world, context_parallel_size=world, algorithm=algorithm)
    batch = random_batch(LENGTHS)
    noise = np.random.default_rng(3).normal(0, 0.01, batch.num_response_tokens)
    old_log_probs = learner.log_probs(batch)["log_probs"] + noise
    metrics = learner.update(_mini_batch(batch).with_columns(old_log_probs=old_log_probs))
    assert 0 < metrics["actor/pg_clipfrac"] < 1
    return [metrics[f"actor/{name}"] for name in ("pg_loss", "pg_clipfrac", "ppo_kl", "grad_norm")]


def _both(model_dir: Path, world: int) -> tuple[list[float], list[float]]:
    return _few_sequences(model_dir, world), _sequence_ratios(model_dir, world)


def test_fewer_sequences_than_ranks_and_ratios_of_sequences(model_dir: Path, tmp_path: Path) -> None:
    """A rank without a sequence takes part in every collective and adds nothing; sequence-level losses under CP."""
    few, ratios = run_ranks(_both, 2, tmp_path, model_dir, 2)
    assert few == pytest.approx(_few_sequences(model_dir, 1), rel=1e-5)
    assert ratios == pytest.approx(_sequence_ratios(model_dir, 1), rel=1e-4)


_TORCHRUN_SCRIPT = """
import json, sys
from pathlib import Path
import torch
from megatron_retool.learner.learner import Learner
from tests.learner.test_learner import _learner, LENGTHS
from megatron_retool.parity.admission.tiny_model import random_batch

learner = _learner(Path(sys.argv[1]), world_size=2, tensor_model_parallel_size=2)
losses = [learner.sft_update(random_batch(LENGTHS))["loss"] for _ in range(2)]
assert not {"ray", "sglang"} & sys.modules.keys()
rank = torch.distributed.get_rank()
learner.close()
if rank == 0:
    Path(sys.argv[2]).write_text(json.dumps(losses))
"""


def test_runs_under_torchrun_without_ray(model_dir: Path, tmp_path: Path) -> None:
    script, answer = tmp_path / "job.py", tmp_path / "losses.json"
    script.write_text(_TORCHRUN_SCRIPT)
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        + [str(script), str(model_dir), str(answer)],
        check=True,
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        timeout=200,
    )
    learner = _learner(model_dir)
    batch = random_batch(LENGTHS)
    expected = [learner.sft_update(batch)["loss"] for _ in range(2)]
    assert json.loads(answer.read_text()) == pytest.approx(expected, rel=1e-5)


def test_a_step_is_recorded_from_its_first_phase_to_its_last(model_dir: Path, tmp_path: Path) -> None:
    from megatron_retool.config import ProfilerConfig
    from megatron_retool.learner.profiler import StepRecorder

    learner, batch = _learner(model_dir), random_batch(LENGTHS[:2])
    settings = ProfilerConfig(
        tool="torch", steps=[5], first_phase="ref", last_phase="update_actor", record_shapes=True, with_stack=True
    )
    recorder = StepRecorder(settings, tmp_path / "profile", "learner", rank=0)
    recorder.begin(5)
    with recorder.phase("old_log_prob"):
        learner.log_probs(batch)
    for _ in range(2):
        with recorder.phase("update_actor"):
            learner.update(_mini_batch(batch))
    with recorder.phase("weight_sync"):
        _weights(learner)
    profile = recorder.end()
    assert [path.name for path in (tmp_path / "profile").iterdir()] == [profile.trace] == ["step_000005_rank0.json.gz"]
    with gzip.open(tmp_path / "profile" / profile.trace) as packed:
        events = json.load(packed)["traceEvents"]
    ranges = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert ranges.count("update_actor") == 2 and not {"old_log_prob", "weight_sync"} & set(ranges)
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert products and all("Input Dims" in event["args"] for event in products)
    assert profile.phases.keys() == {"update_actor"} and profile.phases["update_actor"] > 0
    times = {each.name: each for each in profile.operators}
    assert not any(".py(" in name for name in times)
    assert times["aten::mm"].calls == len(products) and times["aten::mm"].cpu_us > 0 and "update_actor" not in times

    recorder.begin(6)  # and once more, of a step in which none of the phases comes
    with recorder.phase("weight_sync"):
        _weights(learner)
    nothing = recorder.end()
    assert nothing.trace == "" and "none of the phases" in nothing.problem
    (tmp_path / "file").touch()
    recorder = StepRecorder(settings, tmp_path / "file" / "profile", "critic", rank=1)
    recorder.begin(7)
    with recorder.phase("update_actor"):
        pass
    assert "it was not written" in recorder.end().problem
