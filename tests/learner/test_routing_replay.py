"""Routing replay in one process: what is replayed, recorded, counted, refused. tests/parity has every layout."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from conversion.model.layout import ParallelLayout
from megatron_retool.config import AlgorithmConfig, Config, ConfigError, LearnerConfig, OptimizerConfig, RecomputeConfig
from megatron_retool.config.algorithm import RolloutCorrectionConfig
from megatron_retool.learner.packing import Packer
from megatron_retool.learner.routing_replay import LayerReplay, _Choice, check_routers, cut_rows
from megatron_retool.parity.admission.forced_routing import (
    distance,
    expectation,
    gradients_of_update,
    random_rows,
    with_rows,
)
from megatron_retool.parity.admission.tiny_model import random_batch, save_model
from megatron_retool.parity.batches import sequences
from megatron_retool.routed_experts import RoutedExperts, is_missing, missing_expert
from megatron_retool.trajectory import TrajectoryBatch
from tests.kit.tiny_models import hf_model

LENGTHS = [(5, 20), (9, 3), (4, 12), (13, 31), (6, 1)]
OPTIONS: dict[str, Any] = {"num_hidden_layers": 2, "norm_topk_prob": False}
BYPASS = AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(mode="none", bypass_old_log_probs=True))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(hf_model("qwen3_moe", **OPTIONS), tmp_path_factory.mktemp("model"))


def _learner(model_dir: Path, replay: str = "rollout", algorithm: AlgorithmConfig | None = None, **options: Any) -> Any:
    from megatron_retool.learner.learner import Learner

    role, with_reference = options.pop("role", "actor"), options.pop("with_reference", False)
    return Learner(
        Config(
            learner=LearnerConfig(dtype="float32", max_tokens_per_micro_batch=64, routing_replay=replay, **options),
            algorithm=algorithm or AlgorithmConfig(),
        ),
        optimizer=OptimizerConfig(lr=1e-3),
        total_optimizer_steps=10,
        hf_dir=model_dir,
        role=role,
        with_reference=with_reference,
    )


def _batch() -> TrajectoryBatch:
    batch = random_batch(LENGTHS)
    count = batch.num_response_tokens
    return batch.with_columns(
        old_log_probs=np.full(count, -4.0),
        advantages=np.random.default_rng(1).normal(size=count),
        loss_weights=batch.loss_mask / batch.loss_mask.sum(),
    )


def _rows(batch: TrajectoryBatch, missing: float = 0.0) -> np.ndarray:
    return random_rows(batch, 2, 4, 2, missing)


@pytest.mark.parametrize(
    "recompute",
    [
        RecomputeConfig(),
        RecomputeConfig(granularity="full", method="block", num_layers=1),
        RecomputeConfig(granularity="full"),
        RecomputeConfig(granularity="selective", modules=["moe"]),
    ],
    ids=["kept", "block", "full", "moe"],
)
def test_gates_that_are_not_normalised_are_transformers_too(model_dir: Path, recompute: RecomputeConfig) -> None:
    batch, learner = _batch(), _learner(model_dir, recompute=recompute)
    rows = _rows(batch, missing=0.2)
    model = hf_model("qwen3_moe", **OPTIONS)
    expected = expectation(model, learner.architecture, batch, rows, 1.0, AlgorithmConfig().objective)
    replayed = with_rows(batch, rows)
    assert len(learner.packer.micro_batches(replayed)) > 1
    answer = learner.log_probs(replayed)
    np.testing.assert_allclose(answer["log_probs"], expected["log_probs"], atol=1e-5)
    assert answer["metrics"] == pytest.approx(expected["metrics"])
    np.testing.assert_array_equal(answer["routing_flips"], expected["flips"])
    assert np.isnan(expected["flips"]).any() and np.nanmax(expected["flips"]) == 2
    gradients, metrics = gradients_of_update(learner, replayed, 1.0)
    assert distance(gradients, expected["gradients"]) < 1e-5
    assert not any(name.startswith("routing_replay/") for name in metrics)  # the log-probs have counted
    assert learner.routing_replay.waiting == 0


def test_rows_of_other_tokens_or_layers_are_another_model(model_dir: Path) -> None:
    batch, learner = _batch(), _learner(model_dir)
    rows = _rows(batch)
    right = learner.log_probs(with_rows(batch, rows))["log_probs"]
    for wrong in (np.roll(rows, 1, axis=0), rows[:, ::-1], np.full_like(rows, missing_expert(rows.dtype))):
        assert np.abs(learner.log_probs(with_rows(batch, wrong))["log_probs"] - right).max() > 1e-2


def test_without_rows_the_learner_chooses_and_says_so(model_dir: Path) -> None:
    batch, learner = _batch(), _learner(model_dir)
    rows = np.full_like(_rows(batch), missing_expert(np.uint8))
    plain = _learner(model_dir, "none").log_probs(with_rows(batch, _rows(batch)))
    assert plain["metrics"] == {} and "routed_experts" not in plain
    assert "routing_flips" not in plain and "routing_flips" not in learner.log_probs(batch)
    missing, absent = learner.log_probs(with_rows(batch, rows)), learner.log_probs(batch)
    for answer in (missing, absent):
        np.testing.assert_array_equal(answer["log_probs"], plain["log_probs"])
        assert answer["metrics"]["routing_replay/missing_rows"] == 1.0
    assert missing["metrics"]["routing_replay/differing_tokens"] == 0.0
    assert np.isnan(missing["routing_flips"]).all()


@pytest.mark.parametrize("experts", [4, 300])
def test_the_learners_own_experts_change_nothing_when_replayed(tmp_path: Path, experts: int) -> None:
    model = hf_model("qwen3_moe", **OPTIONS, num_experts=experts)
    batch = _batch()
    learner = _learner(save_model(model, tmp_path), "old_log_probs", with_reference=True)
    expected = expectation(model, learner.architecture, batch, None, 1.0, AlgorithmConfig().objective)
    # What an engine may have said is not asked in this mode.
    first = learner.log_probs(with_rows(batch, _rows(batch)))
    recorded = first["routed_experts"]
    assert recorded.dtype == (np.uint8 if experts == 4 else np.int16) and first["metrics"] == {}
    np.testing.assert_array_equal(np.sort(recorded, -1), expected["own"])
    np.testing.assert_allclose(first["log_probs"], expected["log_probs"], atol=1e-5)
    replayed = with_rows(batch, recorded)
    gradients, metrics = gradients_of_update(learner, replayed, 1.0)
    assert distance(gradients, expected["gradients"]) < 1e-5
    assert metrics["routing_replay/missing_rows"] == metrics["routing_replay/differing_token_layers"] == 0.0
    reference = learner.log_probs(replayed, reference=True)
    assert "routed_experts" not in reference
    np.testing.assert_array_equal(reference["log_probs"], first["log_probs"])


def test_mini_batches_replay_their_own_rows(model_dir: Path) -> None:
    """Selected in another order, after an update that changed the routers."""
    batch, learner = _batch(), _learner(model_dir, algorithm=BYPASS)
    batch = with_rows(batch, _rows(batch))
    for rows in ([3, 0], [4, 2, 1]):
        part = batch.select(np.array(rows))
        metrics = learner.update(part)
        assert metrics["routing_replay/missing_rows"] == 0.0
        assert 0.5 < metrics["routing_replay/differing_tokens"] <= 1.0  # random experts, and in bypass mode it counts
        alone = np.concatenate([learner.log_probs(batch.select(np.array([row])))["log_probs"] for row in rows])
        np.testing.assert_allclose(learner.log_probs(part)["log_probs"], alone, atol=1e-5)


def test_an_update_with_old_log_probs_of_its_own_counts_as_the_pass_would(model_dir: Path) -> None:
    batch = _batch()
    replayed = with_rows(batch, _rows(batch, missing=0.2)).with_columns(keep=batch.loss_mask)
    expected = _learner(model_dir).log_probs(replayed)
    found = _learner(model_dir).update_fused(replayed)
    for column in ("log_probs", "routing_flips"):
        np.testing.assert_array_equal(found[column], expected[column])
    assert len(expected["metrics"]) == 3 and expected["metrics"].items() <= found["metrics"].items()


def test_critic_and_supervised_fine_tuning_choose_for_themselves(model_dir: Path) -> None:
    batch = _batch()
    replayed = with_rows(batch, _rows(batch))
    learner, critic = _learner(model_dir), _learner(model_dir, role="critic")
    assert learner.sft_loss(replayed) == learner.sft_loss(batch)
    forced = learner.log_probs(replayed)["log_probs"][batch.loss_mask]
    assert learner.sft_loss(replayed) != pytest.approx(-forced.mean(), abs=1e-3)
    loss = learner.sft_loss(batch)
    assert learner.sft_update(replayed)["loss"] == pytest.approx(loss)
    assert critic.routing_replay is None
    np.testing.assert_array_equal(critic.values(replayed), critic.values(batch))


def test_an_update_that_broke_off_leaves_nothing_for_the_next(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = _learner(model_dir, recompute=RecomputeConfig(granularity="full"))
    batch = _batch()
    batch = with_rows(batch, _rows(batch))
    expected, _ = gradients_of_update(learner, batch, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr("megatron_retool.learner.losses.policy_loss", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            learner.update(batch)
    assert learner.routing_replay.waiting == 0
    found, _ = gradients_of_update(learner, batch, 1.0)
    assert distance(found, expected) == 0.0


def test_rows_of_another_model_are_refused(model_dir: Path) -> None:
    batch, learner = _batch(), _learner(model_dir)
    rows = _rows(batch)
    deeper = np.concatenate([rows, rows], axis=1)
    with pytest.raises(ValueError, match="of 4 layers with 2 experts .* the model has 2 with 2"):
        learner.log_probs(with_rows(batch, deeper))
    beyond = rows.copy()
    beyond[7, 1] = (4, 0)
    with pytest.raises(ValueError, match="names expert 4, and the model has 4"):
        learner.log_probs(with_rows(batch, beyond))
    with pytest.raises(ValueError, match="names an expert twice"):
        learner.update(with_rows(batch, np.zeros_like(rows)))


def test_models_that_cannot_replay_are_refused(model_dir: Path, tmp_path: Path) -> None:
    dense = save_model(hf_model("qwen2", num_hidden_layers=2), tmp_path)
    with pytest.raises(ConfigError, match=r"learner\.routing_replay=rollout needs a mixture of experts.*dense qwen2"):
        _learner(dense)
    assert _learner(dense, role="critic").routing_replay is None
    learner = _learner(model_dir)
    for key, value in (("moe_router_fusion", True), ("moe_router_load_balancing_type", "sinkhorn")):
        config = copy.copy(learner.transformer_config)
        setattr(config, key, value)
        with pytest.raises(ConfigError, match=rf"learner\.routing_replay=rollout does not go with {key}"):
            check_routers("rollout", learner.architecture, config)


class _Layer:
    """A router over two micro-batches of different sizes, the rows of each, and Megatron's own routing function."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.replay = LayerReplay(0)
        self.weight = torch.randn(8, 5, generator=generator, requires_grad=True)
        self.inputs = [torch.randn(n, 5, generator=generator, requires_grad=True) for n in (7, 9)]
        self.targets = [torch.randn(n, 8, generator=generator) for n in (7, 9)]
        drawn = [torch.rand(n, 8, generator=generator).argsort(-1)[:, :2] for n in (7, 9)]
        self.choices = [
            _Choice(each.to(torch.uint8), torch.ones(len(each), 1, dtype=torch.bool), None) for each in drawn
        ]

    def gates(self, hidden: torch.Tensor) -> torch.Tensor:
        from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

        logits = hidden @ self.weight.t()
        return topk_routing_with_score_function(logits, 2, router_replay=self.replay)[0]

    def forward(self, index: int, recompute: bool) -> torch.Tensor:
        with self.replay.replaying(self.choices[index]):
            hidden = self.inputs[index]
            gates = checkpoint(self.gates, hidden, use_reentrant=True) if recompute else self.gates(hidden)
        return (gates * self.targets[index]).sum()

    def gradient(self, recompute: bool) -> torch.Tensor:
        """As under pipeline parallelism: two forward passes, then the two backward passes."""
        losses = [self.forward(index, recompute) for index in (0, 1)]
        for loss in losses:
            loss.backward()
        assert self.weight.grad is not None
        gradient, self.weight.grad = self.weight.grad, None
        return gradient


