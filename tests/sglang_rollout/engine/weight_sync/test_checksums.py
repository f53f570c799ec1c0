from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_cpu_engine import PYTHON_PATH
from sglang_rollout.engine.weight_sync import checksums as engine_checksums
from sglang_rollout.engine.weight_sync.checksums import ChecksumError, ExpectedChecksums, gpu_tensor_hash
from sglang_rollout.engine.weight_sync.errors import WeightSyncError

URL = "http://e0"


@pytest.fixture(scope="module")
def reference():
    """What SGLang's GPU kernels compute (tests/sglang_rollout/engine/weight_sync/triton_reference.py)."""
    script = Path(__file__).with_name("triton_reference.py")
    output = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True, timeout=120).stdout
    return json.loads(output)


def test_the_gpu_hash_is_sglangs(reference):
    from tests.sglang_rollout.engine.weight_sync.triton_reference import hashed_tensors

    assert [gpu_tensor_hash(tensor) for tensor in hashed_tensors()] == reference["hashes"]
    assert gpu_tensor_hash(torch.empty(0)) == 0


def test_seeded_sampling_on_cpu_draws_the_gpus_noise(reference):
    from tests.sglang_rollout.engine.weight_sync.triton_reference import murmur_inputs

    spec = importlib.util.spec_from_file_location("cpu_sgl_kernel", PYTHON_PATH / "sgl_kernel" / "__init__.py")
    shim = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shim)
    assert shim.murmur_hash32(*murmur_inputs()).tolist() == reference["murmur"]
    with pytest.raises(NotImplementedError, match="fused_experts_cpu"):
        shim.fused_experts_cpu()


HEADS, KV_HEADS, SIZE, INNER, EXPERTS = 4, 2, 8, 12, 4


def weights() -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (100, 16),
        layer + "self_attn.q_proj.weight": (HEADS * SIZE, 16),
        layer + "self_attn.k_proj.weight": (KV_HEADS * SIZE, 16),
        layer + "self_attn.v_proj.weight": (KV_HEADS * SIZE, 16),
        layer + "self_attn.q_proj.bias": (HEADS * SIZE,),
        layer + "self_attn.k_proj.bias": (KV_HEADS * SIZE,),
        layer + "self_attn.v_proj.bias": (KV_HEADS * SIZE,),
        layer + "self_attn.o_proj.weight": (16, HEADS * SIZE),
        layer + "mlp.gate_proj.weight": (INNER, 16),
        layer + "mlp.up_proj.weight": (INNER, 16),
        layer + "mlp.down_proj.weight": (16, INNER),
        layer + "input_layernorm.weight": (16,),
    }
    for expert in range(EXPERTS):
        for name, shape in (("gate_proj", (INNER, 16)), ("up_proj", (INNER, 16)), ("down_proj", (16, INNER))):
            shapes[f"model.layers.1.mlp.experts.{expert}.{name}.weight"] = shape
    return [(name, torch.randn(*shape)) for name, shape in shapes.items()]


def engine_tensors(tensor_parallel: int, rank: int) -> dict[str, torch.Tensor]:
    """The rank's tensors as SGLang lays them out, written down independently of the code under test."""
    named = dict(weights())

    def rows(tensor):
        size = len(tensor) // tensor_parallel
        return tensor[rank * size : (rank + 1) * size]

    def columns(tensor):
        size = tensor.shape[1] // tensor_parallel
        return tensor[:, rank * size : (rank + 1) * size]

    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    experts = [
        {part: named[f"model.layers.1.mlp.experts.{e}.{part}.weight"] for part in ("gate_proj", "up_proj", "down_proj")}
        for e in range(EXPERTS)
    ]
    padded = torch.cat([named["model.embed_tokens.weight"], torch.zeros(28, 16)])
    return {
        "model.embed_tokens.weight": rows(padded),
        attention + "qkv_proj.weight": torch.cat([rows(named[f"{attention}{p}_proj.weight"]) for p in "qkv"]),
        attention + "qkv_proj.bias": torch.cat([rows(named[f"{attention}{p}_proj.bias"]) for p in "qkv"]),
        attention + "o_proj.weight": columns(named[attention + "o_proj.weight"]),
        mlp + "gate_up_proj.weight": torch.cat([rows(named[f"{mlp}{p}_proj.weight"]) for p in ("gate", "up")]),
        mlp + "down_proj.weight": columns(named[mlp + "down_proj.weight"]),
        "model.layers.0.input_layernorm.weight": named["model.layers.0.input_layernorm.weight"],
        "model.layers.1.mlp.experts.w13_weight": torch.stack(
            [torch.cat([rows(e["gate_proj"]), rows(e["up_proj"])]) for e in experts]
        ),
        "model.layers.1.mlp.experts.w2_weight": torch.stack([columns(e["down_proj"]) for e in experts]),
    }


