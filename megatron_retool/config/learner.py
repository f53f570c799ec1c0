"""The Megatron-Core learner: layout, precision, optimizer, critic."""

from __future__ import annotations

from dataclasses import dataclass, field

from conversion.model.adapter_map import TARGETS, why_not, why_not_in_engine
from conversion.model.architecture import Architecture
from conversion.model.config_reader import UnsupportedArchitecture
from conversion.model.layout import LayoutError, ParallelLayout
from conversion.model.model_operators import missing_operators
from conversion.model.peft_config import PeftFilesError, read_peft_config
from megatron_retool.config.base import ConfigError, at_least_one, choice, not_negative, positive
from megatron_retool.config.optimizer import OptimizerConfig


@dataclass(frozen=True)
class Fp8Config:
    """Matrix products in FP8, or in FP4."""

    recipe: str | None = choice(None, "tensorwise", "blockwise", "mxfp8", "nvfp4")
    """How FP8 values are scaled: by tensor, in blocks of 128, in blocks of 32. nvfp4: FP4 (e2m1) in blocks of 16 and by
    tensor, gradients rounded at random (arXiv:2509.25149). null: neither. Needs Transformer Engine and a GPU that has
    FP8; mxfp8 and nvfp4 a Blackwell. By tensor means by all tokens of a micro-batch: log-probs then depend on what
    shares it."""
    format: str | None = choice(None, "hybrid", "e4m3")
    """Of FP8. hybrid: e4m3 forwards, e5m2 for gradients. e4m3: for both. null: Transformer Engine's own for the recipe,
    hybrid for tensorwise and e4m3 for blockwise and mxfp8."""
    keep_first_last_bf16: bool = True
    """The first and the last layer stay in bfloat16."""
    parameters: bool = False
    """Keep the weights themselves of these layers in FP8 or FP4, which saves the memory that they have in bfloat16.
    They are gathered so after a step (mxfp8: in bfloat16). The optimizer steps float32 as before. Needs
    use_distributed_optimizer; mxfp8 does not go with overlap_param_gather."""


@dataclass(frozen=True)
class RecomputeConfig:
    """Activations that are computed again in the backward pass."""

    granularity: str | None = choice(None, "full", "selective")
    """full: whole layers. selective: the parts of a layer that modules names. null: nothing is computed again."""
    method: str | None = choice(None, "uniform", "block")
    """full: uniform checkpoints groups of num_layers layers, block the first num_layers of each stage."""
    num_layers: int | None = at_least_one(None)
    """full: the number that method speaks of."""
    modules: list[str] = field(default_factory=list)
    """selective: of core_attn, layernorm, mlp, moe and moe_act; empty: core_attn."""


@dataclass(frozen=True)
class CriticConfig:
    """The value model of algorithm.advantage=gae. It has as many ranks as the learner, in the same layout."""

    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """The critic's own optimizer."""
    value_clip: float = positive(0.5)
    """How far a value may move from the one before the update, within one step."""
    warmup_steps: int = not_negative(0)
    """First steps in which only the critic learns."""


