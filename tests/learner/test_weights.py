"""Weights in and out of the learner's model: buckets, lock step, checksums, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from conversion.hf_to_mcore import TargetLayout, convert
from megatron_retool.config import LoraConfig
from megatron_retool.parity.admission.tiny_model import random_batch, save_model
from megatron_retool.parity.ranks import run_ranks
from sglang_rollout.engine.sglang_plugins.weight_parts import with_parts
from tests.conversion.conftest import assert_same_bits
from tests.kit.tiny_models import hf_model
from tests.learner.test_checkpoint import DENSE, EP, ETP, EXPERTS, PP, SP, TP, _learner

LAYOUTS = {DENSE: {TP: 2, PP: 2}, EXPERTS: {EP: 2, TP: 2, SP: True, ETP: 1, PP: 2}}
CONVERTED_FOR = {DENSE: TargetLayout(), EXPERTS: TargetLayout(tp=2, ep=4)}
"""Other layouts than those that load the converted checkpoints."""
BUCKET_BYTES = 10_000
LORA = LoraConfig(rank=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("weights")
    for family, target in CONVERTED_FOR.items():
        save_model(hf_model(family), directory / family)
        convert(directory / family, directory / f"{family}-mcore", layout=target, workers=1, require_tokenizer=False)
    return directory


def _export(directory: Path) -> dict[str, Any]:
    """World 4: each family's buckets as rank 0 gets them, and what the other ranks got."""
    from megatron_retool.learner.weights import export_hf_weights

    def whole(learner: Any) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for bucket in learner.export_weights() for name, tensor in bucket}

    found: dict[str, Any] = {}
    for family, layout in LAYOUTS.items():
        learner = _learner(4, layout, directory / family)
        buckets = [
            [(name, tensor.clone()) for name, tensor in bucket]
            for bucket in export_hf_weights(learner.model_chunks, learner.architecture, BUCKET_BYTES)
        ]
        shapes: list[Any] = [None] * 4
        torch.distributed.all_gather_object(shapes, [len(bucket) for bucket in buckets])
        found[family] = {"buckets": buckets, "counts": shapes, "exported": whole(learner)}
        received = {n: t.clone() for bucket in learner.export_weights(BUCKET_BYTES, (1, 3)) for n, t in bucket}
        found[family]["received"] = [None] * 4
        torch.distributed.all_gather_object(found[family]["received"], received)
        converted = _learner(4, layout, directory / family, mcore_dir=directory / f"{family}-mcore")
        found[family]["converted"] = whole(converted)
    return found


def test_export_yields_every_tensor_once_in_bounded_buckets(models: Path) -> None:
    for family, found in run_ranks(_export, 4, models / "export", models).items():
        expected = load_file(models / family / "model.safetensors")
        names = [name for bucket in found["buckets"] for name, _ in bucket]
        assert sorted(names) == sorted(expected)
        for name, tensor in (item for bucket in found["buckets"] for item in bucket):
            assert torch.equal(tensor, expected[name]) and tensor.is_contiguous(), name
        sizes = [sum(tensor.nbytes for _, tensor in bucket) for bucket in found["buckets"]]
        assert len(sizes) > 5 and max(sizes) <= max(BUCKET_BYTES, 2 * expected["model.embed_tokens.weight"].nbytes)
        # Lock step: the other ranks see as many buckets, all of them empty.
        assert found["counts"][1:] == [[0] * len(sizes)] * 3
        assert_same_bits(found["exported"], expected)
        assert [len(received) for received in found["received"]] == [0, len(expected), 0, len(expected)]
        for rank in (1, 3):
            assert_same_bits(found["received"][rank], expected)
        # The same model from a converted checkpoint, through megatron.core.dist_checkpointing.
        assert_same_bits(found["converted"], expected)


def _parts(directory: Path) -> dict[str, Any]:
    """World 4: what each rank has to send of each family, and of one with adapters, and what a gathering gives."""
    found: dict[str, Any] = {}
    for name, family, more in ((DENSE, DENSE, {}), (EXPERTS, EXPERTS, {}), ("adapters", DENSE, {"lora": LORA})):
        learner = _learner(4, {**LAYOUTS[family], **more}, directory / family)
        if more:
            learner.sft_update(random_batch([(3, 6), (2, 5), (4, 4), (2, 3)]))
        parts: list[Any] = [None] * 4
        own = [[(part, tensor.clone()) for part, tensor in bucket] for bucket in learner.own_parts(BUCKET_BYTES)]
        torch.distributed.all_gather_object(parts, own)
        whole = {n: tensor.clone() for bucket in learner.export_weights() for n, tensor in bucket}
        found[name] = {"parts": parts, "whole": whole}
    return found


