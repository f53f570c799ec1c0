"""SmolLM2-135M-Instruct (Llama family, published weights) through the converters.

Asked for by ``pytest -m real_weights``: downloads them as the pre-trained demo does (98 MB, Apache-2.0), and installs
accelerate, which transformers needs to read FP8 weights, into a temporary directory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaForCausalLM

from conversion.files.companions import copy_companions
from conversion.hf_to_mcore import TargetLayout, convert
from conversion.mcore_to_hf import export
from conversion.model.architecture import Architecture
from conversion.model.mapping import merge, shard, to_hf, to_mcore
from conversion.model.weight_map import WeightMap
from conversion.verify import dequantized
from megatron_retool.data.demo.pretrained import write_smollm2
from tests.conversion.conftest import assert_same_bits, read_all

pytestmark = pytest.mark.real_weights

READ_FP8 = """
import sys, torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
torch.manual_seed(0)
ids = torch.randint(0, 101, (2, 32))
options = [{}, {"quantization_config": FineGrainedFP8Config(dequantize=True)}]
models = [AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32, **o) for d, o in zip(sys.argv[1:], options)]
logits = [model(ids).logits for model in models]
print("DIFFERENCE", float((logits[0] - logits[1]).abs().max()))
"""


def python(code: str, packages: Path, *arguments: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(packages), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def when_asked(request: pytest.FixtureRequest) -> None:
    if "real_weights" not in request.config.option.markexpr:
        pytest.skip("published weights are downloaded when asked for: pytest -m real_weights")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("packages")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), "accelerate"]
    subprocess.run(command, check=True, timeout=600)
    return target


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as bfloat16 safetensors in several files, with its tokenizer."""
    float32 = tmp_path_factory.mktemp("smollm2")
    write_smollm2(float32 / "hf", None)
    directory = float32.with_name("smollm2_bfloat16")
    model = LlamaForCausalLM.from_pretrained(float32 / "hf", dtype=torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="100MB")
    AutoTokenizer.from_pretrained(float32 / "hf").save_pretrained(directory)
    return directory


def test_round_trip_is_bit_exact_and_logits_are_equal(smollm2: Path, tmp_path: Path) -> None:
    """TP3 x PP2: the model has 9 attention heads, which two tensor-parallel ranks cannot share."""
    layout = TargetLayout(tp=3, pp=2)
    report = convert(smollm2, tmp_path / "mcore", layout=layout, workers=2, verify=True)
    print(f"largest logit difference {report['largest_logit_difference']:.2e}")
    export(tmp_path / "mcore", tmp_path / "hf", workers=1)
    assert len(list((tmp_path / "mcore").glob("__5_*.distcp"))) == 1
    assert_same_bits(read_all(tmp_path / "hf"), read_all(smollm2))


def test_tp2_pp2_parts_go_together_again(smollm2: Path) -> None:
    tensors = read_all(smollm2)
    architecture = Architecture.from_pretrained(smollm2)
    found: dict[str, torch.Tensor] = {}
    for mapping in WeightMap(architecture).exported():
        full = to_mcore(mapping, [tensors[name] for name in mapping.hf_names])
        found |= to_hf(mapping, merge(mapping, [shard(mapping, full, 2, rank) for rank in range(2)]))
    assert_same_bits(found, tensors)


@pytest.mark.rare
def test_transformers_reads_the_block_fp8_export(model_directory, packages: Path, tmp_path: Path) -> None:
    """Not SmolLM2: its hidden size, 576, is no multiple of 128."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "moe_intermediate_size": 128}
    for family in ("qwen3_moe", "qwen3"):
        source = model_directory(family, torch.float32, **sizes)
        convert(source, tmp_path / family, workers=1)
        report = export(tmp_path / family, tmp_path / f"{family}-fp8", fp8=True, workers=1, verify=True)
        assert report["largest_logit_difference"] < 1e-4
        # transformers' dequantisation of the checkpoint against ours, written out as a plain one.
        plain = tmp_path / f"{family}-plain"
        plain.mkdir()
        copy_companions(source, plain)
        save_file(dequantized(tmp_path / f"{family}-fp8"), plain / "model.safetensors", {"format": "pt"})
        assert float(python(READ_FP8, packages, plain, tmp_path / f"{family}-fp8").split("DIFFERENCE")[1]) < 1e-5
