"""What the project reads from a Hugging Face ``config.json``: one frozen record that every room shares.

The learner builds its Megatron-Core model from an ``Architecture``, the weight map shapes its tensors by it, and the
FLOP count is a function of it.  How ``config.json`` is read is the family's business, see ``family``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conversion.model.family import KEY, Family, find_family, load_family
from conversion.model.hf_config import ConfigReader, RopeScaling, UnsupportedArchitecture, check_layer_types
from megatron_retool.registry import ExtensionError


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer with RMSNorm, rotary positions, SwiGLU and grouped-query attention.

    Sizes are whole-model sizes in elements, before any parallelism and before vocabulary padding.
    """

    family: str
    """model_type of config.json."""
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
    shared_expert_ffn_hidden_size: int | None = None
    """Width of a SwiGLU beside the experts that every token goes through; None: there is none."""
    shared_expert_gate: bool = False
    """The shared expert's output is multiplied by the sigmoid of a linear function of its input."""
    norm_topk_prob: bool = True
    """The chosen experts' probabilities are divided by their sum."""
    initializer_range: float = 0.02
    dtype: str | None = None
    """The dtype that config.json declares for the stored weights, such as "bfloat16"; None where it is silent."""
    hf_config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """config.json as it was read."""
    family_target: str | None = None
    """Where the family is declared (an entry of model.families); None: built-in."""

    @property
    def is_moe(self) -> bool:
        return self.num_experts is not None

    @property
    def declaration(self) -> Family:
        """The family's rules and reader, in any process that the architecture was sent to.

        Raises:
            UnsupportedArchitecture, ExtensionError: as ``family.find_family``.
        """
        return find_family(self.family)[1] if self.family_target is None else load_family(self.family_target)

    @property
    def query_size(self) -> int:
        """Output features of q_proj: num_attention_heads x head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Output features of k_proj, and of v_proj: num_query_groups x head_dim."""
        return self.num_query_groups * self.head_dim

    @classmethod
    def from_pretrained(cls, directory: str | Path, families: Sequence[str] = ()) -> Architecture:
        """Parse ``directory``/config.json; ``families`` are those of model.families.

        Raises:
            UnsupportedArchitecture: the file is missing, is not JSON, or see ``from_hf_config``.
            ExtensionError: as ``from_hf_config``.
        """
        path = Path(directory) / "config.json"
        try:
            loaded = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UnsupportedArchitecture(f"{directory} is no Hugging Face model directory: no config.json") from None
        except (ValueError, RecursionError) as error:
            raise UnsupportedArchitecture(f"{path} is not valid JSON: {error}") from error
        try:
            return cls.from_hf_config(loaded, families)
        except UnsupportedArchitecture as error:
            raise UnsupportedArchitecture(f"{path}: {error}") from None

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any], families: Sequence[str] = ()) -> Architecture:
        """Parse a config.json mapping by its family; ``families`` are those of model.families.

        Raises:
            UnsupportedArchitecture: a needed key is absent or of the wrong type, the model type is unknown, or a
                feature is set that would change the computation and that the learner does not compute.
            ExtensionError: one of ``families`` cannot be loaded, or its reader raises or returns something else than
                fields of an architecture.
        """
        if not isinstance(hf_config, Mapping):
            raise UnsupportedArchitecture(
                f"it holds a {type(hf_config).__name__}, where a mapping with model_type, hidden_size, … is expected"
            )
        config = ConfigReader(hf_config)
        model_type = config.text("model_type")
        target, family = find_family(model_type, families)
        try:
            architecture = cls(
                family=model_type,
                family_target=target,
                dtype=hf_config.get("dtype") or hf_config.get("torch_dtype"),
                hf_config=dict(hf_config),
                **family.read(config),
            )
            check_layer_types(config, architecture.sliding_window)
            return architecture
        except UnsupportedArchitecture:
            raise
        except Exception as error:
            if target is None:
                raise
            raise ExtensionError(
                f"{KEY}={target}: its read(config) must return fields of conversion.model.architecture.Architecture "
                f"as a dict: {type(error).__name__}: {error}"
            ) from error
