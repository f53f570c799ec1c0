"""Transformer Engine without its compiled extension: modules are built and wired as on a GPU, and torch computes.

What is real: Transformer Engine's Python (modules, parameters, recipes, extra states) and Megatron-Core's spec of it.
What is not: everything that ``transformer_engine_torch`` holds. Its names exist and raise when they are called; the
forwards that the learner reaches are torch's here.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

VERSION = "2.20.2"
FOLDER = Path(sys.prefix) / "transformer_engine_only"
"""Where scripts/setup.sh puts requirements/transformer_engine_only.txt on hosts without a GPU."""

_kernel_numbers: dict[str, int] = {}


class KernelMissing(RuntimeError):
    """A kernel of the extension was called."""


class _Kernel:
    """A function or an enum's member of the extension: can be named, compared and counted, not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise KernelMissing(f"transformer_engine_torch.{self._name} needs a GPU")

    def __getattr__(self, name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self._name}.{name}")

    def __int__(self) -> int:
        return _kernel_numbers.setdefault(self._name, len(_kernel_numbers))

    __index__ = __int__

    def __hash__(self) -> int:
        return hash(self._name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kernel) and other._name == self._name


class _Class(type):
    """A class or an enum of the extension."""

    seen: dict[str, set[str]] = {}

    @property
    def __members__(cls) -> dict[str, Any]:
        return dict.fromkeys(_Class.seen.get(cls.__name__, ()))

    def __getattr__(cls, name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        _Class.seen.setdefault(cls.__name__, set()).add(name)
        return _Kernel(f"{cls.__name__}.{name}")


_TensorsForwards = IntEnum(
    "FP8FwdTensors", [f"GEMM{gemm}_{name}" for gemm in (1, 2, 3) for name in ("INPUT", "WEIGHT", "OUTPUT")], start=0
)
_TensorsBackwards = IntEnum(
    "FP8BwdTensors", [f"GRAD_{name}{gemm}" for gemm in (1, 2, 3) for name in ("OUTPUT", "INPUT")], start=0
)
"""Of these the numbers matter: they are places in a module's lists of quantisers."""


class _Extension(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not name[0].isupper():
            return _Kernel(name)
        return self.__dict__.setdefault(name, _Class(name, (), {}))


def install(folder: Path) -> None:
    """Make Transformer Engine importable in this process, from ``folder``; before Megatron-Core is imported.

    The learner builds its models with it, on the host: torch's Adam steps them.
    """
    place_extension(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what Megatron-Core takes in place of kernels
        # Megatron-Core takes its other choice, torch's Adam.
        sys.modules["transformer_engine.pytorch.optimizers"] = None
        import megatron_retool.learner.learner  # noqa: F401  so that the ranks need not import it
    compute_layers_with_torch()
    compute_attention_with_torch()
    _build_as_on_a_gpu()


def place_extension(folder: Path, computed: Mapping[str, Callable[..., Any]] | None = None) -> None:
    """Import Transformer Engine from ``folder``, with an extension whose kernels raise, but for ``computed``."""
    sys.path.insert(0, str(folder))
    # Without it Transformer Engine refuses to be imported where its core library is not installed.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    extension = _Extension("transformer_engine_torch")
    extension.__spec__ = None
    extension.__dict__.update(FP8FwdTensors=_TensorsForwards, FP8BwdTensors=_TensorsBackwards)
    for name, function in (computed or {}).items():
        setattr(extension, name, function)
    sys.modules["transformer_engine_torch"] = extension

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the extension
        import transformer_engine.common

        transformer_engine.common.load_framework_extension = lambda framework: None
        import transformer_engine.pytorch


@contextlib.contextmanager
def as_if_gpu(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """torch says that there is a GPU, which Transformer Engine's constructors and recipes ask it first."""
    properties = types.SimpleNamespace(
        major=capability[0], minor=capability[1], name="a GPU", multi_processor_count=132, total_memory=141 << 30
    )
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: properties,
    }
    before, release = {name: getattr(torch.cuda, name) for name in answers}, torch.version.cuda
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.version.cuda = "13.0"
    try:
        yield
    finally:
        torch.version.cuda = release
        for name, original in before.items():
            setattr(torch.cuda, name, original)


def _build_as_on_a_gpu() -> None:
    """The learner finds Transformer Engine on this host, and builds its models as on a GPU."""
    from megatron_retool.learner import model, precision

    found = precision.Acceleration(cuda=False, transformer_engine=VERSION)
    precision.Acceleration.detect = classmethod(lambda cls: found)
    build = model.PackedModel.__init__

    def build_as_if_gpu(self: Any, *args: Any, **kwargs: Any) -> None:
        with as_if_gpu():
            build(self, *args, **kwargs)

    model.PackedModel.__init__ = build_as_if_gpu


def compute_layers_with_torch() -> None:
    """Give norms, linear layers and the router's product forwards of torch's, after Megatron-Core is imported."""
    import transformer_engine.pytorch as te
    from megatron.core.transformer.moe import moe_utils

    te.RMSNorm.forward = lambda self, x, *_, **__: _norm(self, x, self.weight)
    te.Linear.forward = lambda self, x, is_first_microbatch=None: _linear(self, x)
    te.LayerNormLinear.forward = _norm_and_linear
    te.GroupedLinear.forward = _grouped_linear
    moe_utils.te_general_gemm = _general_gemm


def compute_attention_with_torch() -> None:
    """The same of attention and rotary embeddings."""
    import transformer_engine.pytorch as te
    from megatron.core.models.common.embeddings import rope_utils

    te.DotProductAttention.forward = _attention
    rope_utils.fused_apply_rotary_pos_emb_thd = _rotate_packed


def _epsilon(module: Any) -> float:
    return float(module.eps)


def _linear(module: Any, x: Tensor) -> Any:
    """Column or row parallel, with the collectives that Transformer Engine does inside the kernel's call."""
    from megatron.core.tensor_parallel import mappings

    parallel = module.tp_size > 1
    if parallel and module.parallel_mode == "column":
        if module.sequence_parallel:
            x = mappings.gather_from_sequence_parallel_region(x, group=module.tp_group)
        else:
            x = mappings.copy_to_tensor_model_parallel_region(x, group=module.tp_group)
    bias = getattr(module, "bias", None)
    bias = bias if bias is not None and bias.numel() else None
    y = F.linear(x, module.weight, None if module.te_return_bias else bias)
    if parallel and module.parallel_mode == "row":
        if module.sequence_parallel:
            y = mappings.reduce_scatter_to_sequence_parallel_region(y, group=module.tp_group)
        else:
            y = mappings.reduce_from_tensor_model_parallel_region(y, group=module.tp_group)
    return (y, bias) if module.te_return_bias else y


def _norm_and_linear(self: Any, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
    return _linear(self, _norm(self, x, self.layer_norm_weight))


def _norm(module: Any, x: Tensor, weight: Tensor) -> Tensor:
    weight = 1.0 + weight if module.zero_centered_gamma else weight
    return F.rms_norm(x, x.shape[-1:], weight, _epsilon(module))


def _grouped_linear(self: Any, x: Tensor, m_splits: Any, is_first_microbatch: bool | None = None) -> Any:
    parts = torch.split(x, [int(rows) for rows in m_splits])
    biases = [getattr(self, f"bias{i}") if self.use_bias else None for i in range(len(parts))]
    added = biases if self.apply_bias else [None] * len(parts)
    y = torch.cat([F.linear(part, getattr(self, f"weight{i}"), added[i]) for i, part in enumerate(parts)])
    return (y, biases) if self.return_bias else y


def _attention(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None = None,
    *,
    qkv_format: str,
    attn_mask_type: str,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    **_: Any,
) -> Tensor:
    """Packed sequences one at a time: [t, heads, dim] -> [t, heads * dim], of this context-parallel rank's tokens."""
    assert (qkv_format, attn_mask_type) == ("thd", "padding_causal") and attention_mask is None
    assert torch.equal(cu_seqlens_q, cu_seqlens_kv)
    window = (self.window_size or (-1, 0))[0]
    bounds = cu_seqlens_q.tolist()
    group, ranks, rank = self.cp_group, 1, 0
    if group is not None and group.size() > 1:
        from megatron.core.tensor_parallel import mappings

        ranks, rank = group.size(), group.rank()
        order = torch.cat([torch.cat(_own_places(bounds, ranks, other)) for other in range(ranks)]).argsort()
        key, value = (
            mappings.gather_from_sequence_parallel_region(x, group=group).index_select(0, order) for x in (key, value)
        )
    outputs = []
    own = _own_places(bounds, ranks, rank)
    parts = query.split([len(places) for places in own])
    for start, end, places, part in zip(bounds[:-1], bounds[1:], own, parts, strict=True):
        q, k, v = part.transpose(0, 1), key[start:end].transpose(0, 1), value[start:end].transpose(0, 1)
        behind = (places - start)[:, None] - torch.arange(end - start)
        mask = behind >= 0
        if window >= 0:
            mask &= behind <= window
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, scale=self.softmax_scale)
        outputs.append(out.transpose(0, 1).flatten(1))
    return torch.cat(outputs)


def _own_places(bounds: list[int], ranks: int, rank: int) -> list[Tensor]:
    """Of each sequence the places, in the whole micro-batch, of the tokens that a context-parallel rank has.

    Transformer Engine's order: a sequence is cut into 2 x ranks chunks, of which a rank has one from each end.
    """
    found = []
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        chunks = torch.arange(start, end).chunk(2 * ranks) if ranks > 1 else (torch.arange(start, end),)
        found.append(torch.cat([chunks[rank], chunks[-1 - rank]]) if ranks > 1 else chunks[0])
    return found


def _general_gemm(
    a: Tensor, b: Tensor, dtype: torch.dtype, layout: str = "TN", bias: Tensor | None = None, **_: Any
) -> list[Tensor | None]:
    """The router's products: cuBLAS's column-major order of [rows, k] b and [columns, k] a."""
    left = b.t() if layout[1] == "T" else b
    right = a.t() if layout[0] == "T" else a
    product = left.to(dtype) @ right.to(dtype)
    return [product if bias is None else product + bias.to(dtype), None, None, None]


def _rotate_packed(
    x: Tensor, cu_seqlens: Tensor, frequencies: Tensor, cp_size: int = 1, cp_rank: int = 0, interleaved: bool = False
) -> Tensor:
    """[t, heads, dim] with the angles [longest, 1, 1, r] of each token's place in its sequence; the first r turn."""
    assert not interleaved
    bounds = cu_seqlens.tolist()
    places = [own - start for own, start in zip(_own_places(bounds, cp_size, cp_rank), bounds[:-1], strict=True)]
    angles = frequencies[:, 0].index_select(0, torch.cat(places))
    turned, rest = x.split([angles.size(-1), x.size(-1) - angles.size(-1)], -1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * angles.cos().to(x.dtype) + torch.cat([-second, first], dim=-1) * angles.sin().to(x.dtype)
    return torch.cat([turned, rest], -1)
