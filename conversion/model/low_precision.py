"""How published weights of low precision are stored, by what config.json or hf_quant_config.json declares.

Read are DeepSeek's block FP8 and gpt-oss's MXFP4, and what two libraries write:

    compressed-tensors  float-quantized, int-quantized, pack-quantized, nvfp4-, mxfp4- and mxfp8- formats
    ModelOpt            FP8 (per tensor, per channel, in blocks), NVFP4, MXFP4, MXFP8, INT8 weights

Each is a ``Scheme``: numbers of few bits, and a scale for each block of them. The formulas are those of the libraries'
own decompression (``compressed_tensors.compressors`` 0.18, ``modelopt.torch.export.quant_utils`` 0.47). Any other kind
is refused by its name. Nothing here reads a tensor or imports torch: ``files.quantized_checkpoint`` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import translate
from functools import cached_property
from pathlib import Path
from typing import Any

from conversion.model.config_reader import DECLARATIONS, MOST, ConfigReader, UnsupportedArchitecture, shown
from conversion.model.module_patterns import CURE, Names, check_patterns
from untrusted import load_json

DECLARED_BESIDE = "hf_quant_config.json"
"""Where ModelOpt declares it, beside config.json."""
FLOATS = ("float32", "bfloat16", "float16")
_READ = "read are fp8 in blocks of 128 x 128, mxfp4, compressed-tensors and modelopt"


@dataclass(frozen=True)
class Scheme:
    """How a matrix [rows, columns] is stored: ``number * scale``, with a scale for each block of numbers.

    Attributes:
        stored: dtype of the tensor, in torch's words. In "uint8" two e2m1 numbers lie in a byte, the first in the lower
            half; in "int32" are 32 / ``bits`` integers, the first in the lowest bits, each plus 2^(bits - 1).
        block: rows and columns that share a scale; 0: all of them.
        weight: last part of the tensor's name.
        scale: last part of the scales' name.
        scale_dtypes: that scales may have; "uint8": the scale is 2^(byte - 127).
        second: last part of the name of one more float32 scale, of the whole matrix; empty: there is none.
        divides: whether the scales are divided by ``second``; they are multiplied with it otherwise.
        zero_points: whether a zero point is taken off each number first: one for each scale.
        ordered: whether ``weight_g_idx`` says which block each column belongs to.
    """

    stored: str
    bits: int
    block: tuple[int, int]
    weight: str = "weight"
    scale: str = "weight_scale"
    scale_dtypes: tuple[str, ...] = FLOATS
    second: str = ""
    divides: bool = False
    zero_points: bool = False
    ordered: bool = False

    @property
    def per_item(self) -> int:
        """Numbers in one element of the stored tensor."""
        return {"int32": 32 // self.bits, "uint8": 2}.get(self.stored, 1)


@dataclass(frozen=True)
class Quantization:
    """What is quantised in a directory, and how.

    Attributes:
        method: what declares it: "fp8", "mxfp4", "compressed-tensors" or "modelopt".
        place: file and key, for messages.
        schemes: whose names are looked through in order, then whose classes.
        ignored: modules that stay as they are.
        exact: whether modules that a scheme means are quantised, and no others. Of "fp8" the dtype says which are.
        dtype: of the weights that they stand for, in torch's words.
    """

    method: str
    place: str
    schemes: tuple[tuple[Names, Scheme], ...] = ()
    ignored: Names = field(default_factory=Names)
    exact: bool = True
    dtype: str = "bfloat16"

    @cached_property
    def leaves(self) -> frozenset[str]:
        """Last parts of the names of weights."""
        return frozenset(scheme.weight for _, scheme in self.schemes)

    def scheme_of(self, module: str) -> Scheme | None:
        """How a module's weight is stored; None: as it is.

        Raises:
            UnsupportedArchitecture: a pattern takes too long.
        """
        if self.ignored.by_name(module) or _merged(module) in self.ignored.whole:
            return None
        for names, scheme in self.schemes:
            if names.by_name(module):
                return scheme
        return next((scheme for names, scheme in self.schemes if names.by_class(module)), None)

    def is_block_fp8(self) -> bool:
        """Whether it is what ``block_fp8`` writes, in one of its forms."""
        return bool(self.schemes) and all(
            (scheme.stored, scheme.block) == ("float8_e4m3fn", (128, 128)) for _, scheme in self.schemes
        )


MERGED_BY_ENGINES = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Engines look modules up under the names of their own merged ones too, so lists of names may have these."""


