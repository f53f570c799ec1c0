"""What compressed-tensors and ModelOpt write, as sources: the libraries' own dequantisation is the reference."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from conversion.files.companions import copy_companions
from conversion.files.quantized_checkpoint import open_source
from conversion.files.safetensors_headers import HFCheckpointError
from conversion.files.workers import run_alone
from conversion.hf_to_mcore import TargetLayout, convert
from conversion.mcore_to_hf import export
from conversion.model.architecture import Architecture
from conversion.model.config_reader import UnsupportedArchitecture
from conversion.model.low_precision import quantization_of
from megatron_retool.parity.admission.shrink import shrunk
from megatron_retool.parity.admission.tiny_model import random_model, save_model
from megatron_retool.planning.models import MODELS
from tests.conversion.conftest import assert_same_bits, read_all, save_tokenizer

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FP4 = {"num_bits": 4, "type": "float", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 tensor": ("float-quantized", {**FP8, "strategy": "tensor"}),
    "fp8 channel": ("float-quantized", {**FP8, "strategy": "channel"}),
    "fp8 block": ("float-quantized", {**FP8, "strategy": "block", "block_structure": [16, 24]}),
    "fp8 naive": ("naive-quantized", {**FP8, "strategy": "channel"}),
    "mxfp8": ("mxfp8-quantized", {**FP8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}),
    "int8 channel": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8 tensor": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}),
    "int8 asymmetric": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}),
    "int4": ("pack-quantized", INT4),
    "int4 asymmetric": ("pack-quantized", {**INT4, "symmetric": False}),
    "int4 channel": ("pack-quantized", {"num_bits": 4, "type": "int", "group_size": -1, "symmetric": False}),
    "int4 tensor": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "tensor"}),
    "int4 ordered": ("pack-quantized", {**INT4, "symmetric": False, "actorder": "group"}),
    "int4 ordered weights": ("pack-quantized", {**INT4, "actorder": "weight"}),
    "int8 packed": ("pack-quantized", {**INT4, "num_bits": 8}),
    "int2": ("pack-quantized", {**INT4, "num_bits": 2}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {**FP4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
    ),
    "mxfp4": ("mxfp4-pack-quantized", {**FP4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}),
}


def compressed(weight: Tensor, name: str, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """What compressed-tensors stores of a matrix, and what it makes of that again."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    form, arguments = SCHEMES[name]
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, format=form)
    args = scheme.weights
    rows, columns = weight.shape
    order = None
    if args.actorder == "group":
        order = (torch.arange(columns) // args.group_size)[torch.randperm(columns, generator=generator)]
    sorted_weight = weight if order is None else weight[:, order.argsort()]
    if args.strategy == "tensor":
        lowest, highest = weight.min().reshape(1), weight.max().reshape(1)
    elif args.strategy == "block":
        height, width = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
        blocks = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
        lowest, highest = blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    else:
        groups = sorted_weight.view(rows, -1, args.group_size if (args.group_size or 0) > 0 else columns)
        lowest, highest = groups.amin(dim=-1), groups.amax(dim=-1)
    state = {"weight": weight}
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(weight.float().min(), weight.float().max())
    scale, zero_point = calculate_qparams(lowest, highest, args, state.get("weight_global_scale"))
    state |= {"weight_scale": scale.to(weight.dtype), "weight_zero_point": zero_point}
    if order is not None:
        state["weight_g_idx"] = order.int()
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    if args.strategy == "block":  # whose size its decompression takes from the shapes, which edges change
        return stored, dequantize(stored["weight"], stored["weight_scale"], args=args).contiguous()
    return stored, compressor.decompress(stored, scheme)["weight"]


def declared(name: str, **more: Any) -> dict[str, Any]:
    form, arguments = SCHEMES[name]
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "symmetric": True, **arguments}, "format": None}
    activations = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "input_activations": activations, "output_activations": None}},
        "ignore": ["lm_head"],
        "sparsity_config": {},
        "transform_config": {},
        "kv_cache_scheme": None,
        **more,
    }