def test_another_group_with_the_same_smallest_score_is_another_choice() -> None:
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    scores = torch.tensor([[0.9, 0.5, 0.1, 0.1, 0.7, 0.4, 0.1, 0.1]]).repeat(3, 1)
    rows = torch.tensor([[0, 1], [1, 0], [4, 1]])  # the router's own choice, the same, an expert of the other group
    differing = torch.zeros(3, dtype=torch.int32)
    replay = LayerReplay(0)
    with replay.replaying(_Choice(rows.to(torch.uint8), torch.ones(3, 1, dtype=torch.bool), differing)):
        topk_routing_with_score_function(
            scores.logit(), 2, num_groups=2, group_topk=1, score_function="sigmoid", router_replay=replay
        )
    assert differing.tolist() == [0, 0, 1]


def test_a_layer_computed_again_takes_the_rows_of_its_own_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _Layer()
    expected = layer.gradient(recompute=False)
    assert layer.replay.waiting == 0
    torch.testing.assert_close(layer.gradient(recompute=True), expected)
    assert layer.replay.waiting == 0
    with pytest.raises(RuntimeError, match="again more often than it was computed"):
        layer.gates(layer.inputs[0])
    layer.replay.clear()
    # The mistake that Megatron's own replay allows: the backward pass goes on with the forward pass's latest rows.
    layer = _Layer()
    monkeypatch.setattr(LayerReplay, "_take_choice", lambda self: self._choice or layer.choices[1])
    with pytest.raises(RuntimeError, match="routes 7 tokens by 9 rows"):
        layer.gradient(recompute=True)
    layer = _Layer()
    layer.inputs[1], layer.targets[1] = layer.inputs[1][:7].detach().requires_grad_(), layer.targets[1][:7]
    layer.choices[1] = dataclasses.replace(
        layer.choices[1], experts=layer.choices[1].experts[:7], known=layer.choices[1].known[:7]
    )
    expected = layer.gradient(recompute=False)
    assert (layer.gradient(recompute=True) - expected).norm() > 0.1 * expected.norm()