@dataclass(frozen=True)
class MtpConfig:
    """Layers for multi-token prediction, which draft tokens for an engine (DeepSeek-V3, GLM-4.5, Qwen3.5 and MiMo have
    one). The learner can train them beside the policy, so that their guesses keep up with it."""

    train: bool = False
    """Train those of the model; false: they are carried along as they are."""
    loss_scaling_factor: float = positive(0.1, maximum=100)
    """What their loss is multiplied by, the mean cross-entropy of the tokens of the loss mask."""
    detach_heads: bool = True
    """They observe the policy: no gradient of their loss reaches its weights, and their own is clipped by itself.
    false: their loss moves the policy too, its embedding and its head included."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: the model stays as it is, and two small matrices beside each of its own are trained. The
    reference policy is then the model without them, for which no copy is kept."""

    rank: int = not_negative(0, maximum=4096)
    """Columns of the two matrices; 0: no adapters, all weights are trained."""
    alpha: float = positive(32.0, maximum=1_000_000)
    """What adapters add is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: list(TARGETS))
    """Which matrices have adapters: attention (its projections, of each kind of attention), mlp (gate, up and down
    projections of dense layers and shared experts), experts (those of a mixture of experts). What the model lacks is
    left out."""
    seed: int = not_negative(0, maximum=2**31 - 1)
    """Of the adapters' first values, which are the same in every parallel layout."""
    path: str | None = None
    """Directory with the files of peft (adapter_config.json, adapter_model.safetensors) that the policy's adapters
    begin with, in place of fresh ones. Their rank, alpha and targets have to be these."""
    sync: str = choice("merged", "adapter")
    """What a weight sync sends. merged: all weights, adapters merged into them, which every engine takes. adapter: only
    the adapters, of a large model a hundredth of the bytes; requests under way end on the version they began with."""

    @property
    def sends_adapter(self) -> bool:
        """Whether engines get adapters beside the model that they were started with."""
        return self.rank > 0 and self.sync == "adapter"

    def check_files(self) -> None:
        """Raise ConfigError where ``path`` has no adapter of this rank and alpha."""
        if not (self.rank and self.path):
            return
        said = f"learner.lora.path={self.path}"
        try:
            result = read_peft_config(self.path)
        except PeftFilesError as error:
            raise ConfigError(f"{said}: {error}") from error
        for name in ("rank", "alpha"):
            theirs, own = getattr(result, name), getattr(self, name)
            if theirs != own:
                raise ConfigError(
                    f"{said} has {name} {theirs:g}: set learner.lora.{name}={theirs:g} in place of {own:g}"
                )

    def check_reference(self) -> None:
        """Raise ConfigError where the model without its adapters is not the policy that a run begins with."""
        if self.rank and self.path:
            raise ConfigError(
                f"learner.lora.path={self.path} does not go with a reference policy, which would be the model without "
                "that adapter: merge the adapter into the model first, or leave out what needs the reference"
            )

    def check(self, key: str) -> None:
        """Raise ConfigError where ``targets`` are not some of those that there are."""
        words = f"{key}.targets={self.targets}"
        if not self.targets or len(set(self.targets)) != len(self.targets) or not set(self.targets) <= set(TARGETS):
            raise ConfigError(f"{words}: name one or more of {', '.join(TARGETS)}, each once")