def write(directory: Path, tensors: dict[str, Tensor], config: dict[str, Any], like: Path) -> Path:
    directory.mkdir()
    copy_companions(like, directory)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def config_of(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "config.json").read_text()))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model of a family in bfloat16, with experts or with fused matrices."""
    made: dict[str, Path] = {}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    published = {"qwen3_moe": "qwen3-30b-a3b", "phi3": "phi-4", "llama": "llama3.1-8b"}

    def make(family: str, dtype: torch.dtype = torch.bfloat16) -> Path:
        key = f"{family}_{str(dtype).removeprefix('torch.')}"
        if key not in made:
            config = {**shrunk(MODELS[published[family]], 2), **sizes}
            if "moe_intermediate_size" in config:
                config["moe_intermediate_size"] = 32
            directory = made[key] = save_model(random_model(config).to(dtype), tmp_path_factory.mktemp(key))
            save_tokenizer(directory)
            (directory / "config.json").write_text(
                json.dumps({**config_of(directory), "dtype": str(dtype).removeprefix("torch.")})
            )
        return made[key]

    return make


def is_quantized(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 2 and ".layers." in name and not name.endswith("mlp.gate.weight")


def quantized(source: Path, name: str, target: Path, **more: Any) -> tuple[Path, dict[str, Tensor]]:
    """A model as compressed-tensors writes it, and the weights that it stands for by the library's account."""
    generator = torch.Generator().manual_seed(0)
    stored, meant = dict[str, Tensor](), dict[str, Tensor]()
    for key, tensor in read_all(source).items():
        if is_quantized(key, tensor):
            parts, weight = compressed(tensor, name, generator)
            stored |= {key.removesuffix("weight") + leaf: part for leaf, part in parts.items()}
            meant[key] = weight.to(tensor.dtype)
        else:
            stored[key] = meant[key] = tensor
    config = {**config_of(source), "quantization_config": declared(name, **more)}
    return write(target, stored, config, source), meant


@pytest.mark.parametrize("name", SCHEMES)
def test_it_is_what_compressed_tensors_makes_of_it(name: str, plain, tmp_path: Path) -> None:
    directory, meant = quantized(plain("qwen3_moe"), name, tmp_path / "source")
    checkpoint, generator = open_source(directory), random.Random(0)
    assert checkpoint.tensors.keys() == meant.keys()
    for key, expected in meant.items():
        assert (checkpoint.tensors[key].shape, checkpoint.tensors[key].dtype) == (expected.shape, expected.dtype)
        assert_same_bits({key: checkpoint.read(key)}, {key: expected})
        for _ in range(3):
            start = generator.randrange(len(expected))
            rows = start, generator.randint(start + 1, len(expected))
            assert torch.equal(checkpoint.read(key, rows), expected[slice(*rows)]), (key, rows)
    checkpoint.check(weight_map_of(directory))


def weight_map_of(directory: Path) -> Any:
    from conversion.model.weight_map import WeightMap

    return WeightMap(Architecture.from_pretrained(directory, dequantized=True))


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3_moe", "nvfp4"), ("qwen3_moe", "int4 asymmetric"), ("phi3", "fp8 channel"), ("phi3", "int4 ordered")],
)
def test_a_model_is_converted_as_its_dequantised_version(family: str, name: str, plain, tmp_path: Path) -> None:
    source = plain(family)
    directory, meant = quantized(source, name, tmp_path / "source")
    dequantised = write(tmp_path / "dequantised", meant, config_of(source), source)
    layout = TargetLayout(tp=2, pp=2)
    report = convert(directory, tmp_path / "mcore", layout=layout, workers=2)
    convert(dequantised, tmp_path / "expected", layout=layout, workers=2)
    assert report["dequantized"]
    found, expected = files(tmp_path / "mcore"), files(tmp_path / "expected")
    assert found.keys() == expected.keys()
    assert [file for file in found if file.endswith(".distcp") and found[file] != expected[file]] == []
    assert config_of(tmp_path / "mcore" / "hf") == config_of(tmp_path / "expected" / "hf")
    export(tmp_path / "mcore", tmp_path / "hf", workers=1)
    assert_same_bits(read_all(tmp_path / "hf"), meant)