def answer(tensor_parallel: int, on_cpu: bool, change=lambda name, tensor: tensor) -> dict:
    ranks = []
    for rank in range(tensor_parallel):
        tensors = engine_tensors(tensor_parallel, rank)
        checksums = {
            name: engine_checksums._checksum(change(name, tensor.contiguous()), on_cpu)
            for name, tensor in tensors.items()
        }
        ranks.append({"checksums": checksums, "parallelism_info": [{"tp_rank": rank}]})
    return {URL: {"ranks": ranks}}


def expected(tensor_parallel: int, on_cpu: bool, sent=None) -> ExpectedChecksums:
    checksums = ExpectedChecksums({URL: {"tp_size": tensor_parallel, "device": "cpu" if on_cpu else "cuda"}})
    sent = weights() if sent is None else sent
    checksums.add(sent[:7])
    checksums.add(sent[7:])
    return checksums


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_sent_tensors_predict_the_engines(tensor_parallel, on_cpu):
    assert expected(tensor_parallel, on_cpu).compare(answer(tensor_parallel, on_cpu)) == 9 * tensor_parallel


@pytest.mark.parametrize("place", [0, -1])
def test_one_wrong_bit_is_found(place):
    def flip(name, tensor):
        if not name.endswith("qkv_proj.bias"):
            return tensor
        tensor = tensor.clone()
        tensor.view(torch.int32)[place] ^= 1
        return tensor

    for on_cpu in (True, False):
        with pytest.raises(WeightSyncError, match=r"http://e0 holds other values .*qkv_proj\.bias") as error:
            expected(2, on_cpu).compare(answer(2, on_cpu, flip))
        assert error.value.engines == (URL,)


def test_a_tensor_that_was_not_sent_is_found():
    sent = [item for item in weights() if "layernorm" not in item[0]]
    with pytest.raises(WeightSyncError, match="never sent: model.layers.0.input_layernorm.weight"):
        expected(1, True, sent).compare(answer(1, True))


def test_more_ranks_than_kv_heads(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_key_value_heads": KV_HEADS}))
    checksums = ExpectedChecksums({URL: {"tp_size": 4, "device": "cpu", "model_path": str(tmp_path)}})
    named = dict(weights())
    prefix = "model.layers.0.self_attn."
    checksums.add([(f"{prefix}{p}_proj.bias", named[f"{prefix}{p}_proj.bias"]) for p in "qkv"])
    ranks = []
    for rank in range(4):
        head = slice(rank // 2 * SIZE, (rank // 2 + 1) * SIZE)
        query = named[f"{prefix}q_proj.bias"][rank * SIZE : (rank + 1) * SIZE]
        fused = torch.cat([query, named[f"{prefix}k_proj.bias"][head], named[f"{prefix}v_proj.bias"][head]])
        checksum = engine_checksums._checksum(fused, True)
        ranks.append({"checksums": {prefix + "qkv_proj.bias": checksum}, "parallelism_info": [{"tp_rank": rank}]})
    assert checksums.compare({URL: {"ranks": ranks}}) == 4


def test_layouts_that_cannot_be_predicted_are_refused():
    with pytest.raises(ChecksumError, match="weight_sync.verify=false"):
        ExpectedChecksums({URL: {"tp_size": 2, "ep_size": 2}})
    with pytest.raises(ChecksumError, match="quantise"):
        ExpectedChecksums({URL: {"quantization": "fp8"}})
