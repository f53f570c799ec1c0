"""Every rank sends its own parts: through the cuts of SGLang's loaders, and from real learners into real engines."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conversion.model.mapping import HFPart
from conversion.model.weight_map import WeightMap
from megatron_retool.cluster.checks import check_model
from megatron_retool.config import ConfigError, EngineConfig, load_config
from megatron_retool.parity.admission.engine_checks import published
from megatron_retool.parity.admission.requests import architecture_of, one_of_each_family, shrunk_config
from megatron_retool.parity.admission.tiny_model import random_batch, random_model, save_model
from megatron_retool.parity.ranks import run_ranks
from sglang_rollout.engine.key import engine_key, use_engine_key
from sglang_rollout.engine.served_models import unserved
from sglang_rollout.engine.sglang_plugins.weight_parts import WeightPart, with_parts
from sglang_rollout.engine.weight_sync.engine_classes import Load, load_into_engine_classes
from tests.kit.forked_engine import ForkedServer
from tests.kit.tiny_models import hf_model
from tests.learner.test_checkpoint import EP, ETP, PP, SP, TP, _learner

EMBEDDING = "model.embed_tokens.weight"
CUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda w: w.narrow(0, 16, 16),
    "columns": lambda w: w.chunk(4, 1)[2],
    "transposed": lambda w: w.t().contiguous()[:32],
    "heads": lambda w: w.view(4, 16, 64)[1:3].reshape(32, 64),
    "one row": lambda w: w[20],
    "one column": lambda w: w[:, 20],
    "flat": lambda w: w.flatten()[700:2100],
    "rows of heads": lambda w: w.view(4, 16, 64)[:, 3:9],
    "more than it has": lambda w: w[40].expand(3, 64),
    "as they are": lambda w: w[:].to(torch.float32),
}


def parts(whole: torch.Tensor, dim: int, count: int) -> list[tuple[str, torch.Tensor]]:
    size = whole.shape[dim] // count
    return [
        (HFPart("w", tuple(whole.shape), dim, start, size).wire_name, whole.narrow(dim, start, size).contiguous())
        for start in range(0, whole.shape[dim], size)
    ]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("place", ["copy_", "setitem"])
def test_all_parts_write_what_the_whole_would(cut: str, dim: int, place: str) -> None:
    whole = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = CUTS[cut](whole).float()
    found = torch.zeros(3, *expected.shape)
    for name, weight in with_parts(parts(whole, dim, 4)):
        assert name == "w" and isinstance(weight, WeightPart) and weight.shape == whole.shape
        if place == "copy_":
            found[1].copy_(CUTS[cut](weight))
        else:
            found[1] = CUTS[cut](weight)
    assert torch.equal(found[1], expected)
    assert not found[0].any() and not found[2].any()


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_a_view_of_a_view_means_the_same_elements(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape) + 1
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[dim] - 1))
    size = data.draw(st.integers(1, shape[dim] - start))
    part = HFPart("w", tuple(shape), dim, start, size)
    ((_, weight),) = with_parts([(f"{part.wire_name}", whole.narrow(dim, start, size))])
    kept = torch.zeros_like(whole)
    kept.narrow(dim, start, size).copy_(whole.narrow(dim, start, size))
    for _ in range(data.draw(st.integers(0, 4))):
        if not weight.dim():
            break
        axis = data.draw(st.integers(0, weight.dim() - 1))
        length = weight.shape[axis]
        kind = data.draw(st.sampled_from(["narrow", "select", "transpose", "unsqueeze", "view"]))
        low = data.draw(st.integers(0, length - 1))
        operation = {
            "narrow": lambda w, a=axis, b=low, n=length: w.narrow(a, b, n - b),
            "select": lambda w, a=axis, b=low: w.select(a, b),
            "transpose": lambda w, a=axis: w.transpose(0, a),
            "unsqueeze": lambda w, a=axis: w.unsqueeze(a),
            "view": lambda w: w.flatten() if w.is_contiguous() else w,
        }[kind]
        weight, kept = operation(weight), operation(kept)
    target = torch.zeros(kept.shape)
    target.copy_(weight)
    assert torch.equal(target, kept)


def test_what_needs_the_whole_tensor_is_refused() -> None:
    ((_, weight),) = with_parts(parts(torch.ones(4, 4), 0, 2))[:1]
    for operation in (lambda w: w + 1, lambda w: torch.cat([w, w]), lambda w: w[torch.tensor([0, 2])]):
        with pytest.raises(
            NotImplementedError, match="on a weight of which only a part is here: set weight_sync.method"
        ):
            operation(weight)
    assert with_parts([("w", torch.ones(2))])[0][1].sum() == 2, "a whole tensor stays as it is"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.engine.backend=transformers", "SGLang"),
        ("rollout.engine.quantization=fp8", "quantization"),
        ("weight_sync.verify=true", "verify"),
        ("weight_sync.delta=true", "delta"),
        ("weight_sync.round_to=int4", "round_to"),
        ("learner.lora.rank=4 learner.lora.sync=adapter", "adapter"),
    ],
)
def test_settings_that_do_not_go_with_it(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, ["weight_sync.method=sharded", *override.split()])
    assert "weight_sync.method=sharded" in str(error.value) and words in str(error.value)


def test_experts_in_one_tensor_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (request,) = (each for each in one_of_each_family() if architecture_of(each).family == "gpt_oss")
    save_model(random_model(shrunk_config(request)), tmp_path)
    settings = [f"model.path={tmp_path}", "weight_sync.method=sharded", "rollout.engine.device=cuda"]
    config = load_config(None, [*settings, "cluster.gpus_per_node=2"])
    with pytest.raises(ConfigError, match="weight_sync.method=sharded sends rows and columns"):
        check_model(config, learns=True)


def _push(
    world: int, layout: dict[str, Any], directory: Path, urls: list[str], key: str, versions: int, pid: int | None
) -> dict[str, Any]:
    """Each rank's parts into engines at ``urls``, version by version, with an update in between."""
    from sglang_rollout.engine.weight_sync.checksums import ExpectedChecksums
    from sglang_rollout.engine.weight_sync.errors import WeightSyncError
    from sglang_rollout.engine.weight_sync.sharded import ShardedWeightSync

    use_engine_key(key)
    learner = _learner(world, layout, directory)
    found: dict[str, Any] = {"verified": []}
    rank = torch.distributed.get_rank()
    with ShardedWeightSync(urls, timeout_seconds=60) as sync:
        for version in range(1, versions + 1):
            learner.sft_update(random_batch([(3, 6), (2, 5), (4, 4), (2, 3)], seed=version))
            report = sync.push(learner.own_parts(20_000), version)
            weights = [list(bucket) for bucket in learner.export_weights()]
            reports: list[Any] = [None] * world
            held = {name: tensor for bucket in learner.own_parts() for name, tensor in bucket}
            largest = max([tensor.nbytes for name, tensor in held.items() if name.startswith(EMBEDDING)], default=0)
            torch.distributed.all_gather_object(reports, (report.bytes, largest))
            if rank == 0:
                expected = ExpectedChecksums(sync._infos)
                for bucket in weights:
                    expected.add(bucket)
                whole = {name: tensor.nbytes for bucket in weights for name, tensor in bucket}
                found["verified"].append(sync._check_checksums(expected))
                found["bytes"] = ([sent for sent, _ in reports], sum(whole.values()))
                found["largest"] = (max(size for _, size in reports), whole[EMBEDDING])
        if pid is not None:
            parts = _Killing(list(learner.own_parts(4_000)), pid if rank == world - 1 else None)
            with pytest.raises(WeightSyncError) as error:
                sync.push(parts, versions + 1)
            told: list[Any] = [None] * world
            torch.distributed.all_gather_object(told, error.value.engines)
            found["dead"] = told
    return found