def test_a_model_of_float16_stays_one(plain, tmp_path: Path) -> None:
    directory, meant = quantized(plain("llama", torch.float16), "int4", tmp_path / "source")
    convert(directory, tmp_path / "mcore", workers=1)
    export(tmp_path / "mcore", tmp_path / "hf", workers=1)
    assert_same_bits(read_all(tmp_path / "hf"), meant)
    assert config_of(tmp_path / "hf")["dtype"] == "float16"


def test_the_earlier_name_of_a_declaration(plain, tmp_path: Path) -> None:
    directory, meant = quantized(plain("llama"), "int8 channel", tmp_path / "source")
    config = config_of(directory)
    config["compression_config"] = config.pop("quantization_config")
    (directory / "config.json").write_text(json.dumps(config))
    convert(directory, tmp_path / "mcore", workers=1)
    export(tmp_path / "mcore", tmp_path / "hf", workers=1)
    assert_same_bits(read_all(tmp_path / "hf"), meant)
    assert config_of(tmp_path / "hf").keys() == config.keys() - {"compression_config"}
    with pytest.raises(UnsupportedArchitecture, match="compression_config is set: start from the full-precision"):
        Architecture.from_pretrained(directory)


def test_groups_lists_and_caches(plain, tmp_path: Path) -> None:
    """Two formats in a model; layers that stay as they are; what engines alone use."""
    source = plain("llama")
    generator = torch.Generator().manual_seed(0)
    stored, meant = dict[str, Tensor](), dict[str, Tensor]()
    for key, tensor in read_all(source).items():
        name = "int4" if ".mlp." in key else "fp8 tensor" if "q_proj" in key or "o_proj" in key else ""
        meant[key] = tensor
        if not name:
            stored[key] = tensor
            continue
        parts, weight = compressed(tensor, name, generator)
        stored |= {key.removesuffix("weight") + leaf: part for leaf, part in parts.items()}
        meant[key] = weight.to(tensor.dtype)
        stored[key.removesuffix("weight") + "input_scale"] = torch.ones(1)
    stored |= {f"model.layers.{n}.self_attn.{x}_scale": torch.ones(1) for n in (0, 1) for x in "kv"}
    groups = {
        "mlp": {
            "targets": [r"re:.*mlp\.(gate|up|down)_proj$"],
            "weights": SCHEMES["int4"][1],
            "format": "pack-quantized",
        },
        "rest": {"targets": ["Linear"], "weights": SCHEMES["fp8 tensor"][1], "format": "float-quantized"},
        "attention": {"targets": ["LlamaAttention"], "weights": None},
    }
    # An engine's name of a merged module stands for its parts.
    ignore = ["lm_head", "re:.*v_proj", "model.layers.0.self_attn.qkv_proj", "model.layers.1.self_attn.k_proj"]
    ignore += ["model.layers.0.self_attn.k_proj"]
    declaration = declared(
        "int4", format="mixed-precision", config_groups=groups, ignore=ignore, kv_cache_scheme={"num_bits": 8}
    )
    config = {**config_of(source), "quantization_config": declaration}
    with pytest.raises(HFCheckpointError, match=r"layers\.0\.self_attn\.q_proj\.weight is float8_e4m3fn, but .* not"):
        open_source(write(tmp_path / "ignored", stored, config, source))
    declaration["ignore"].remove("model.layers.0.self_attn.qkv_proj")
    directory = write(tmp_path / "source", stored, config, source)
    convert(directory, tmp_path / "mcore", workers=1)
    export(tmp_path / "mcore", tmp_path / "hf", workers=1)
    assert_same_bits(read_all(tmp_path / "hf"), meant)


