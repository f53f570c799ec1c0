"""What the project reads from a Hugging Face ``config.json``: one frozen record that every room shares.

The learner builds its Megatron-Core model from an ``Architecture``, the weight map shapes its tensors by it, and the
FLOP count is a function of it.  How ``config.json`` is read is the family's business, see ``family``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from conversion.model.attention_config import DeltaNetSizes, IndexerSizes, LatentSizes, MambaSizes, check_layer_types
from conversion.model.config_reader import (
    DECLARATIONS,
    MAKE_FULL_PRECISION,
    PREDICTORS,
    ConfigReader,
    MalformedConfig,
    UnsupportedArchitecture,
)
from conversion.model.family import KEY, Family, find_family, load_family
from conversion.model.low_precision import DECLARED_BESIDE, declaration, quantization_of
from conversion.model.position_config import RopeScaling, check_short_factors
from megatron_retool.registry import ExtensionError
from untrusted import load_json


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer with RMSNorm, rotary positions, a gated MLP and grouped-query attention.

    Sizes are whole-model sizes in elements, before any parallelism and before vocabulary padding.
    """

    family: str
    """model_type of config.json; where that is an alias, the family's own."""
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
    """Bias on q, k and v."""
    linear_bias: bool = False
    """Bias on attention's output projection too, on the router, and on the experts' matrices."""
    attention_sinks: bool = False
    """Each head's softmax has one more score, a parameter, whose share of the probability goes nowhere."""
    qk_norm: bool = False
    """RMSNorm over head_dim on queries and keys before the rotary embedding."""
    rotary_dim: int | None = None
    """How many of a head's features positions rotate, the first ones; None: all."""
    rotary_pairs: bool = False
    """Positions rotate features that lie side by side together, not half of the rotated ones apart."""
    unrotated_layers: tuple[int, ...] = ()
    """Layers, by global number, whose attention has no positions; ascending."""
    query_growth: tuple[float, int] | None = None
    """(b, n): queries are multiplied by 1 + b log(1 + floor(position / n)); None: they are not."""
    qk_norm_full_width: bool = False
    """With ``qk_norm``: over all heads together instead."""
    activation: Literal["silu", "gelu_tanh", "quick_gelu", "relu2"] = "silu"
    """The function of the MLP's gate; without a gate, of its first product. relu2: the square of ReLU."""
    gated_mlp: bool = True
    """MLPs, and experts, multiply their first product by an activated gate."""
    activation_limit: float | None = None
    """The gate is clamped from above before its activation, and what it multiplies to +- this; None: neither."""
    activation_offset: float = 0.0
    """What the gate multiplies is increased by it."""
    softmax_scale: float | None = None
    """What attention scores are multiplied by; None: 1 / sqrt(head_dim)."""
    embedding_scale: float = 1.0
    """What the embedding's output is multiplied by."""
    embedding_scale_rounded: bool = False
    """That factor is rounded to the weights' dtype first."""
    residual_multiplier: float = 1.0
    """What the output of attention and of the MLP is multiplied by before it is added to the residual stream."""
    logits_scaling: float = 1.0
    """What logits are divided by."""
    zero_centered_norm: bool = False
    """Every norm multiplies by 1 + weight."""
    pre_norm: bool = True
    """RMSNorm of the input of attention and of the MLP."""
    post_norm: bool = False
    """RMSNorm of the output of attention and of the MLP, before it is added to the residual stream."""
    latent: LatentSizes | None = None
    """Queries, keys and values are made of latent vectors; None: they are projections of the hidden states."""
    indexer: IndexerSizes | None = None
    """Of what chooses the keys that a query sees, in every layer; None: it sees all of its past."""
    shared_choices: tuple[int, ...] = ()
    """Layers, by global number, without an indexer, which see the keys that the layer before them sees; ascending."""
    attention_gate: bool = False
    """Attention's output is multiplied by the sigmoid of a linear function of its input, feature by feature."""
    delta_net: DeltaNetSizes | None = None
    """Of gated delta nets, which the layers of ``linear_layers`` have; None: they are of another kind."""
    mamba: MambaSizes | None = None
    """Of Mamba-2, which the layers of ``linear_layers`` have; None: they are of another kind."""
    linear_layers: tuple[int, ...] = ()
    """Layers, by global number, that have ``recurrent`` in place of attention; ascending."""
    layers_without_mixer: tuple[int, ...] = ()
    """Layers, by global number, of an MLP only: without attention and what stands in its place; ascending."""
    layers_without_mlp: tuple[int, ...] = ()
    """Layers, by global number, without an MLP, dense or of experts; ascending."""
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    """Base of the positions in layers with a window, which are not stretched; None: as in the others."""
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    sliding_window: int | None = None
    """A query sees the last ``sliding_window`` positions, itself included; None: the whole past."""
    windowed_layers: tuple[bool, ...] | None = None
    """Which layers have the window; None: all."""
    num_experts: int | None = None
    dense_layers: tuple[int, ...] = ()
    """Layers of a mixture of experts, by global number, that have the dense SwiGLU instead; ascending."""
    num_experts_per_tok: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_latent_size: int | None = None
    """Features of the latent vectors that experts work on, between two projections; None: they read hidden states."""
    shared_expert_ffn_hidden_size: int | None = None
    """Width of a SwiGLU beside the experts that every token goes through; None: there is none."""
    shared_expert_gate: bool = False
    """The shared expert's output is multiplied by the sigmoid of a linear function of its input."""
    norm_topk_prob: bool = True
    """The chosen experts' probabilities are divided by their sum."""
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of the router's logits."""
    router_bias: bool = False
    """A bias of each expert is added to its score where experts are chosen, and not to its gate."""
    router_groups: tuple[int, int] | None = None
    """(n, m): experts lie in n groups, and a token chooses among those of the m groups with the largest
    ``router_group_score``; None: among all."""
    router_group_score: Literal["sum of two", "best"] = "sum of two"
    """What a group is worth to a token: the sum of its two best experts' scores, or the best one's."""
    routed_scaling_factor: float = 1.0
    """Gates are multiplied by it."""
    predictors: int = 0
    """Layers for multi-token prediction that are parameters of the model, see ``with_predictors``; 0: those that it may
    have are only carried along."""
    initializer_range: float = 0.02
    dtype: str | None = None
    """The dtype that config.json declares for the stored weights, such as "bfloat16"; None where it is silent."""
    hf_config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """config.json as it was read."""
    family_target: str | None = None
    """Where the family is declared (an entry of model.families); None: built-in."""

    @property
    def is_moe(self) -> bool:
        """Whether it has experts."""
        return self.num_experts is not None

    @cached_property
    def expert_layers(self) -> tuple[int, ...]:
        """Global numbers of the layers with a router and experts, ascending; none of a dense model."""
        return tuple(layer for layer in range(self.num_layers) if self.has_experts(layer))

    def has_experts(self, layer: int) -> bool:
        """Whether the layer with this global number has a router and experts in place of the dense MLP."""
        return self.is_moe and layer not in self.dense_layers and self.has_mlp(layer)

    def has_mlp(self, layer: int) -> bool:
        """Whether the layer with this global number has an MLP, dense or of experts."""
        return layer not in self.layers_without_mlp

    def has_mixer(self, layer: int) -> bool:
        """Whether the layer with this global number has attention, or what stands in its place."""
        return layer not in self.layers_without_mixer

    def has_attention(self, layer: int) -> bool:
        """Whether the layer with this global number has softmax attention."""
        return layer not in self.linear_layers and self.has_mixer(layer)

    def has_indexer(self, layer: int) -> bool:
        """Whether the layer with this global number chooses keys by itself."""
        return self.indexer is not None and layer not in self.shared_choices

    @property
    def indexer_layers(self) -> int:
        """How many layers choose keys by themselves."""
        return 0 if self.indexer is None else self.num_layers - len(self.shared_choices)

    @property
    def attention_layers(self) -> int:
        """How many layers have softmax attention."""
        return self.num_layers - len(self.linear_layers) - len(self.layers_without_mixer)

    @property
    def expert_hidden_size(self) -> int:
        """Features that an expert reads and adds."""
        return self.moe_latent_size or self.hidden_size

    @property
    def dense_mlps(self) -> int:
        """How many layers have a dense MLP."""
        return self.num_layers - len(self.layers_without_mlp) - len(self.expert_layers)

    @property
    def sublayers(self) -> int:
        """How many times something is added to the residual stream: twice in each layer with a mixer and an MLP."""
        return 2 * self.num_layers - len(self.layers_without_mixer) - len(self.layers_without_mlp)

    def needs_packed_attention(self, context_parallel_size: int = 1) -> bool:
        """Whether the learner computes its attention and its states itself, also beside Transformer Engine's layers,
        whose attention lacks context parallelism for packed sequences and a window."""
        own = self.latent or self.attention_sinks or self.linear_layers or self.attention_gate
        return bool(own) or (self.sliding_window is not None and context_parallel_size > 1)

    @property
    def has_mixed_layers(self) -> bool:
        """Whether layers differ in their parameters."""
        kinds = (self.dense_layers, self.linear_layers, self.shared_choices)
        return any((*kinds, self.layers_without_mixer, self.layers_without_mlp))

    def with_predictors(self) -> Architecture:
        """The model with its layers for multi-token prediction; config.json tells how many there are.

        Raises:
            UnsupportedArchitecture: it has none, or the learner cannot train those of its family.
        """
        config, rules = ConfigReader(self.hf_config), self.declaration.predictors
        counts = [config.integer(key, least=0) for key in PREDICTORS if config.has(key)]
        count = max(counts, default=self.declaration.unannounced_predictors)
        if not count:
            raise UnsupportedArchitecture(f"config.json has no layers for multi-token prediction ({PREDICTORS[0]})")
        if not rules:
            raise UnsupportedArchitecture(
                f"layers for multi-token prediction of family {self.family} are carried along and not trained"
            )
        config.require(mtp_use_dedicated_embeddings=False)
        if count > 1 and any("{" not in name for rule in rules for name in rule.hf):
            raise UnsupportedArchitecture(
                f"{count} layers for multi-token prediction of family {self.family} share their projection, and the "
                "learner trains one such layer"
            )
        return replace(self, predictors=count)

    @property
    def declaration(self) -> Family:
        """The family's rules and reader, in any process that the architecture was sent to.

        Raises:
            UnsupportedArchitecture, ExtensionError: as ``family.find_family``.
        """
        return find_family(self.family)[1] if self.family_target is None else load_family(self.family_target)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        windowed = (True,) * self.num_layers if self.windowed_layers is None else self.windowed_layers
        return tuple(self.sliding_window if each else None for each in windowed[: self.num_layers])

    @property
    def longest_text(self) -> int | None:
        """Tokens beyond which a whole text has other positions than the learner's; None: it never has."""
        scaling = self.rope_scaling
        return None if scaling is None or scaling.kind != "longrope" else scaling.original_max_position_embeddings

    @property
    def query_size(self) -> int:
        """Output features of q_proj: num_attention_heads x head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Output features of k_proj, and of v_proj: num_query_groups x head_dim."""
        return self.num_query_groups * self.head_dim

    @property
    def output_size(self) -> int:
        """Input features of o_proj: num_attention_heads x features of a head's values."""
        return self.num_attention_heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @property
    def query_rank(self) -> int:
        """Size of the queries' latent; 0: they have none."""
        return 0 if self.latent is None else self.latent.query_rank or 0

    @property
    def has_whole_queries(self) -> bool:
        """Latent attention without a latent of the queries."""
        return self.latent is not None and self.latent.query_rank is None

    @property
    def gated_query_size(self) -> int:
        """Output features of q_proj with the attention's gate."""
        return self.query_size * (2 if self.attention_gate else 1)

    @property
    def attention_weights(self) -> int:
        """Elements of one layer's attention matrices."""
        if self.latent is None:
            return self.hidden_size * (self.gated_query_size + 2 * self.key_value_size + self.output_size)
        rank, rotated = self.latent.key_value_rank, self.rotary_dim or 0
        queries = self.query_rank * (self.hidden_size + self.query_size) or self.hidden_size * self.query_size
        latents = self.hidden_size * (rank + rotated) + rank * self.latent_key_value_size
        return queries + latents + self.output_size * self.hidden_size

    @property
    def recurrent(self) -> DeltaNetSizes | MambaSizes | None:
        """Of what the layers of ``linear_layers`` have in place of attention; None where there are none."""
        return self.delta_net or self.mamba

    @property
    def recurrent_weights(self) -> int:
        """Elements of the matrices of what one layer has in place of attention."""
        sizes = self.recurrent
        if sizes is None:
            return 0
        return self.hidden_size * (sizes.convolved_size + 2 * sizes.value_size + sizes.rates)

    @property
    def indexer_weights(self) -> int:
        """Elements of one indexer's matrices."""
        if self.indexer is None:
            return 0
        queries = self.query_rank * self.indexer.query_size
        return queries + self.hidden_size * (self.indexer.head_dim + self.indexer.heads)

    @property
    def all_attention_weights(self) -> int:
        """Elements of the matrices of attention, of its indexers, and of what stands in its place, in all layers."""
        attention = self.attention_layers * self.attention_weights + self.indexer_layers * self.indexer_weights
        return attention + len(self.linear_layers) * self.recurrent_weights

    @property
    def latent_key_value_size(self) -> int:
        """Output features of kv_b_proj: the unrotated features of all keys, and those of all values."""
        return self.query_size - self.num_attention_heads * (self.rotary_dim or 0) + self.output_size

    @property
    def cached_size(self) -> int:
        """Numbers that an engine keeps of each token in each layer: keys and values, or their latents."""
        if self.latent is None:
            return 2 * self.key_value_size
        return self.latent.key_value_rank + (self.rotary_dim or 0)

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, families: Sequence[str] = (), *, dequantized: bool = False
    ) -> Architecture:
        """Parse ``directory``/config.json; ``families`` are those of model.families.

        Args:
            dequantized: by a caller who reads quantised weights in full precision (``files.quantized_checkpoint``): the
                architecture, and its ``hf_config``, are then those of a model without ``quantization_config``.

        Raises:
            UnsupportedArchitecture: the file is missing, is not JSON, or see ``from_hf_config``.
            ExtensionError: as ``from_hf_config``.
        """
        path = Path(directory) / "config.json"
        try:
            loaded = load_json(path.read_bytes(), finite=False)
        except FileNotFoundError:
            raise UnsupportedArchitecture(f"{directory} is no Hugging Face model directory: no config.json") from None
        except (ValueError, OSError) as error:
            raise MalformedConfig(f"{path} is not valid JSON: {error}") from error
        if isinstance(loaded, dict):
            quantization = quantization_of(directory, loaded)
            if dequantized:
                loaded = {key: value for key, value in loaded.items() if key not in DECLARATIONS}
            elif quantization is not None and not declaration(loaded):
                beside = Path(directory) / DECLARED_BESIDE
                raise UnsupportedArchitecture(f"{beside}: ModelOpt has quantised the weights: {MAKE_FULL_PRECISION}")
        try:
            return cls.from_hf_config(loaded, families)
        except UnsupportedArchitecture as error:
            raise type(error)(f"{path}: {error}") from None

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
            raise MalformedConfig(
                f"it holds a {type(hf_config).__name__}, where a mapping with model_type, hidden_size, … is expected"
            )
        names = hf_config.get("architectures")
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise MalformedConfig(
                f'architectures={names!r:.80} is no list of class names, such as ["Qwen3ForCausalLM"]: correct it'
            )
        config = ConfigReader(hf_config)
        target, family = find_family(config.text("model_type"), families)
        try:
            architecture = cls(
                family=family.model_type,
                family_target=target,
                dtype=config.text("dtype" if config.has("dtype") else "torch_dtype", "") or None,
                hf_config=dict(hf_config),
                **family.read(config),
            )
            check_layer_types(
                config, architecture.windows, architecture.linear_layers, indexed=architecture.indexer is not None
            )
            check_short_factors(architecture.rope_scaling, architecture.rotary_dim or architecture.head_dim)
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