def _merged(module: str) -> str:
    path, _, last = module.rpartition(".")
    return f"{path}.{MERGED_BY_ENGINES.get(last, last)}"


def declaration(hf_config: Mapping[str, Any]) -> str:
    """The key of config.json that declares a quantisation; empty where none does."""
    return next((key for key in DECLARATIONS if hf_config.get(key)), "")


def full_precision(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the model that the weights are dequantised to.

    Raises:
        UnsupportedArchitecture: as ``quantization_in``.
    """
    quantization_in(hf_config)
    return {key: value for key, value in hf_config.items() if key not in DECLARATIONS}


def quantization_of(directory: str | Path, hf_config: Mapping[str, Any]) -> Quantization | None:
    """How the weights of a directory are quantised; None: they are not.

    Raises:
        UnsupportedArchitecture: in another way than those that are read, or in two ways. The message names the file and
            the key.
    """
    config, beside = Path(directory) / "config.json", Path(directory) / DECLARED_BESIDE
    try:
        result = quantization_in(hf_config)
    except UnsupportedArchitecture as error:
        raise UnsupportedArchitecture(f"{config}: {error}") from None
    if not beside.is_file():
        return result
    if result is not None and result.method != "modelopt":
        raise UnsupportedArchitecture(
            f"{beside} is ModelOpt's, but {config} declares {result.method}: remove the one that the weights are not of"
        )
    try:
        declared = load_json(beside.read_bytes())
        other = _of_modelopt(ConfigReader(declared if isinstance(declared, Mapping) else {}), _dtype(hf_config))
    except UnsupportedArchitecture as error:
        raise UnsupportedArchitecture(f"{beside}: {error}") from None
    except (ValueError, OSError) as error:
        raise UnsupportedArchitecture(f"{beside} is not valid JSON: {error}") from None
    if result is None:
        return replace(other, place=str(beside))
    if [scheme for _, scheme in result.schemes] != [scheme for _, scheme in other.schemes]:
        raise UnsupportedArchitecture(
            f"{beside} and {config} declare different quantisations: remove the one that the weights are not of"
        )
    return result


def quantization_in(hf_config: Mapping[str, Any]) -> Quantization | None:
    """What config.json by itself declares; None: nothing.

    Raises:
        UnsupportedArchitecture: in another way than those that are read.
    """
    key = declaration(hf_config)
    if not key:
        return None
    result = hf_config[key]
    reader = ConfigReader(result if isinstance(result, Mapping) else {}, f"{key}.")
    method, dtype = reader.mapping.get("quant_method"), _dtype(hf_config)
    if method == "fp8":
        return replace(_of_block_fp8(reader.mapping, key), dtype=dtype)
    if method == "mxfp4":
        return None  # tensors of other names: ``files.hf_checkpoint`` knows them
    if method == "compressed-tensors":
        return _of_compressed_tensors(reader, key, dtype)
    if isinstance(method, str) and method.startswith("modelopt"):
        return _of_modelopt(reader, dtype, key)
    raise UnsupportedArchitecture(f"{key} has quant_method={shown(method)}, which is not read: {CURE}; {_READ}")


def _dtype(hf_config: Mapping[str, Any]) -> str:
    """That weights had before they were quantised: a model of float16 stays one."""
    result = hf_config.get("dtype") or hf_config.get("torch_dtype")
    return "float16" if result == "float16" else "bfloat16"


def _of_block_fp8(found: Mapping[str, Any], key: str) -> Quantization:
    _require(found, f"{key} has", "quant_method=fp8", weight_block_size=([128, 128],))
    _require(found, f"{key} has", "quant_method=fp8", fmt=(None, "float8_e4m3fn", "e4m3"))
    scheme = Scheme("float8_e4m3fn", 8, (128, 128), scale="weight_scale_inv", scale_dtypes=("float32",))
    everything = Names(linear=True, embeddings=True)
    return Quantization("fp8", f"config.json's {key}", ((everything, scheme),), exact=False)


def _require(found: Mapping[str, Any], where: str, what: str, **expected: tuple[Any, ...]) -> None:
    """Raise UnsupportedArchitecture where a key has none of the values that are read."""
    for key, values in expected.items():
        if found.get(key) not in values:
            raise UnsupportedArchitecture(
                f"{where} {key}={shown(found.get(key))}: of {what} only {shown(values[-1])} is read, or {CURE}"
            )


# --- compressed-tensors -----------------------------------------------------------------------------------------------

_PACKED_BITS = (1, 2, 4, 8)
"""That divide 32. Of others two layouts were published, by the library's release."""
_INTEGERS, _FLOAT8, _FLOAT4 = ("int", range(2, 9)), ("float", (8,)), ("float", (4,))
_FORMATS: Mapping[str, Sequence[tuple[str, Iterable[int]]]] = {
    "float-quantized": (_FLOAT8,),
    "int-quantized": (_INTEGERS,),
    "naive-quantized": (_FLOAT8, _INTEGERS),
    "pack-quantized": (("int", _PACKED_BITS),),
    "nvfp4-pack-quantized": (_FLOAT4,),
    "mxfp4-pack-quantized": (_FLOAT4,),
    "mxfp8-quantized": (_FLOAT8,),
}
_GROUP_SIZES = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32, "mxfp8-quantized": 32}


