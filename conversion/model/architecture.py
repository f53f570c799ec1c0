"""What the project reads from a Hugging Face ``config.json``: one frozen record that every room shares.

The learner builds its Megatron-Core model from an ``Architecture``, the weight map shapes its tensors by it, and the
FLOP count is a function of it.  Nothing else parses ``config.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

QWEN2 = "qwen2"
QWEN3 = "qwen3"
QWEN3_MOE = "qwen3_moe"
LLAMA = "llama"
MISTRAL = "mistral"
FAMILIES = (QWEN2, QWEN3, QWEN3_MOE, LLAMA, MISTRAL)
"""Values of ``model_type`` that the project knows. Qwen2.5 calls itself qwen2."""


class UnsupportedArchitecture(ValueError):
    """config.json is malformed, or describes a model that no family here covers. The message names the key."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (``rope_type: llama3``) or linear position interpolation (``linear``)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer with RMSNorm, rotary positions, SwiGLU and grouped-query attention.

    Sizes are whole-model sizes in elements, before any parallelism and before vocabulary padding.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads (HF: num_key_value_heads)."""
    head_dim: int
    ffn_hidden_size: int
    """Width of the dense SwiGLU; unused where every layer is a mixture of experts."""
    vocab_size: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Bias on q, k and v (never on the output projection)."""
    qk_norm: bool = False
    """RMSNorm over head_dim on queries and keys before the rotary embedding."""
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    sliding_window: int | None = None
    """A query sees the last ``sliding_window`` positions, itself included; None: the whole past."""
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_ffn_hidden_size: int | None = None
    norm_topk_prob: bool = True
    """The chosen experts' probabilities are divided by their sum."""
    initializer_range: float = 0.02
    dtype: str | None = None
    """The dtype that config.json declares for the stored weights, such as "bfloat16"; None where it is silent."""
    hf_config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """config.json as it was read."""

    @property
    def is_moe(self) -> bool:
        return self.num_experts is not None

    @property
    def query_size(self) -> int:
        """Output features of q_proj: num_attention_heads x head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Output features of k_proj, and of v_proj: num_query_groups x head_dim."""
        return self.num_query_groups * self.head_dim

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Architecture:
        """Parse ``directory``/config.json.

        Raises:
            UnsupportedArchitecture: the file is missing, is not JSON, or see ``from_hf_config``.
        """
        path = Path(directory) / "config.json"
        try:
            loaded = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UnsupportedArchitecture(f"{directory} is no Hugging Face model directory: no config.json") from None
        except ValueError as error:
            raise UnsupportedArchitecture(f"{path} is not valid JSON: {error}") from error
        try:
            return cls.from_hf_config(loaded)
        except UnsupportedArchitecture as error:
            raise UnsupportedArchitecture(f"{path}: {error}") from None

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> Architecture:
        """Parse a config.json mapping, of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters).

        Raises:
            UnsupportedArchitecture: a needed key is absent or of the wrong type, the model type is unknown, or a
                feature is set that would change the computation and that the learner does not compute.
        """
        read = _Reader(hf_config)
        family = read.text("model_type")
        if family not in FAMILIES:
            raise UnsupportedArchitecture(f"model_type={family!r} is not one of {', '.join(FAMILIES)}")
        heads, hidden = read.integer("num_attention_heads"), read.integer("hidden_size")
        groups = read.integer("num_key_value_heads", heads)
        if heads % groups:
            raise UnsupportedArchitecture(f"num_attention_heads={heads} is no multiple of num_key_value_heads={groups}")
        if hf_config.get("head_dim") is None and hidden % heads:
            raise UnsupportedArchitecture(f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}")
        activation = hf_config.get("hidden_act", "silu")
        if activation != "silu":
            raise UnsupportedArchitecture(f"hidden_act={activation!r} is not supported: only silu is")
        if hf_config.get("mlp_bias"):
            raise UnsupportedArchitecture("mlp_bias=true is not supported")
        if family != QWEN2 and hf_config.get("attention_bias"):
            # In these families the flag puts a bias on o_proj too, which no published checkpoint has.
            raise UnsupportedArchitecture(f"attention_bias=true is not supported for {family}")
        if hf_config.get("quantization_config"):
            raise UnsupportedArchitecture("quantization_config is set: start from the full-precision weights")

        experts: dict[str, Any] = {}
        if family == QWEN3_MOE:
            if read.integer("decoder_sparse_step", 1) != 1 or hf_config.get("mlp_only_layers"):
                raise UnsupportedArchitecture(
                    "a mix of dense and expert layers (decoder_sparse_step, mlp_only_layers) is not supported"
                )
            count_key = "num_experts" if hf_config.get("num_experts") is not None else "num_local_experts"
            experts = {
                "num_experts": read.integer(count_key),
                "num_experts_per_tok": read.integer("num_experts_per_tok"),
                "moe_ffn_hidden_size": read.integer("moe_intermediate_size"),
                "norm_topk_prob": bool(hf_config.get("norm_topk_prob", False)),
            }
        theta, scaling = _rope(read)
        return cls(
            family=family,
            num_layers=read.integer("num_hidden_layers"),
            hidden_size=hidden,
            num_attention_heads=heads,
            num_query_groups=groups,
            head_dim=read.integer("head_dim", hidden // heads),
            ffn_hidden_size=read.integer("intermediate_size"),
            vocab_size=read.integer("vocab_size"),
            tie_word_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
            attention_bias=family == QWEN2,
            qk_norm=family in (QWEN3, QWEN3_MOE),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            max_position_embeddings=read.integer("max_position_embeddings", 32768),
            sliding_window=_sliding_window(read, family),
            initializer_range=read.number("initializer_range", 0.02),
            dtype=hf_config.get("dtype") or hf_config.get("torch_dtype"),
            hf_config=dict(hf_config),
            **experts,
        )


class _Reader:
    """Typed look-ups whose errors name the key."""

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self.mapping = mapping

    def _value(self, key: str, default: Any) -> Any:
        value = self.mapping.get(key)
        if value is None:
            value = default
        if value is None:
            raise UnsupportedArchitecture(f"{key} is missing")
        return value

    def text(self, key: str) -> str:
        return str(self._value(key, None))

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedArchitecture(f"{key}={value!r} is not a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            raise UnsupportedArchitecture(f"{key}={value!r} is not a positive number")
        return float(value)


def _rope(read: _Reader) -> tuple[float, RopeScaling | None]:
    # transformers 5 keeps theta and scaling together in rope_parameters; 4 has rope_theta and rope_scaling apart.
    parameters = read.mapping.get("rope_parameters") or read.mapping.get("rope_scaling") or {}
    inner = _Reader(parameters)
    theta = inner.number("rope_theta", read.number("rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind in (None, "default"):
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=inner.number("factor"))
    if kind == "llama3":
        return theta, RopeScaling(
            kind="llama3",
            factor=inner.number("factor"),
            low_freq_factor=inner.number("low_freq_factor"),
            high_freq_factor=inner.number("high_freq_factor"),
            original_max_position_embeddings=inner.integer("original_max_position_embeddings"),
        )
    raise UnsupportedArchitecture(f"rope type {kind!r} is not one of default, linear, llama3")


def _sliding_window(read: _Reader, family: str) -> int | None:
    window = read.mapping.get("sliding_window")
    if window is None or family == LLAMA or (family != MISTRAL and not read.mapping.get("use_sliding_window", False)):
        return None
    layers = read.integer("num_hidden_layers")
    full = 0 if family == MISTRAL else int(read.mapping.get("max_window_layers", layers))
    if full >= layers:
        return None
    if full > 0:
        raise UnsupportedArchitecture(
            f"max_window_layers={full}: sliding-window attention in some of {layers} layers is not supported"
        )
    return read.integer("sliding_window")