UP = "model.layers.1.mlp.up_proj."
Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fp8 tensor", lambda t: t.pop(UP + "weight_scale"), rf"lacks tensor {UP}weight_scale, the scales of the FP8"),
        ("int4", lambda t: t.pop(UP + "weight_scale"), rf"{UP}weight_scale, the scales of the quantised w"),
        ("nvfp4", lambda t: t.pop(UP + "weight_global_scale"), rf"{UP}weight_global_scale, the second scale of"),
        ("int4 asymmetric", lambda t: t.pop(UP + "weight_zero_point"), rf"{UP}weight_zero_point, the zero points of"),
        ("int4 ordered", lambda t: t.pop(UP + "weight_g_idx"), rf"{UP}weight_g_idx, the order of columns of"),
        (
            "fp8 channel",
            lambda t: t.update({UP + "weight_scale": t[UP + "weight_scale"].t().contiguous()}),
            rf"{UP}weight_scale has shape \(1, 96\), but {UP}weight of shape \(96, 64\) has \(96, 1\) blocks of 1 x 64",
        ),
        (
            "int4",
            lambda t: t.update({UP + "weight_scale": t[UP + "weight_scale"][:, :1].contiguous()}),
            rf"{UP}weight_scale has shape \(96, 1\), but .* has \(96, 2\) blocks of 1 x 32",
        ),
        (
            "int4 asymmetric",
            lambda t: t.update({UP + "weight_zero_point": t[UP + "weight_zero_point"][:3].contiguous()}),
            rf"{UP}weight_zero_point has shape \(3, 2\), but the \(96, 2\) scales of {UP}weight have \(12, 2\) zero",
        ),
        (
            "int4",
            lambda t: t.update({UP + "weight_shape": torch.tensor([96, 32])}),
            rf"{UP}weight_shape is \[96, 32\], but {UP}weight_packed of shape \(96, 8\) holds 96 rows of 64",
        ),
        ("int4", lambda t: t.update({UP + "weight_shape": torch.tensor([96])}), rf"{UP}weight_shape is \[96\], but"),
        ("int4", lambda t: t.update({UP + "weight_shape": torch.tensor(96)}), rf"{UP}weight_shape is \[96\], but"),
        (
            "fp8 channel",
            lambda t: t[UP + "weight_scale"].fill_(float("nan")),
            rf"{UP}weight_scale has a scale that is no finite number from 0 on",
        ),
        ("mxfp4", lambda t: t[UP + "weight_scale"].fill_(255), rf"{UP}weight_scale has a scale that is no finite"),
        ("int4", lambda t: t[UP + "weight_scale"].neg_(), rf"{UP}weight_scale has a scale that is no finite"),
        ("nvfp4", lambda t: t[UP + "weight_global_scale"].zero_(), rf"{UP}weight_global_scale is 0, which scales"),
        (
            "nvfp4",
            lambda t: t.update({UP + "weight_scale": t[UP + "weight_scale"].bfloat16()}),
            rf"{UP}weight_scale has dtype torch.bfloat16, not float8_e4m3fn",
        ),
        ("int4 ordered", lambda t: t[UP + "weight_g_idx"].zero_(), rf"{UP}weight_g_idx does not put the columns"),
        ("int4 ordered", lambda t: t[UP + "weight_g_idx"].fill_(9), rf"{UP}weight_g_idx does not put the columns"),
        (
            "fp8 tensor",
            lambda t: (t.pop(Q + "weight_scale"), t.update({Q + "weight": t[Q + "weight"].bfloat16()})),
            rf"{Q}weight is bfloat16, but config.json's quantization_config declares it as quantised",
        ),
        (
            "fp8 tensor",
            lambda t: t.update({Q + "weight": t[Q + "weight"].bfloat16()}),
            rf"holds the scales {Q}weight_scale, but {Q}weight is no float8_e4m3fn weight",
        ),
        (
            "fp8 tensor",
            lambda t: t.update({Q + "weight": t[Q + "weight"].view(torch.int8)}),
            rf"{Q}weight has dtype torch.int8, but .* declares {Q[:-1]} as weight of float8_e4m3fn",
        ),
        (
            "int4",
            lambda t: t.update({UP + "weight_zero_point": torch.zeros(12, 2, dtype=torch.int32)}),
            rf"{UP}weight_zero_point changes the weight of {UP[:-1]} in a way that",
        ),
        (
            "fp8 tensor",
            lambda t: t.update({UP + "pre_quant_scale": torch.ones(64)}),
            rf"{UP}pre_quant_scale changes the weight of {UP[:-1]} in a way that",
        ),
        (
            "fp8 tensor",
            lambda t: [
                (t.pop(n + "_scale"), t.update({n: t[n].bfloat16()}))
                for n in [n for n in t if n + "_scale" in t]
            ],
            r"no tensor is float8_e4m3fn, and model\.layers\.0\..* is bfloat16",
        ),
        (
            "int4",
            lambda t: t.update({UP + "weight": torch.zeros(96, 64).bfloat16()}),
            rf"holds {UP}weight_packed beside {UP}weight: remove one",
        ),
    ],
)  # fmt: skip
def test_what_does_not_belong_together_is_named(name: str, change, message: str, plain, tmp_path: Path) -> None:
    directory, _ = quantized(plain("llama"), name, tmp_path / "whole")
    tensors = read_all(directory)
    change(tensors)
    damaged = write(tmp_path / "source", tensors, config_of(directory), directory)
    with pytest.raises(HFCheckpointError, match=message):
        convert(damaged, tmp_path / "mcore", workers=1)
    assert not (tmp_path / "mcore").exists()