@dataclass(frozen=True)
class LearnerConfig:
    """The Megatron-Core learner: layout, precision, optimizer, critic."""

    world_size: int = at_least_one(1, maximum=1_000_000)
    """Learner processes (GPUs). Data parallel size = world_size / (TP x PP x CP)."""
    device: str = choice("auto", "cpu", "cuda")
    """auto: cuda where there is a GPU."""
    dtype: str = choice("bfloat16", "float32", "float16")
    """Of weights and activations; the optimizer's own copy is float32."""
    tensor_model_parallel_size: int = at_least_one(1, maximum=1024)
    """TP: ranks that share each weight matrix."""
    sequence_parallel: bool = False
    """TP ranks also share the activations between the matrices; needs TP above 1."""
    pipeline_model_parallel_size: int = at_least_one(1, maximum=1024)
    """PP: stages of consecutive layers, each on ranks of its own."""
    virtual_pipeline_model_parallel_size: int | None = at_least_one(None, maximum=1024)
    """Chunks of layers on each stage, taken in turns; null: one."""
    context_parallel_size: int = at_least_one(1, maximum=1024)
    """CP: ranks that share the tokens of each sequence."""
    dynamic_context_parallel: bool = False
    """Share a micro-batch among only as many context-parallel ranks as its longest sequence needs; the other ranks
    compute others meanwhile. For lengths with a long tail, of which only a few sequences need all ranks."""
    expert_model_parallel_size: int = at_least_one(1, maximum=1024)
    """EP: ranks that share the experts of a mixture of experts."""
    expert_tensor_parallel_size: int | None = at_least_one(None, maximum=1024)
    """TP of the experts; null: as for everything else."""
    use_distributed_optimizer: bool = True
    """Data parallel ranks share the optimizer's state in place of holding all of it each."""
    overlap_grad_reduce: bool = False
    """Sum gradients over data parallel ranks bucket by bucket during the last micro-batch's backward pass, in place of
    all at once after it. For data parallel sizes above 1, most of all across nodes. Off: one sum in a fixed order."""
    overlap_param_gather: bool = False
    """Gather the weights that data parallel ranks have updated bucket by bucket in the next forward pass, in place of
    all at once after the optimizer's step. Needs overlap_grad_reduce and use_distributed_optimizer."""
    gradient_bucket_size: int | None = at_least_one(None)
    """Parameters in a bucket of the two overlaps; null: the larger of 40 million and 1 million a data parallel rank."""
    overlap_p2p_comm: bool = False
    """Pipeline stages exchange activations and gradients of one chunk while they compute another; needs virtual
    stages. Off: all messages of a step of the schedule in one batch, which is what was tested most."""
    gradient_accumulation_fusion: bool = True
    """Matrix products add weight gradients to the float32 ones themselves, where the layers are Transformer Engine's
    or Apex is there. Off, or elsewhere: each is rounded to dtype first, once a micro-batch, in memory of its own."""
    moe_token_dispatcher_type: str = choice("alltoall", "flex")
    """How tokens reach the ranks of their experts. flex: by DeepEP's kernels (package deep_ep), for experts spread over
    nodes; needs bfloat16. alltoall: by torch.distributed, which works everywhere."""
    moe_permute_fusion: bool | None = None
    """Sort tokens by expert in Transformer Engine's kernels, in place of several of torch's, for which the host waits
    twice a layer. null: where the layers are Transformer Engine's on a GPU."""
    moe_router_fusion: bool = False
    """Choose experts in Transformer Engine's kernel. It takes no choice from elsewhere: needs routing_replay=none."""
    moe_router_bias_update_rate: float = not_negative(0.0, maximum=1)
    """How far each step moves a router's bias for the choice of experts towards even load, where the model has one
    (GLM-4.5, DeepSeek-V3, MiniMax-M2). 0: the biases stay as they were pretrained."""
    cpu_offloading_num_layers: int = not_negative(0, maximum=10_000)
    """Layers whose activations wait for the backward pass in the host's memory: for links to the host that are faster
    than computing again. Needs Transformer Engine, one pipeline stage and no recompute."""
    expandable_segments: bool = False
    """torch's allocator grows segments of GPU memory in place of adding others, so that micro-batches of other sizes
    leave fewer gaps: to try where memory is short. What engines map is allocated without. On a CPU it does nothing."""
    mini_batch_size: int = at_least_one(64)
    """Responses in one optimizer step; a step of the loop makes train_batch_size x n / mini_batch_size of them."""
    fuse_old_log_probs: str = choice("auto", "never", "first_mini_batch")
    """Take old log-probs from the update's own forward pass and spare the pass before it. auto: where one update
    follows a batch, with the same losses, gradients and metrics. first_mini_batch: also for the first of several.
    never: not at all. The pass stays where something needs it beforehand; the run says at its start what."""
    max_tokens_per_micro_batch: int = at_least_one(32768)
    """Token budget of a packed micro-batch, over all context-parallel ranks together."""
    share_prefixes: bool = False
    """Compute what several responses begin with once: the prompt of a group, the stem of forks, the context of an
    agent's segments. Needs context_parallel_size=1 and a model without sliding windows. On a GPU attention is then
    torch's FlexAttention. Fine-tuning shares nothing."""
    log_prob_chunk_tokens: int = at_least_one(1024)
    """Tokens whose vocabulary logits exist at one time while log-probs and entropy are computed."""
    routing_replay: str = choice("none", "rollout", "old_log_probs")
    """In a mixture of experts, whose choice of experts the update takes. rollout (R3): the engine's, in the old
    log-probs too. old_log_probs (R2): the learner's own of the old log-probs. none: its choice in each pass."""
    match_engine: str = choice("none", "exact")
    """exact: engine and learner compute every log-prob to the same bit, by the same operators in one order of sums
    (docs/mismatch.md, "Exact"); a step whose log-probs differ ends the run. Without tensor, context or expert
    parallelism; on a GPU without CUDA graphs and Transformer Engine. none: each computes in its own way."""
    fp32_lm_head: bool = False
    """Compute the vocabulary logits in float32."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The policy's optimizer."""
    fp8: Fp8Config = field(default_factory=Fp8Config)
    """Matrix products in FP8."""
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    """Activations that are computed again in place of being kept."""
    mtp: MtpConfig = field(default_factory=MtpConfig)
    """Layers for multi-token prediction."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters in place of all weights."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value model."""
    threads: int = at_least_one(1, maximum=1024)
    """CPU threads of each learner process on a host without CUDA. With GPUs a node's ranks share its cores."""

    def check(self) -> None:
        """Raise ConfigError where the sizes of the parallel layout do not fit one another."""
        data_parallel = self.layout().data
        if self.mini_batch_size % data_parallel:
            raise ConfigError(
                f"learner.mini_batch_size={self.mini_batch_size} is not divisible by the data parallel size "
                f"{data_parallel}"
            )
        for key, optimizer in (("optimizer", self.optimizer), ("critic.optimizer", self.critic.optimizer)):
            optimizer.check(f"learner.{key}")
            self.check_optimizer(f"learner.{key}", optimizer)
            if optimizer.use_precision_aware_optimizer:
                self._check_precision_aware(f"learner.{key}.use_precision_aware_optimizer")
        self._check_overlap()
        self._check_kernels()
        self._check_mtp()
        self._check_lora()
        self._check_fp8_parameters()
        if self.dynamic_context_parallel and self.context_parallel_size == 1:
            raise ConfigError(
                "learner.dynamic_context_parallel=true needs learner.context_parallel_size > 1: with one rank nothing "
                "is shared; raise it, or set learner.dynamic_context_parallel=false"
            )
        if self.share_prefixes and self.context_parallel_size > 1:
            raise ConfigError(
                "learner.share_prefixes=true needs learner.context_parallel_size=1: context parallelism cuts each "
                "sequence over ranks, and a shared prefix belongs to many; set one of the two"
            )

    def check_optimizer(self, key: str, optimizer: OptimizerConfig, architecture: Architecture | None = None) -> None:
        """Raise ConfigError where the optimizer that ``key`` names needs other settings of this section, for a model of
        ``architecture`` where it is given."""
        if optimizer.name != "muon":
            return
        if self.lora.rank:
            raise ConfigError(
                f"{key}.name=muon is for whole matrices and does not go with learner.lora.rank={self.lora.rank}: set "
                f"{key}.name=adamw"
            )
        if self.use_distributed_optimizer:
            raise ConfigError(
                f"{key}.name=muon needs learner.use_distributed_optimizer=false: that optimizer cuts matrices into "
                "pieces of any rows, and Muon orthogonalises whole ones"
            )
        if self.dtype == "float16":
            raise ConfigError(f"{key}.name=muon needs learner.dtype=bfloat16 or float32, not float16")
        tensor = self.tensor_model_parallel_size
        if architecture is not None and architecture.latent is None and architecture.num_query_groups % tensor:
            raise ConfigError(
                f"{key}.name=muon does not go with learner.tensor_model_parallel_size={tensor}: Muon takes queries, "
                f"keys and values apart, which this does not cut between the model's {architecture.num_query_groups} "
                f"key-value heads. Lower it, or set {key}.name=adamw"
            )

    def _check_overlap(self) -> None:
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            raise ConfigError(
                "learner.overlap_param_gather=true needs learner.use_distributed_optimizer=true: without it no rank "
                "gathers weights"
            )
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ConfigError("learner.overlap_param_gather=true needs learner.overlap_grad_reduce=true")
        if self.gradient_bucket_size is not None and not self.overlap_grad_reduce:
            raise ConfigError(
                "learner.gradient_bucket_size belongs to learner.overlap_grad_reduce=true: without overlap everything "
                "is summed at once"
            )
        if self.overlap_p2p_comm and self.virtual_pipeline_model_parallel_size is None:
            raise ConfigError(
                "learner.overlap_p2p_comm=true needs learner.virtual_pipeline_model_parallel_size: only the "
                "interleaved schedule has other chunks to compute while one is under way"
            )
        if (
            self.virtual_pipeline_model_parallel_size is not None
            and self.pipeline_model_parallel_size == 2
            and not self.overlap_p2p_comm
        ):
            raise ConfigError(
                f"learner.virtual_pipeline_model_parallel_size={self.virtual_pipeline_model_parallel_size} with "
                "learner.pipeline_model_parallel_size=2 needs learner.overlap_p2p_comm=true: otherwise Megatron-Core "
                "mixes up the messages between the two stages"
            )

    def _check_kernels(self) -> None:
        if self.moe_router_fusion and self.routing_replay != "none":
            raise ConfigError(
                f"learner.routing_replay={self.routing_replay} does not go with learner.moe_router_fusion=true, whose "
                "kernel chooses experts itself: set the one to none or the other to false"
            )
        if self.moe_token_dispatcher_type == "flex" and self.dtype != "bfloat16":
            raise ConfigError(f"learner.moe_token_dispatcher_type=flex needs learner.dtype=bfloat16, not {self.dtype}")
        if not self.cpu_offloading_num_layers:
            return
        key = f"learner.cpu_offloading_num_layers={self.cpu_offloading_num_layers}"
        if self.pipeline_model_parallel_size > 1:
            raise ConfigError(f"{key} needs learner.pipeline_model_parallel_size=1: set it to 0, or use recompute")
        if self.recompute.granularity is not None:
            raise ConfigError(f"{key} does not go with learner.recompute.granularity: use one of them")

    def _check_fp8_parameters(self) -> None:
        if not self.fp8.parameters:
            return
        if self.fp8.recipe is None:
            raise ConfigError("learner.fp8.parameters=true needs learner.fp8.recipe: choose one, or set it to false")
        if not self.use_distributed_optimizer:
            raise ConfigError("learner.fp8.parameters=true needs learner.use_distributed_optimizer=true")
        if self.fp8.recipe == "mxfp8" and self.overlap_param_gather:
            raise ConfigError(
                "learner.overlap_param_gather=true does not go with learner.fp8.parameters=true beside "
                "learner.fp8.recipe=mxfp8, whose weights are gathered in the gradients' memory: set one to false"
            )
        for key, optimizer in (("optimizer", self.optimizer), ("critic.optimizer", self.critic.optimizer)):
            for name in ("cpu_offload", "use_precision_aware_optimizer"):
                if getattr(optimizer, name):
                    raise ConfigError(
                        f"learner.{key}.{name}=true does not go with learner.fp8.parameters=true, whose weights do not "
                        "hold the upper bits of the main parameters: set one of them to false"
                    )

    def _check_mtp(self) -> None:
        if not self.mtp.train:
            return
        said = "learner.mtp.train=true does not go with"
        if self.share_prefixes:
            raise ConfigError(
                f"{said} learner.share_prefixes=true: the last token of a shared prefix has several tokens behind it; "
                "set one of them to false"
            )
        if self.overlap_grad_reduce:
            raise ConfigError(f"{said} learner.overlap_grad_reduce=true: set one of them to false")
        if self.cpu_offloading_num_layers:
            raise ConfigError(f"{said} learner.cpu_offloading_num_layers={self.cpu_offloading_num_layers}: set it to 0")
        if self.recompute.method != "block" and (self.recompute.num_layers or 1) > 1:
            raise ConfigError(
                f"{said} learner.recompute.num_layers={self.recompute.num_layers}: Megatron-Core computes such a layer "
                "again by itself; set it to 1"
            )

    def _check_lora(self) -> None:
        self.lora.check("learner.lora")
        if not self.lora.rank:
            return
        said = f"learner.lora.rank={self.lora.rank} does not go with"
        if self.mtp.train:
            raise ConfigError(
                f"{said} learner.mtp.train=true: the model's own layers stay as they are; set one of them"
            )
        if self.moe_router_bias_update_rate:
            raise ConfigError(
                f"{said} learner.moe_router_bias_update_rate={self.moe_router_bias_update_rate}: the router belongs to "
                "the frozen model; set it to 0"
            )
        if self.fp8.recipe is not None:
            raise ConfigError(f"{said} learner.fp8.recipe={self.fp8.recipe}: set it to null")

    def check_lora(self, architecture: Architecture) -> None:
        """Raise ConfigError where the model has parts among learner.lora.targets that no adapter can change."""
        if not self.lora.rank:
            return
        self.lora.check_files()
        if reason := why_not(architecture, self.lora.targets):
            raise ConfigError(
                f"learner.lora.targets={self.lora.targets} does not fit family {architecture.family}: {reason}; leave "
                "it out, or set learner.lora.rank=0"
            )
        if self.lora.sends_adapter and (reason := why_not_in_engine(architecture, self.lora.targets)):
            raise ConfigError(
                f"learner.lora.sync=adapter does not fit family {architecture.family} with learner.lora.targets="
                f"{self.lora.targets}: {reason}: change targets, or set learner.lora.sync=merged"
            )
        tensor = self.tensor_model_parallel_size
        if "attention" in self.lora.targets and architecture.num_query_groups % tensor:
            raise ConfigError(
                f"learner.lora.targets={self.lora.targets} does not go with learner.tensor_model_parallel_size="
                f"{tensor}, which does not divide the model's {architecture.num_query_groups} key-value heads: lower "
                "it, or leave attention out"
            )

    def check_predictors(self, architecture: Architecture) -> None:
        """Raise ConfigError where learner.mtp.train asks for layers that the model lacks, or that are not trained."""
        if not self.mtp.train:
            return
        try:
            architecture = architecture if architecture.predictors else architecture.with_predictors()
        except UnsupportedArchitecture as error:
            raise ConfigError(f"learner.mtp.train=true: {error}: set it to false") from None
        if architecture.sliding_window is not None:
            raise ConfigError("learner.mtp.train=true does not go with a sliding window: set it to false")
        if architecture.tie_word_embeddings and self.pipeline_model_parallel_size > 1:
            raise ConfigError(
                "learner.mtp.train=true needs learner.pipeline_model_parallel_size=1 for a model with tied embeddings: "
                "Megatron-Core has no third copy of theirs"
            )

    def _check_precision_aware(self, key: str) -> None:
        if not self.use_distributed_optimizer:
            raise ConfigError(f"{key}=true needs learner.use_distributed_optimizer=true")
        if self.dtype == "float32":
            raise ConfigError(f"{key}=true needs learner.dtype=bfloat16: float32 weights have no main parameters")

    def layout(self, architecture: Architecture | None = None) -> ParallelLayout:
        """The parallel layout, of ``architecture`` where it is given.

        Raises:
            ConfigError: sizes do not fit one another or the model; the message names the key and what would.
        """
        try:
            layout = ParallelLayout.of_ranks(
                self.world_size,
                tensor=self.tensor_model_parallel_size,
                pipeline=self.pipeline_model_parallel_size,
                virtual_pipeline=self.virtual_pipeline_model_parallel_size,
                context=self.context_parallel_size,
                expert=self.expert_model_parallel_size,
                expert_tensor=self.expert_tensor_parallel_size,
                sequence_parallel=self.sequence_parallel,
                architecture=architecture,
            )
            if architecture is None:
                return layout
            for key, optimizer in (("optimizer", self.optimizer), ("critic.optimizer", self.critic.optimizer)):
                self.check_optimizer(f"learner.{key}", optimizer, architecture)
            self.check_predictors(architecture)
            self.check_lora(architecture)
            return layout.for_model(architecture, self.max_tokens_per_micro_batch)
        except LayoutError as error:
            raise ConfigError(str(error)) from error


def check_operators(architecture: Architecture) -> None:
    """Raise ConfigError, with their names, where a model has operators that ``match_engine=exact`` does not know."""
    if missing := missing_operators(architecture):
        raise ConfigError(
            f"learner.match_engine=exact does not know {', '.join(missing)}, which the model ({architecture.family}) "
            "has: set it to none"
        )