@dataclass
class _Killing:
    """Buckets; after the first of them, the engine with process ``pid`` is killed."""

    buckets: list[list[tuple[str, torch.Tensor]]]
    pid: int | None

    def __iter__(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        yield self.buckets[0]
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)
            self.pid = None
        yield from self.buckets[1:]


@pytest.mark.parametrize(
    ("family", "world", "layout", "engines"),
    [
        ("qwen3", 2, {TP: 2, SP: True}, [1, 2]),
        ("qwen3_moe", 4, {TP: 2, SP: True, EP: 2, ETP: 1, PP: 2}, [1]),
        ("llama", 2, {PP: 2}, [2]),
    ],
)
def test_real_engines_hold_what_the_ranks_sent(
    family: str, world: int, layout: dict[str, Any], engines: list[int], tmp_path: Path
) -> None:
    """Checksums of every engine tensor against those of the gathered weights."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64}
    if family == "qwen3_moe":  # the CPU engine pads experts of other sizes, and then has other tensors
        sizes["moe_intermediate_size"] = 64
    directory = save_model(hf_model(family, **sizes), tmp_path / "model")
    servers = [
        ForkedServer(
            EngineConfig(device="cpu", dtype="float32", max_total_tokens=2048, tensor_parallel_size=size, threads=1),
            model_path=directory,
            log_file=tmp_path / f"engine_{number}.log",
        )
        for number, size in enumerate(engines)
    ]
    try:
        for server in servers:
            server.start()
        urls = [server.base_url for server in servers]
        pid = servers[0].pid if len(engines) > 1 else None
        found = run_ranks(_push, world, tmp_path / "ranks", world, layout, directory, urls, engine_key(), 2, pid)
    finally:
        for server in servers:
            server.stop()
    assert len(found["verified"]) == 2 and min(found["verified"]) > 10
    sent, whole = found["bytes"]
    assert sum(sent) == whole and max(sent) < 0.7 * whole, "every byte once, from several ranks"
    largest, largest_whole = found["largest"]
    # Megatron-Core pads the vocabulary of 101 tokens to 112.
    assert largest <= 1.11 * largest_whole / layout.get(TP, 1), "no rank holds more than its part"
    if len(engines) > 1:
        assert found["dead"] == [(urls[0],)] * world, "every rank knows which engine died while weights were sent"


@pytest.mark.slow
def test_every_familys_class_takes_halves_and_changes(tmp_path: Path) -> None:
    """SGLang's own class of every built-in family writes each parameter whole from what two ranks send, and then holds
    what whole weights make of it when only changes come (``weight_sync.delta``)."""
    loads = []
    for request in one_of_each_family():
        architecture = architecture_of(request)
        directory = save_model(random_model(shrunk_config(request)), tmp_path / architecture.family)
        classes = json.loads((directory / "config.json").read_text())["architectures"]
        if unserved(architecture, classes):
            continue
        place = published(directory, architecture, classes, tmp_path / f"{architecture.family} for the engine")
        dims = {
            name: mapping.tp_dim
            for mapping in WeightMap(architecture).exported()
            for name in mapping.hf_names
            if mapping.tp_dim is not None and not mapping.is_stacked
            # SGLang keeps -exp(A_log), which it could not make of a half (served_models.py refuses that).
            if architecture.mamba is None
        }
        loads.append(Load(architecture.family, str(place), str(place / "model.safetensors"), halves=dims, changed=True))
    found = load_into_engine_classes(loads, tmp_path)
    assert {name: loaded.wrong for name, loaded in found.items() if loaded.wrong} == {}
    assert len(found) > 20