def group(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"g": {"targets": ["Linear"], "weights": {**SCHEMES["int4"][1], **weights}}}}


def modelopt(**quantization: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", **quantization}


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ({"quant_method": method, "bits": 4}, f'quantization_config has quant_method="{method}", which is not read')
        for method in ("gptq", "awq", "bitsandbytes", "fp_quant", "torchao", "hqq", "aqlm", "quark", "auto-round")
    ]
    + [
        (declared("int4", **group(group_size=-5)), r"config_groups\.g\.weights\.group_size=-5 is not a positive"),
        (declared("int4", **group(group_size=0)), r"config_groups\.g\.weights\.group_size=0 is not a positive"),
        (declared("int4", **group(strategy="spiral")), 'strategy="spiral", which is not read'),
        (declared("int4", **group(num_bits=3)), r'type="int" and num_bits=3 in the format pack-quantized, which'),
        (declared("int4", **group(type="float")), r'type="float" and num_bits=4 in the format pack-quantized'),
        (declared("int4", **group(dynamic=True)), "dynamic=true weights"),
        (declared("int4", format="marlin-24"), 'format="marlin-24", which is not read: start from the full'),
        (declared("int4", format=None), 'format="", which is not read'),
        (declared("int4", config_groups={}), r"quantization_config\.config_groups is missing"),
        (declared("int4", config_groups={"W4A16": ["Linear"]}), r"config_groups\.W4A16=\[\"Linear\"\] is no mapping"),
        (declared("int4", quantization_status="frozen"), r'quantization_status="frozen": only weights'),
        (declared("int4", sparsity_config={"format": "sparse-24-bitmask"}), 'format="sparse-24-bitmask": sparse'),
        (declared("int4", transform_config={"R1": {}}), "transform_config is set: rotated weights"),
        (declared("nvfp4", **{"config_groups": {"g": {"targets": ["Linear"], "weights": {**SCHEMES["nvfp4"][1],
            "group_size": 32}}}}), "is not in groups of 16, as the format nvfp4-pack-quantized is"),
        (declared("fp8 block", config_groups={"g": {"targets": ["Linear"], "weights": {**SCHEMES["fp8 block"][1],
            "block_structure": [0, 128]}}}), r"block_structure=\[0, 128\] is no two sizes"),
        (declared("fp8 tensor", config_groups={"g": {"targets": ["Linear"], "weights": {**SCHEMES["fp8 tensor"][1],
            "symmetric": False}}}), "symmetric=false with floating-point"),
        (declared("int4", ignore=["re:("]), r"quantization_config\.ignore: \"\(\" is no pattern"),
        (declared("int4", ignore=["re:" + "a" * 2000]), "is no pattern: more than 1000 characters"),
        (declared("int4", ignore=[3]), "quantization_config.ignore holds 3, which is no name"),
        (modelopt(quant_algo="FP8", ignore=[None]), "exclude_modules holds null, which is no name"),
        (declared("int4", ignore=["re:(?:([a-z]|.)+)+[!?]"]), "takes more than a second for"),
        (modelopt(quant_algo="W4A16_AWQ"), 'quant_algo="W4A16_AWQ", which is not read, since its inputs are scaled'),
        (modelopt(quant_algo="NVFP4_SVD"), 'quant_algo="NVFP4_SVD", which is not read, since it adds low-rank'),
        (modelopt(quant_algo="INT3"), 'quant_algo="INT3", which is not read: start from the full-precision weights'),
        (modelopt(quant_algo="MIXED_PRECISION"), "quant_algo=MIXED_PRECISION without quantized_layers"),
        (modelopt(quant_algo="NVFP4", group_size=-16), "group_size=-16 is not a positive integer"),
    ],
)  # fmt: skip
def test_other_declarations_are_named(declaration: dict[str, Any], message: str, plain, tmp_path: Path) -> None:
    directory, _ = quantized(plain("llama"), "int4", tmp_path / "source")
    config = {**config_of(directory), "quantization_config": declaration}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedArchitecture, match=message):
        convert(directory, tmp_path / "mcore", workers=1)
    assert not (tmp_path / "mcore").exists()


