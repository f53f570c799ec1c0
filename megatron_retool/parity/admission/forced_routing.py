"""Routing replay against transformers: its routers are made to take the same experts, token by token.

``compare`` runs in every rank of a layout, on a learner that was built for something else too: building one costs more
than its passes over a few sequences.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conversion.files.dist_metadata import load_arrays
from conversion.model.architecture import Architecture
from megatron_retool.algorithms.policy_loss import PolicyLossInputs, policy_loss
from megatron_retool.parity.admission.tiny_model import Copies, hf_log_probs
from megatron_retool.parity.stored_tensors import stored_gradients
from megatron_retool.routed_experts import RoutedExperts, is_missing, missing_expert
from megatron_retool.trajectory import TrajectoryBatch
from sglang_rollout.engine.transformers_routing import forced_gates

Rows = np.ndarray[Any, Any]


def random_rows(batch: TrajectoryBatch, layers: int, experts: int, k: int, missing: float, copies: Copies = ()) -> Rows:
    """uint8 [sum (P + R), layers, k]: experts drawn at random, of which a share of the tokens knows none; those of
    ``tiny_model.with_copies`` are the other's."""
    rng = np.random.default_rng(9)
    count = int(batch.total_lengths.sum())
    rows = rng.random((count, layers, experts)).argsort(-1)[..., :k].astype(np.uint8)
    rows[rng.random(count) < missing] = missing_expert(np.uint8)
    starts = np.cumsum(batch.total_lengths) - batch.total_lengths
    for row, other, tokens in copies:
        rows[starts[row] : starts[row] + tokens] = rows[starts[other] : starts[other] + tokens]
    return rows


def with_rows(batch: TrajectoryBatch, rows: Rows | None) -> TrajectoryBatch:
    """The batch with these rows in its order, stored backwards: where a sequence's rows begin is the column's say."""
    if rows is None:
        return dataclasses.replace(batch, routed_experts=None)
    lengths = batch.total_lengths.astype(np.int64)
    parts = _by_sequence(batch, rows)
    starts = np.cumsum(lengths[::-1])[::-1] - lengths
    return dataclasses.replace(batch, routed_experts=RoutedExperts(np.concatenate(parts[::-1]), starts))


def _by_sequence(batch: TrajectoryBatch, along: Rows) -> list[Rows]:
    return np.split(along, np.cumsum(batch.total_lengths)[:-1])


@contextlib.contextmanager
def forced(model: Any, architecture: Architecture, rows: Rows | None) -> Iterator[list[list[Tensor]]]:
    """Routers of a transformers model take the experts of ``rows``, with gates of their own scores; where rows are
    missing (or None) they choose for themselves.

    Yields:
        What each layer would have chosen, call by call: int64 [t, k].
    """
    own: list[list[Tensor]] = []

    def force(router: Any, layer: int) -> None:
        seen, plain = 0, router.forward

        def forward(hidden: Tensor, *bias: Tensor) -> tuple[Tensor, ...]:
            nonlocal seen
            answer = plain(hidden, *bias)  # MiniMax's takes its bias as an argument
            backwards = not answer[0].is_floating_point()  # Granite's returns the experts first
            logits, gates, chosen = reversed(answer) if backwards else answer
            own[layer].append(chosen)
            if rows is not None:
                mine = rows[seen : seen + len(chosen)]
                seen += len(chosen)
                known = torch.from_numpy(~is_missing(mine))[:, None]
                chosen = torch.where(known, torch.from_numpy(mine[:, layer].astype(np.int64)), chosen)
                gates = forced_gates(architecture, logits, chosen).to(gates.dtype)
            return (chosen, gates, logits) if backwards else (logits, gates, chosen)

        router.forward = forward

    names = ("mlp", "block_sparse_moe", "mixer")
    blocks = [next(filter(None, (getattr(layer, name, None) for name in names))) for layer in model.model.layers]
    result = (getattr(block, "gate", getattr(block, "router", None)) for block in blocks)
    routers = [router for router in result if router is not None]
    for layer, router in enumerate(routers):
        own.append([])
        force(router, layer)
    try:
        yield own
    finally:
        for router in routers:
            del router.forward


def expectations(
    model: Any, architecture: Architecture, batch: TrajectoryBatch, copies: Copies, temperature: float, loss: Any
) -> dict[str, dict[str, Any]]:
    """``expectation`` for rows of all tokens, rows with gaps, and the routers' own choice; ``compare`` reads it."""
    assert architecture.num_experts is not None and architecture.num_experts_per_tok is not None
    sizes = len(architecture.expert_layers), architecture.num_experts, architecture.num_experts_per_tok
    rows = {
        "all_rows": random_rows(batch, *sizes, missing=0.0, copies=copies),
        "gaps": random_rows(batch, *sizes, missing=0.25, copies=copies),
        "own": None,
    }
    return {kind: expectation(model, architecture, batch, each, temperature, loss) for kind, each in rows.items()}


def own_rows(own: list[list[Tensor]]) -> Rows:
    """What ``forced`` saw of routers' choices over sequences in turn: [tokens, layers, k]."""
    return torch.stack([torch.cat(calls) for calls in own], 1).numpy()