def _of_compressed_tensors(reader: ConfigReader, key: str, dtype: str) -> Quantization:
    status = reader.mapping.get("quantization_status")
    if status not in (None, "compressed"):
        raise UnsupportedArchitecture(
            f"{key}.quantization_status={shown(status)}: only weights that are stored compressed are read; {CURE}"
        )
    if reader.mapping.get("transform_config"):
        raise UnsupportedArchitecture(f"{key}.transform_config is set: rotated weights are not read; {CURE}")
    sparsity = reader.inner("sparsity_config").mapping
    if sparsity and sparsity.get("format") != "dense":
        raise UnsupportedArchitecture(
            f"{key}.sparsity_config has format={shown(sparsity.get('format'))}: sparse weights are not read; {CURE}"
        )
    groups = reader.inner("config_groups")
    if not groups.mapping and not reader.has("kv_cache_scheme"):
        raise UnsupportedArchitecture(f"{key}.config_groups is missing: it says how weights are stored; or {CURE}")
    schemes = []
    for name in groups.mapping:
        group = groups.inner(name)
        if group.has("weights"):
            form = group.text("format", reader.text("format", ""))
            names = _targets(group.items("targets"), f"{key}.config_groups.{name}.targets")
            schemes.append((names, _scheme(group.inner("weights"), form, f"{key}.config_groups.{name}")))
    ignored = _targets(reader.items("ignore"), f"{key}.ignore")
    return Quantization("compressed-tensors", f"config.json's {key}", tuple(schemes), ignored, dtype=dtype)


