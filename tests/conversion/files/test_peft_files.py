"""Adapters in the files of peft: what is written is read again, also of matrices that are fused on disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conversion.files.peft_files import PeftFiles, factor_shapes, write_peft
from conversion.model.adapter_map import TARGETS, factor_mappings, peft_tensor, target_of
from conversion.model.architecture import Architecture
from conversion.model.peft_config import PeftConfig, PeftFilesError, read_peft_config
from conversion.model.weight_map import WeightMap
from tests.kit.tiny_models import hf_model

RANK = 3


def _architecture(family: str) -> Architecture:
    return Architecture.from_hf_config(hf_model(family, num_hidden_layers=2).config.to_dict())


def _written(family: str, directory: Path) -> tuple[WeightMap, dict[str, torch.Tensor]]:
    weight_map = WeightMap(_architecture(family))
    shapes = factor_shapes(weight_map, TARGETS, RANK)
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    write_peft(directory, tensors, RANK, 6.5, "base")
    return weight_map, tensors


@pytest.mark.parametrize("family", ["qwen3", "phi3", "qwen3_moe"])
def test_what_is_written_is_read_again(family: str, tmp_path: Path) -> None:
    weight_map, tensors = _written(family, tmp_path / "adapter")
    files = PeftFiles(tmp_path / "adapter")
    assert (files.rank, files.alpha) == (RANK, 6.5)
    files.check(weight_map, TARGETS)
    seen: dict[str, list[torch.Tensor]] = {}
    for mapping in weight_map:
        if target_of(mapping) in TARGETS:
            for factor, found in zip(factor_mappings(mapping, RANK), files.factors(mapping), strict=True):
                assert found.dtype == torch.float32 and tuple(found.shape) == factor.hf_shapes[0]
                seen.setdefault(peft_tensor(factor.hf_names[0])[0], []).append(found)
    assert seen.keys() == tensors.keys()
    assert all(torch.equal(torch.cat(seen[name]), tensor.float()) for name, tensor in tensors.items())


def test_a_file_of_another_model_or_of_other_targets_is_named(tmp_path: Path) -> None:
    _written("qwen3", tmp_path / "adapter")
    files = PeftFiles(tmp_path / "adapter")
    with pytest.raises(PeftFilesError, match="also has .*adapts other matrices than learner.lora.targets=\\[mlp\\]"):
        files.check(WeightMap(_architecture("qwen3")), ["mlp"])
    wider = Architecture.from_hf_config(hf_model("qwen3", num_hidden_layers=2, intermediate_size=96).config.to_dict())
    with pytest.raises(PeftFilesError, match="rank 3 of this model needs .*: it is of another base model"):
        files.check(WeightMap(wider), TARGETS)


def test_the_configuration_is_read_without_torch(tmp_path: Path) -> None:
    _written("qwen3", tmp_path / "adapter")
    assert read_peft_config(tmp_path / "adapter") == PeftConfig(RANK, 6.5)
    program = (
        "import sys; from conversion.model.peft_config import read_peft_config; "
        f"read_peft_config({str(tmp_path / 'adapter')!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3])