def test_the_ranks_parts_are_the_gathered_weights(models: Path) -> None:
    for found in run_ranks(_parts, 4, models / "parts", models).values():
        written = {name: torch.full_like(tensor, float("nan")) for name, tensor in found["whole"].items()}
        count = 0
        for buckets in found["parts"]:
            sizes = [sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets]
            assert max(sizes) <= max(BUCKET_BYTES, max(tensor.nbytes for bucket in buckets for _, tensor in bucket))
            for name, weight in with_parts([item for bucket in buckets for item in bucket]):
                written[name].copy_(weight)
            count += sum(tensor.numel() for bucket in buckets for _, tensor in bucket)
        assert count == sum(tensor.numel() for tensor in written.values()), "every element once"
        assert_same_bits(written, found["whole"])


@pytest.mark.parametrize(
    ("nodes", "sources"),
    [
        # Eight ranks, TP 2 and DP 4. Each receiver has its own half and a neighbour's.
        ("aaaabbbb", {0: {0, 1}, 5: {4, 5}}),
        # No replica on the receiver's node: the first rank that has it.
        ("aaaaaaab", {0: {0, 1}, 7: {0, 7}}),
    ],
)
def test_parts_come_from_the_receivers_own_node(models: Path, nodes: str, sources: dict[int, set[int]]) -> None:
    from conversion.model.architecture import Architecture
    from conversion.model.weight_map import WeightMap
    from megatron_retool.learner.weights import TensorParallelPlace, _plan, _RankContents

    weight_map = WeightMap(Architecture.from_pretrained(models / DENSE))
    dtypes = {mapping.mcore_name: torch.float32 for mapping in weight_map.exported()}
    world = [
        _RankContents(node, TensorParallelPlace(2, rank % 2, 2, rank % 2), dtypes, None)
        for rank, node in enumerate(nodes)
    ]
    used: dict[int, set[int]] = {receiver: set() for receiver in sources}
    for parts in _plan(list(weight_map.exported()), world, tuple(sources)):
        for part in parts:
            for receiver, source in part.sources.items():
                used[receiver].add(source)
                assert source == receiver or len(parts) == 2, "what it holds itself needs no message"
    assert used == sources


def _misfits(directory: Path) -> dict[str, str]:
    from conversion.model.architecture import Architecture
    from megatron_retool.learner.weights import export_hf_weights, load_hf_weights

    said = {}
    learner = _learner(1, {}, directory / DENSE)
    architecture = learner.architecture
    for case, wrong in {
        "other weights": lambda: load_hf_weights(learner.model_chunks, architecture, directory / EXPERTS),
        "other architecture": lambda: list(
            export_hf_weights(learner.model_chunks, Architecture.from_pretrained(directory / EXPERTS))
        ),
        "missing": lambda: load_hf_weights(learner.model_chunks, architecture, directory / "missing"),
    }.items():
        try:
            wrong()
        except ValueError as error:
            said[case] = str(error)
    critic = _learner(1, {}, directory / DENSE, role="critic")
    own = dict(critic.model_chunks[0].named_parameters())
    said["critic"] = ",".join(name for name, parameter in own.items() if not parameter.any())
    return said


def test_what_does_not_fit_is_named(models: Path) -> None:
    tensors = load_file(models / DENSE / "model.safetensors")
    (models / "missing").mkdir()
    (models / "missing" / "config.json").write_bytes((models / DENSE / "config.json").read_bytes())
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, models / "missing" / "model.safetensors")
    said = run_ranks(_misfits, 1, models / "misfits", models)
    assert "lacks tensors model.layers.0.mlp.down_proj.weight" in said["other weights"]
    assert "no rank holds decoder.layers.0.self_attention.q_layernorm.weight" in said["other architecture"]
    assert "lacks tensor model.layers.3.mlp.up_proj.weight" in said["missing"]
    # The backbone is read, the head that no checkpoint has stays at zero.
    assert said["critic"] == "module.value_head.weight"