lengths_strategy = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=10)


@settings(deadline=None, max_examples=60)
@given(
    lengths=lengths_strategy,
    data=st.integers(1, 3),
    context=st.sampled_from([1, 2, 4]),
    tensor=st.sampled_from([1, 2]),
    stage=st.sampled_from([(0, 3), (0, 1), (1, 2)]),
    dtype=st.sampled_from([np.uint8, np.int16]),
    seed=st.integers(0, 5),
)
def test_rows_reach_the_tokens_that_they_belong_to(
    lengths: list[tuple[int, int]],
    data: int,
    context: int,
    tensor: int,
    stage: tuple[int, int],
    dtype: type,
    seed: int,
) -> None:
    ranks = data * context * tensor
    layout = ParallelLayout.of_ranks(ranks, tensor=tensor, context=context, sequence_parallel=tensor > 1)
    rng = np.random.default_rng(seed)
    whole = random_batch(lengths)
    tokens = int(whole.total_lengths.sum())
    # A row says which token of the batch it belongs to, and its layer.
    rows = np.empty((tokens, 3, 2), dtype)
    rows[..., 0] = (np.arange(tokens) % 100)[:, None]
    rows[..., 1] = 100 + np.arange(3)
    column = RoutedExperts.end_to_end(rows, whole.total_lengths)
    chosen = rng.permutation(len(whole))[: rng.integers(1, len(whole) + 1)]
    batch = dataclasses.replace(whole, routed_experts=column).select(chosen)
    origin = np.concatenate([np.arange(column.starts[s], column.starts[s] + whole.total_lengths[s]) for s in chosen])
    ids = np.concatenate([np.concatenate(pair) for pair in sequences(batch)])
    totals = batch.total_lengths.astype(np.int64)
    starts = np.cumsum(totals) - totals
    assert batch.routed_experts is not None
    seen = np.zeros(len(ids), int)
    for data_rank in range(data):
        for context_rank in range(context):
            packer = Packer(layout, 150, data_rank, context_rank, torch.device("cpu"))
            for piece in packer.micro_batches(batch):
                positions = piece.token_positions
                assert len(positions) == piece.input_ids.size(1) and len(positions) % tensor == 0
                for part in np.split(positions, tensor):
                    cut = cut_rows(batch.routed_experts, starts, part, *stage)
                    real = part >= 0
                    assert cut.dtype == dtype and cut.shape[1:] == (stage[1], 2)
                    assert is_missing(cut[~real]).all() and not is_missing(cut[real]).any()
                    np.testing.assert_array_equal(
                        cut[real][..., 0], (origin[part[real]] % 100)[:, None].repeat(stage[1], 1)
                    )
                    assert (cut[real][..., 1] == 100 + stage[0] + np.arange(stage[1])).all()
                real = positions >= 0
                np.testing.assert_array_equal(piece.input_ids[0].numpy()[real], ids[positions[real]])
                np.add.at(seen, positions[real], 1)
    assert (seen == 1).all()