def expectation(
    model: Any, architecture: Architecture, batch: TrajectoryBatch, rows: Rows | None, temperature: float, loss: Any
) -> dict[str, Any]:
    """Log-probs, gradients and how often routers would have chosen otherwise."""
    model.zero_grad()
    with forced(model, architecture, rows) as own:
        log_probs, entropy = hf_log_probs(model, batch, temperature)
    mask = torch.from_numpy(batch.loss_mask)
    columns = {name: torch.from_numpy(column) for name, column in batch.columns.items()}
    sequence_ids = torch.from_numpy(batch.sequence_ids)
    inputs = PolicyLossInputs(
        log_probs=log_probs, entropy=entropy, loss_mask=mask, sequence_ids=sequence_ids, **columns
    )
    policy_loss(inputs, loss).loss.backward()
    chosen = np.sort(own_rows(own), -1)
    expected: dict[str, Any] = {
        "rows": rows,
        "own": chosen,
        "log_probs": torch.where(mask, log_probs, 0.0).detach().numpy(),
        "gradients": {name: gradient.clone() for name, gradient in stored_gradients(model).items()},
    }
    model.zero_grad()
    if rows is not None:
        known = ~is_missing(rows)
        differing = (np.sort(rows[known], -1) != chosen[known]).any(-1)
        expected["metrics"] = {
            "routing_replay/missing_rows": 1 - known.mean(),
            "routing_replay/differing_tokens": differing.any(-1).mean(),
            "routing_replay/differing_token_layers": differing.mean(),
        }
        flips = np.full(len(rows), np.nan)
        flips[known] = differing.sum(-1)
        expected["flips"] = np.concatenate(
            [part[-length:] for part, length in zip(_by_sequence(batch, flips), batch.response_lengths, strict=True)]
        )
    return expected


@contextlib.contextmanager
def recomputing(learner: Any, granularity: str | None) -> Iterator[None]:
    """A learner that was built without recomputation recomputes whole layers, or only the experts ("moe")."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    config = learner.transformer_config
    before = config.recompute_granularity, config.recompute_method, config.recompute_num_layers
    if granularity == "full":
        config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "uniform", 1
    parts = [each for chunk in learner.model_chunks for each in chunk.modules() if isinstance(each, MoELayer)]
    for part in parts:
        part.moe_layer_recompute = granularity == "moe"
    try:
        yield
    finally:
        config.recompute_granularity, config.recompute_method, config.recompute_num_layers = before
        for part in parts:
            part.moe_layer_recompute = False


def gradients_of_update(learner: Any, batch: TrajectoryBatch, temperature: float) -> tuple[dict[str, Tensor], Any]:
    """Gradients by Hugging Face name (rank 0 has them) and the metrics of an update that changes no weight."""
    from megatron_retool.learner.weights import gradients_by_hf_name

    result: dict[str, Tensor] = {}

    def look() -> tuple[bool, float]:
        named = gradients_by_hf_name(learner.model_chunks, learner.architecture)
        result.update(on_host(named))
        return True, 0.0

    learner._step = look
    try:
        metrics = learner.update(batch, temperature=temperature)
    finally:
        del learner._step
    return result, metrics


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies where the references are, whatever device the learner computes on."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error of a gradient; a gradient that is to be 0 must be.

    That of a key's bias is relative to the gradient of its matrix. What is added to all keys of a query changes no
    softmax but by rotary positions, so the bias's gradient is what is left of a sum that cancels: its own norm is a
    small part of what is summed, by which float32 rounds.
    """
    if not found:
        return 0.0
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0 or found[name].norm() == 0, name
    norms = {name: float(gradient.norm()) for name, gradient in expected.items()}
    for name in norms:
        if name.endswith("k_proj.bias"):
            norms[name] = max(norms[name], norms[name.removesuffix("bias") + "weight"])
    return max(float((found[n] - g).norm()) / norms[n] for n, g in expected.items() if norms[n] > 0)


def compare(learner: Any, batch: TrajectoryBatch, file: Path, temperature: float) -> dict[str, float]:
    """How far replay of all rows, of rows with gaps, and of the learner's own rows is from transformers'."""
    expected = load_arrays(file)
    result: dict[str, float] = {}
    replay = learner.routing_replay
    plan: dict[str, tuple[str | None, ...]] = {"all_rows": ("moe",), "gaps": (None, "full"), "own": (None,)}
    if learner.layout.world_size > 1:  # what is the same in one process is left out
        plan = {"gaps": (None, "full"), "own": ("moe",)}
    if learner.transformer_config.recompute_granularity is not None:  # it recomputes by itself
        plan = {"gaps": (None,), "own": (None,)}
    for kind, granularities in plan.items():
        want = expected[kind]
        replay.mode = "old_log_probs" if kind == "own" else "rollout"
        rows = with_rows(batch, want["rows"])
        passes = {"policy": learner.log_probs(rows, temperature=temperature)}
        if kind == "own":
            recorded = passes["policy"]["routed_experts"]
            result["recorded rows"] = float((np.sort(recorded, -1) != want["own"]).any(-1).mean())
            rows = with_rows(batch, recorded)
        if kind == "gaps":
            passes["reference"] = learner.log_probs(rows, reference=True, temperature=temperature)
        for name, answer in passes.items():
            result[f"{kind} {name}"] = float(np.abs(answer["log_probs"] - want["log_probs"]).max())
        if kind != "own":
            same = np.array_equal(passes["policy"]["routing_flips"], want["flips"], equal_nan=True)
            result[f"{kind} flips"] = float(not same)
        for granularity in granularities:
            with recomputing(learner, granularity):
                gradients, metrics = gradients_of_update(learner, rows, temperature)
            result[f"{kind} gradient, recompute {granularity}"] = distance(gradients, want["gradients"])
            counted = metrics if kind == "own" else passes["policy"]["metrics"]
            figures = want.get("metrics", dict.fromkeys(counted, 0.0) if kind == "own" else {})
            for name, value in figures.items():
                if name.startswith("routing_replay/"):
                    result[f"{kind} {name}"] = abs(counted[name] - value)
        assert replay.waiting == 0
    return result