# --- ModelOpt ---------------------------------------------------------------------------------------------------------

_ALGORITHMS: dict[str, tuple[str, int]] = {
    "FP8": ("fp8", 0),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_pc_pt", 0),
    "fp8_pb_wo": ("fp8_pb_wo", 128),
    "W8A16": ("int8_wo", 0),
    "NVFP4": ("nvfp4", 16),
    "W4A16_NVFP4": ("w4a16_nvfp4", 16),
    "W4A8_MXFP4_FP8": ("w4a8_mxfp4_fp8", 32),
    "MXFP8": ("mxfp8", 32),
}


def _with_modelopt(weight: Tensor) -> dict[str, tuple[dict[str, Tensor], Tensor]]:
    """What ModelOpt stores of a matrix by each algorithm, and what it makes of that again, in float32."""
    from modelopt.torch.export.quant_utils import from_quantized_weight, to_quantized_weight
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

    rows, columns = weight.shape
    found: dict[str, tuple[dict[str, Tensor], Tensor]] = {}
    for algorithm, (kind, size) in _ALGORITHMS.items():
        second = None
        known: dict[str, Any] = {"dtype": torch.float32}
        if "nvfp4" in kind:
            scale, second = NVFP4QTensor.get_weights_scaling_factor(weight, size)
            known |= {"scale": scale, "double_scale": second, "block_sizes": {-1: size}}
        elif "mxfp4" in kind:
            scale = MXFP4QTensor.quantize(weight, size)[1].reshape(rows, -1)
            known |= {"scale": scale, "block_sizes": {-1: size}}
        elif kind == "mxfp8":
            scale = MXFP8QTensor.get_weights_scaling_factor(weight)
            known |= {"scale": scale, "block_sizes": {-1: size}}
        elif kind == "fp8_pb_wo":
            scale = weight.view(rows // size, size, columns // size, size).abs().amax(dim=(1, 3), keepdim=True) / 448
            known |= {"scale": scale.reshape(rows // size, columns // size), "block_sizes": {-1: size, -2: size}}
        elif kind == "int8_wo":
            scale = weight.abs().amax(dim=1) / 127
        else:
            scale = (weight.abs().amax(dim=1) if kind == "fp8_pc_pt" else weight.abs().max()) / 448
            known |= {"scale": scale[:, None] if scale.dim() else scale}
        numbers = to_quantized_weight(weight, scale, kind, second, size)
        classes = {"nvfp4": NVFP4QTensor, "mxfp4": MXFP4QTensor, "mxfp8": MXFP8QTensor}
        of = next((each for part, each in classes.items() if part in kind), FP8QTensor)
        if kind == "int8_wo":
            meant = from_quantized_weight(numbers, scale, kind, torch.float32)
        else:
            meant = of(weight.shape, torch.float32, numbers).dequantize(**known)
        parts = {"weight": numbers, "weight_scale": scale, "weight_scale_2": second, "input_scale": torch.ones(())}
        found[algorithm] = {leaf: part for leaf, part in parts.items() if part is not None}, meant
    return found


@pytest.fixture(scope="module")
def of_modelopt() -> dict[str, tuple[dict[str, Tensor], Tensor]]:
    """In a process of its own, since ModelOpt changes other libraries where it is imported."""
    if find_spec("modelopt") is None:
        pytest.skip("nvidia-modelopt is not installed")
    torch.manual_seed(0)
    found: dict[str, tuple[dict[str, Tensor], Tensor]] = run_alone(_with_modelopt, torch.randn(128, 256))
    return found


def beside(directory: Path, **quantization: Any) -> None:
    """Declare it in ModelOpt's own file alone."""
    text = json.dumps({"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": None, **quantization}})
    (directory / "hf_quant_config.json").write_text(text)


@pytest.mark.parametrize("algorithm", _ALGORITHMS)
def test_it_is_what_modelopt_makes_of_it(algorithm: str, of_modelopt, plain, tmp_path: Path) -> None:
    parts, meant = of_modelopt[algorithm]
    config = config_of(plain("llama"))
    directory = write(tmp_path / "source", {UP + leaf: part for leaf, part in parts.items()}, config, plain("llama"))
    beside(directory, quant_algo=algorithm, group_size=_ALGORITHMS[algorithm][1] or None, exclude_modules=["lm_head"])
    checkpoint = open_source(directory)
    assert list(checkpoint.tensors) == [UP + "weight"]
    assert_same_bits({"": checkpoint.read(UP + "weight")}, {"": meant.bfloat16()})
    assert torch.equal(checkpoint.read(UP + "weight", (37, 95)), meant.bfloat16()[37:95])


def fp8_of(tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = tensor.float().abs().max() / 448
    numbers = (tensor.float() / scale).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale}, (numbers.float() * scale).bfloat16()


def modelopt_directory(source: Path, target: Path) -> tuple[Path, dict[str, Tensor]]:
    """A model in FP8 whose attention of layer 0 is not quantised."""
    stored, meant = dict[str, Tensor](), dict[str, Tensor]()
    for key, tensor in read_all(source).items():
        stored[key] = meant[key] = tensor
        if is_quantized(key, tensor) and "layers.0.self_attn" not in key:
            parts, meant[key] = fp8_of(tensor)
            stored |= {key.removesuffix("weight") + leaf: part for leaf, part in parts.items()}
    return write(target, stored, config_of(source), source), meant


ROUTERS = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]


@pytest.mark.parametrize("where", ["beside", "config.json", "both", "mixed"])
def test_a_model_of_modelopt_wherever_it_is_declared(where: str, plain, tmp_path: Path) -> None:
    source = plain("qwen3_moe")
    directory, meant = modelopt_directory(source, tmp_path / "source")
    excluded = [*ROUTERS, "model.layers.0.self_attn*"]
    if where == "both":
        excluded = ["lm_?ead", "*mlp.gate", "model.layers.0.*attn*"]
    if where == "mixed":
        names = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
        names += [f"model.layers.1.self_attn.{x}_proj" for x in "qkvo"]
        beside(
            directory, quant_algo="MIXED_PRECISION", quantized_layers={name: {"quant_algo": "FP8"} for name in names}
        )
    elif where != "config.json":
        beside(directory, quant_algo="FP8", kv_cache_quant_algo="FP8", exclude_modules=excluded)
    if where in ("config.json", "both"):
        declaration = modelopt(quant_algo="FP8", ignore=excluded, config_groups={"group_0": {"weights": {}}})
        config = {**config_of(directory), "quantization_config": declaration}
        (directory / "config.json").write_text(json.dumps(config))
    convert(directory, tmp_path / "mcore", layout=TargetLayout(tp=2, ep=2), workers=2)
    assert not (tmp_path / "mcore" / "hf" / "hf_quant_config.json").exists()
    assert Architecture.from_pretrained(tmp_path / "mcore" / "hf").family == "qwen3_moe"
    export(tmp_path / "mcore", tmp_path / "hf", workers=1)
    assert_same_bits(read_all(tmp_path / "hf"), meant)


def test_a_cache_alone_leaves_weights_as_they_are(plain, tmp_path: Path) -> None:
    source = plain("llama")
    tensors = read_all(source)
    scales = {f"model.layers.{n}.self_attn.{x}_proj.{x}_scale": torch.ones(()) for n in (0, 1) for x in "kv"}
    directory = write(tmp_path / "source", tensors | scales, config_of(source), source)
    beside(directory, quant_algo=None, kv_cache_quant_algo="FP8")
    report = convert(directory, tmp_path / "mcore", workers=1)
    export(tmp_path / "mcore", tmp_path / "hf", workers=1)
    assert not report["dequantized"]
    assert_same_bits(read_all(tmp_path / "hf"), tensors)


def test_files_that_contradict_each_other(plain, tmp_path: Path) -> None:
    directory, _ = modelopt_directory(plain("llama"), tmp_path / "source")
    config = config_of(directory)

    def refused(message: str) -> None:
        with pytest.raises(UnsupportedArchitecture, match=message):
            convert(directory, tmp_path / "mcore", workers=1)

    beside(directory, quant_algo="FP8", exclude_modules=["lm_head"])
    with pytest.raises(HFCheckpointError, match=r"layers\.0\.self_attn\.q_proj\.weight is bfloat16, but .*hf_qu"):
        convert(directory, tmp_path / "mcore", workers=1)
    beside(directory, quant_algo="NVFP4")
    with pytest.raises(HFCheckpointError, match=r"has dtype torch\.float8_e4m3fn, but .* as weight of uint8"):
        convert(directory, tmp_path / "mcore", workers=1)
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": modelopt(quant_algo="FP8")}))
    refused(r"hf_quant_config\.json and .*config\.json declare different quantisations")
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": declared("int4")}))
    refused(r"hf_quant_config\.json is ModelOpt's, but .*config\.json declares compressed-tensors")
    (directory / "config.json").write_text(json.dumps(config))
    for text, message in [("{", " is not valid JSON"), ("[]", ": quantization is missing"), ("{}", ": quantiz")]:
        (directory / "hf_quant_config.json").write_text(text)
        refused(rf"hf_quant_config\.json{message}")
    assert quantization_of(shutil.copytree(plain("llama"), tmp_path / "plain"), config) is None
