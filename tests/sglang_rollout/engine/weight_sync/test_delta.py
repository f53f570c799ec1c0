"""Only what has changed travels: exact to the bit, through the cuts of SGLang's loaders, and into real engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron_retool.config import ConfigError, EngineConfig, load_config
from megatron_retool.parity.admission.tiny_model import save_model
from sglang_rollout.engine.sglang_plugins.changed_weights import ChangedWeight, positions_of, with_changes
from sglang_rollout.engine.weight_sync.base import ServerWeightSync
from sglang_rollout.engine.weight_sync.delta import SMALLEST, DeltaEncoder, changes, gaps_of
from sglang_rollout.engine.weight_sync.distributed import DistributedWeightSync
from sglang_rollout.engine.weight_sync.tensor import TensorWeightSync
from tests.kit.forked_engine import ForkedServer
from tests.kit.tiny_models import hf_model

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def arrived(old: torch.Tensor, parts: list[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """``old`` after the engine's side has copied what came."""
    target = old.clone()
    for name, tensor in with_changes(parts):
        assert name == "w"
        target.copy_(tensor)
    return target


def moved_by(old: torch.Tensor, longest_step: int | None, generator: torch.Generator) -> torch.Tensor:
    """Elements that many of their dtype's numbers away at most; None: other elements."""
    if longest_step is None:
        return torch.randn(old.shape, generator=generator).to(old.dtype)
    steps = torch.randint(-longest_step, longest_step + 1, old.shape, generator=generator)
    return (bits(old) + steps.to(bits(old).dtype)).view(old.dtype)


@settings(deadline=None, max_examples=120)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(20, 60),
    density=st.sampled_from([0.0, 0.0005, 0.01, 0.1, 0.4, 1.0]),
    longest_step=st.sampled_from([None, 1, 3, 60]),
    seed=st.integers(0, 99),
)
def test_changes_make_the_old_tensor_the_new_one(
    dtype: torch.dtype, rows: int, density: float, longest_step: int | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(rows, 64, generator=generator).to(dtype)
    moved = torch.rand(rows, 64, generator=generator) < density
    new = torch.where(moved, moved_by(old, longest_step, generator), old)
    if density:
        new[3, 5], old[4, 6], new[4, 6] = float("nan"), 0.0, -0.0
    parts = changes("w", new, old)
    assert torch.equal(bits(arrived(old, parts)), bits(new))
    sent = sum(part.nbytes for _, part in parts)
    assert sent <= new.nbytes
    if density == 0.0:
        assert not parts
    if dtype != torch.float32 and density:
        assert density != 0.01 or sent < 0.1 * new.nbytes
        assert density != 0.4 or longest_step != 1 or sent < 0.15 * new.nbytes


@settings(deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, unique=True))
def test_gaps_name_the_places(positions: list[int]) -> None:
    places = torch.tensor(sorted(positions))
    assert positions_of(gaps_of(places)).tolist() == sorted(positions)


CUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda w: w.narrow(0, 16, 16),
    "columns": lambda w: w.chunk(4, 1)[2],
    "transposed": lambda w: w.t().contiguous()[:32],
    "reshaped": lambda w: w.view(4, 16, 64)[1:3].reshape(32, 64),
    "together": lambda w: torch.cat([w[:8], w[40:]]),
    "as they are": lambda w: w[:],
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("place", ["copy_", "setitem"])
@pytest.mark.parametrize("longest_step", [None, 1, 20])
def test_a_piece_changes_only_what_has_changed(cut: str, place: str, longest_step: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    old = torch.randn(64, 64, generator=generator).bfloat16()
    new = torch.where(torch.rand(64, 64, generator=generator) < 0.05, moved_by(old, longest_step, generator), old)
    ((_, changed),) = with_changes(changes("w", new, old))
    assert isinstance(changed, ChangedWeight)
    # The parameter may have more bits than what travels.
    stacked = torch.zeros(3, *CUTS[cut](old).shape)
    stacked[1] = CUTS[cut](old)
    if place == "copy_":
        stacked[1].copy_(CUTS[cut](changed))
    else:
        stacked[1] = CUTS[cut](changed)
    assert torch.equal(stacked[1], CUTS[cut](new).float())
    assert not stacked[0].any() and not stacked[2].any()


def test_a_small_tensor_is_sent_whole() -> None:
    old = torch.zeros(SMALLEST - 1)
    new = old.clone()
    new[3] = 1
    assert changes("w", new, old) == [("w", new)]
    assert changes("w", old, old.clone()) == []


def test_whole_weights_where_the_engines_may_have_others() -> None:
    weights = torch.randn(64, 64)

    def sent(encoder: DeltaEncoder, served: set[int], version: int, *, ends: bool = True) -> bool:
        """Whether the whole tensor was sent."""
        encoder.begin(served)
        parts = encoder.encode([("w", weights)])
        if ends:
            encoder.end(version)
        return bool(parts)

    encoder = DeltaEncoder()
    assert sent(encoder, {0}, 1), "the first one"
    assert not sent(encoder, {1}, 2)
    assert sent(encoder, {1}, 3), "the engines serve another version"
    assert sent(encoder, {3, 2}, 4), "one engine does"
    assert not sent(encoder, {4}, 5, ends=False)
    assert sent(encoder, {4}, 5), "the sync before it failed"
    assert not sent(encoder, {5}, 6)
    every = DeltaEncoder(whole_every=2)
    assert [sent(every, {version - 1}, version) for version in range(1, 6)] == [True, False, True, False, True]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("weight_sync.method=disk", "whole checkpoints"),
        ("rollout.engine.backend=transformers", "SGLang"),
        ("rollout.engine.quantization=fp8", "quantization"),
        ("rollout.engine.tensor_parallel_size=2 rollout.engine.expert_parallel_size=2", "expert_parallel_size"),
    ],
)
def test_settings_that_do_not_go_with_it(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, ["weight_sync.delta=true", "weight_sync.method=tensor", *override.split()])
    assert "weight_sync.delta" in str(error.value) and words in str(error.value)


def moved(weights: dict[str, torch.Tensor], seed: int, share: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(tensor.shape, generator=generator) < share, tensor * 1.01, tensor)
        for name, tensor in weights.items()
    }


@pytest.mark.parametrize(
    ("family", "method", "tensor_parallel", "syncs"),
    [
        ("qwen3", TensorWeightSync, 1, 50),
        ("qwen3_moe", TensorWeightSync, 1, 8),
        ("llama", DistributedWeightSync, 2, 8),
    ],
)
def test_a_real_engine_holds_what_was_sent(
    family: str, method: type[ServerWeightSync], tensor_parallel: int, syncs: int, tmp_path: Path
) -> None:
    """Checksums of every tensor are compared each time."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64}
    if family == "qwen3_moe":  # the CPU engine pads experts of other sizes, and then has other tensors
        sizes["moe_intermediate_size"] = 64
    model = hf_model(family, **sizes)
    directory = save_model(model.to(torch.bfloat16), tmp_path / "model")
    config = EngineConfig(
        device="cpu", dtype="bfloat16", max_total_tokens=2048, tensor_parallel_size=tensor_parallel, threads=1
    )
    server = ForkedServer(config, model_path=directory, log_file=tmp_path / "engine.log")
    server.start()
    try:
        weights = load_file(directory / "model.safetensors")
        reports: list[Any] = []
        with method([server.base_url], verify=True, delta=DeltaEncoder()) as sync:
            for version in range(1, syncs + 1):
                weights = moved(weights, version, 0.02 if version % 2 else 0.4)
                reports.append(sync.push([list(weights.items())], version))
    finally:
        server.stop()
    assert all(report.verified_tensors for report in reports)
    assert reports[0].bytes == reports[0].all_bytes
    few, many = reports[2::2], reports[1::2]
    assert max(report.bytes for report in few) < 0.05 * reports[0].bytes
    assert max(report.bytes for report in many) < 0.3 * reports[0].bytes