def _scheme(weights: ConfigReader, form: str, place: str) -> Scheme:
    if form not in _FORMATS:
        raise UnsupportedArchitecture(
            f"{place} has format={shown(form)}, which is not read: {CURE}; read are {', '.join(_FORMATS)}"
        )
    kind, bits = weights.text("type", "int").lower(), weights.integer("num_bits", 8)
    if not any(kind == each and bits in numbers for each, numbers in _FORMATS[form]):
        raise UnsupportedArchitecture(
            f"{place} has type={shown(kind)} and num_bits={bits} in the format {form}, which is not read: {CURE}"
        )
    symmetric = weights.flag("symmetric", True)
    if kind == "float" and not symmetric:
        raise UnsupportedArchitecture(f"{place} has symmetric=false with floating-point weights: {CURE}")
    if weights.mapping.get("dynamic"):
        raise UnsupportedArchitecture(f"{place} has dynamic={shown(weights.mapping['dynamic'])} weights: {CURE}")
    block = _block(weights, place)
    group_size = _GROUP_SIZES.get(form)
    if group_size is not None and block != (1, group_size):
        raise UnsupportedArchitecture(f"{place} is not in groups of {group_size}, as the format {form} is: {CURE}")
    if form == "nvfp4-pack-quantized":
        return Scheme(
            "uint8", 4, block, "weight_packed", scale_dtypes=("float8_e4m3fn",), second="weight_global_scale",
            divides=True,
        )  # fmt: skip
    if form == "mxfp4-pack-quantized":
        return Scheme("uint8", 4, block, "weight_packed", scale_dtypes=("uint8",))
    if form == "mxfp8-quantized":
        return Scheme("float8_e4m3fn", 8, block, scale_dtypes=("uint8",))
    packed = form == "pack-quantized"
    return Scheme(
        "int32" if packed else {"float": "float8_e4m3fn", "int": "int8"}[kind],
        bits,
        block,
        "weight_packed" if packed else "weight",
        zero_points=not symmetric,
        ordered=weights.mapping.get("actorder") in (True, "group", "dynamic"),
    )


def _block(weights: ConfigReader, place: str) -> tuple[int, int]:
    """Rows and columns that share a scale, by the strategy or what it follows from."""
    size = weights.mapping.get("group_size")
    strategy = weights.mapping.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy == "tensor":
        return 0, 0
    if strategy == "channel":
        return 1, 0
    if strategy in ("group", "tensor_group"):
        return 1, weights.integer("group_size")
    if strategy == "block":
        structure = weights.mapping.get("block_structure")
        if isinstance(structure, str):
            structure = [int(part) if part.isdecimal() and len(part) < 10 else 0 for part in structure.split("x")]
        if (
            isinstance(structure, list)
            and len(structure) == 2
            and all(type(size) is int and 0 < size <= MOST for size in structure)
        ):
            return structure[0], structure[1]
        raise UnsupportedArchitecture(
            f"{place}.weights.block_structure={shown(weights.mapping.get('block_structure'))} is no two sizes"
        )
    raise UnsupportedArchitecture(f"{place} has strategy={shown(strategy)}, which is not read: {CURE}")


def _targets(listed: list[Any], place: str) -> Names:
    """Names, patterns behind "re:", and the classes Linear and Embedding."""
    texts = _texts(listed, place)
    patterns = [text.removeprefix("re:") for text in texts if text.startswith("re:")]
    check_patterns(patterns, place)
    whole = frozenset(text for text in texts if not text.startswith("re:"))
    return Names(whole, patterns=tuple(patterns), linear="Linear" in whole, embeddings="Embedding" in whole)


def _texts(listed: list[Any], place: str) -> list[str]:
    for value in listed:
        if not isinstance(value, str):
            raise UnsupportedArchitecture(f"{place} holds {shown(value)}, which is no name")
    return listed


# --- ModelOpt ---------------------------------------------------------------------------------------------------------

_PRE_SCALED = "its inputs are scaled too (pre_quant_scale)"
_MODELOPT_REFUSED = {
    "W4A16_AWQ": _PRE_SCALED,
    "W4A8_AWQ": _PRE_SCALED,
    "NVFP4_AWQ": _PRE_SCALED,
    "W8A8_SQ_PER_CHANNEL": _PRE_SCALED,
    "NVFP4_SVD": "it adds low-rank matrices to them",
}


