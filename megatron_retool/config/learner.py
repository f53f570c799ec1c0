"""The Megatron-Core learner: layout, precision, optimizer, critic."""

from __future__ import annotations

from dataclasses import dataclass, field

from conversion.model.architecture import Architecture
from conversion.model.layout import LayoutError, ParallelLayout
from megatron_retool.config.base import ConfigError, choice


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = 1e-6
    min_lr: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    schedule: str = choice("constant", "linear", "cosine")
    warmup_steps: int = 0
    cpu_offload: bool = False


@dataclass(frozen=True)
class Fp8Config:
    recipe: str | None = None
    """None, or one of delayed, tensorwise, blockwise, mxfp8. Needs Transformer Engine and a GPU that has FP8."""
    format: str = choice("hybrid", "e4m3")
    keep_first_last_bf16: bool = True


@dataclass(frozen=True)
class RecomputeConfig:
    granularity: str | None = None
    """None, "full" or "selective"."""
    method: str | None = None
    num_layers: int | None = None
    modules: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CriticConfig:
    """The value model of algorithm.advantage=gae. It has as many ranks as the learner, in the same layout."""

    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    value_clip: float = 0.5
    """How far a value may move from the one before the update, within one step."""
    warmup_steps: int = 0
    """First steps in which the critic alone learns."""


@dataclass(frozen=True)
class LearnerConfig:
    world_size: int = 1
    """Learner processes (GPUs). Data parallel size = world_size / (TP x PP x CP)."""
    device: str = choice("auto", "cpu", "cuda")
    dtype: str = choice("bfloat16", "float32", "float16")
    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    use_distributed_optimizer: bool = True
    mini_batch_size: int = 64
    """Responses in one optimizer step; a step of the loop makes train_batch_size x n / mini_batch_size of them."""
    max_tokens_per_micro_batch: int = 32768
    """Token budget of a packed micro-batch, over all context-parallel ranks together."""
    log_prob_chunk_tokens: int = 1024
    """Tokens whose vocabulary logits exist at one time while log-probs and entropy are computed."""
    fp32_lm_head: bool = False
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    fp8: Fp8Config = field(default_factory=Fp8Config)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    threads: int = 1
    """CPU threads of each learner process on a host without CUDA."""

    def check(self) -> None:
        """Raise ConfigError where the sizes of the parallel layout do not fit one another."""
        data_parallel = self.layout().data
        if self.mini_batch_size % data_parallel:
            raise ConfigError(
                f"learner.mini_batch_size={self.mini_batch_size} is not divisible by the data parallel size "
                f"{data_parallel}"
            )
        if self.max_tokens_per_micro_batch < 1:
            raise ConfigError(
                f"learner.max_tokens_per_micro_batch={self.max_tokens_per_micro_batch} must be at least 1"
            )

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
            )
            if architecture is None:
                return layout
            return layout.for_model(architecture, self.max_tokens_per_micro_batch)
        except LayoutError as error:
            raise ConfigError(str(error)) from error