def _of_modelopt(reader: ConfigReader, dtype: str, key: str = "") -> Quantization:
    """Of hf_quant_config.json, or of what config.json has of it."""
    place = f"config.json's {key}" if key else DECLARED_BESIDE
    nested = reader.inner("quantization")
    if nested.mapping or not key:
        reader = nested
        if not nested.mapping:
            raise UnsupportedArchitecture("quantization is missing, which says how the weights are stored")
    listed = reader.items("ignore") or reader.items("exclude_modules")
    ignored = _excluded(_texts(listed, f"{place}: exclude_modules"), f"{place}: exclude_modules")
    algorithm = reader.text("quant_algo", "")
    schemes: list[tuple[Names, Scheme]] = []
    if algorithm == "MIXED_PRECISION":
        layers = reader.inner("quantized_layers")
        if not layers.mapping:
            raise UnsupportedArchitecture("quant_algo=MIXED_PRECISION without quantized_layers, which name them")
        grouped: dict[Scheme, list[str]] = {}
        for name in layers.mapping:
            layer = layers.inner(name)
            grouped.setdefault(_modelopt_scheme(layer.text("quant_algo"), layer), []).append(name)
        schemes = [(Names(frozenset(names), below=True), scheme) for scheme, names in grouped.items()]
    elif algorithm:
        schemes = [(Names(linear=True), _modelopt_scheme(algorithm, reader))]
    return Quantization("modelopt", place, tuple(schemes), ignored, dtype=dtype)


def _modelopt_scheme(algorithm: str, reader: ConfigReader) -> Scheme:
    name = algorithm.upper()
    if name in ("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8"):
        return Scheme(
            "uint8", 4, (1, _group_size(reader, 16)), scale_dtypes=("float8_e4m3fn",), second="weight_scale_2"
        )
    if name in ("MXFP4", "W4A8_MXFP4_FP8"):
        return Scheme("uint8", 4, (1, _group_size(reader, 32)), scale_dtypes=("uint8",))
    if name == "MXFP8":
        return Scheme("float8_e4m3fn", 8, (1, _group_size(reader, 32)), scale_dtypes=("uint8",))
    blocks = {"FP8": (0, 0), "FP8_PER_CHANNEL_PER_TOKEN": (1, 0), "FP8_PB_WO": (128, 128)}
    if name in blocks:
        return Scheme("float8_e4m3fn", 8, blocks[name])
    if name == "W8A16":
        return Scheme("int8", 8, (1, 0))
    why = _MODELOPT_REFUSED.get(name, "")
    raise UnsupportedArchitecture(
        f"ModelOpt has quantised the weights with quant_algo={shown(algorithm)}, which is not read"
        f"{f', since {why}' if why else ''}: {CURE}"
    )


def _group_size(reader: ConfigReader, default: int) -> int:
    """Columns that share a scale: config.json has the number only within config_groups."""
    groups = reader.inner("config_groups")
    result = [groups.inner(name).inner("weights").integer("group_size", default) for name in groups.mapping]
    return reader.integer("group_size", result[0] if result else default)


def _excluded(texts: list[str], place: str) -> Names:
    """Names with everything below them, and wildcards; without a point in them, of any part of a name too."""
    prefixes = [text for text in texts if text.endswith("*") and not set(text[:-1]) & _WILD]
    others = [text for text in texts if set(text) & _WILD and text not in prefixes]
    parts = [text for text in texts if "." not in text]
    for listed in (others, parts):
        check_patterns([translate(text) for text in listed if set(text) & _WILD], place)
    return Names(
        frozenset(text for text in texts if not set(text) & _WILD),
        below=True,
        prefixes=tuple(text[:-1] for text in prefixes),
        patterns=tuple(translate(text) for text in others),
        parts=frozenset(parts),
        part_patterns=tuple(translate(text) for text in parts if set(text) & _WILD),
    )


_WILD = frozenset("*?[")
