"""How the learner steps: AdamW or Muon, the learning rate's schedule, clipping, and the dtypes of the state."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_retool.config.base import ConfigError, choice, not_negative, number, positive


@dataclass(frozen=True)
class OptimizerConfig:  # noqa: D101 (each field that holds one says whose it is)
    name: str = choice("adamw", "muon")
    """muon: matrices step by the orthogonalised mean of their gradients, and embeddings, output layer, norms, biases
    and routers by AdamW. One moment a matrix in place of two. Needs use_distributed_optimizer=false."""
    muon_momentum: float = number(0.95, minimum=0, below=1)
    """Decay rate of Muon's mean."""
    lr: float = positive(1e-6, maximum=1)
    """Learning rate after the warm-up. Muon's step is scaled to the size of AdamW's, so that one rate does for both."""
    min_lr: float = not_negative(0.0, maximum=1)
    """Learning rate at the end of a linear or cosine schedule."""
    betas: list[float] = number([0.9, 0.95], minimum=0, below=1)
    """AdamW's two decay rates, of the mean and of the variance."""
    eps: float = positive(1e-8, maximum=1)
    """AdamW's term against a division by 0."""
    weight_decay: float = not_negative(0.0, maximum=100)
    """AdamW's decoupled weight decay."""
    clip_grad: float = not_negative(1.0)
    """Norm to which larger gradients are scaled down; 0: never."""
    skip_grad_norm: float | None = positive(None)
    """Norm before clipping above which an update is left out: weights, the optimizer's state and the learning rate's
    schedule stay as they were, and the run continues with the next mini-batch. null: never."""
    schedule: str = choice("constant", "linear", "cosine")
    """How the learning rate continues after the warm-up."""
    warmup_steps: int = not_negative(0)
    """Optimizer steps over which the learning rate rises to lr."""
    cpu_offload: bool = False
    """Keep the optimizer's state in the host's memory; needs Transformer Engine."""
    use_precision_aware_optimizer: bool = False
    """Let Transformer Engine's Adam hold the state in the dtypes below. Of float32 main parameters it then keeps the 16
    bits that bfloat16 weights lack: 2 bytes a parameter less, and the same numbers. Off: untested on a GPU."""
    main_params_dtype: str = choice("float32", "float16")
    """Of the main parameters, with use_precision_aware_optimizer."""
    exp_avg_dtype: str = choice("float32", "bfloat16", "float16")
    """Of AdamW's mean, with use_precision_aware_optimizer."""
    exp_avg_sq_dtype: str = choice("float32", "bfloat16", "float16")
    """Of AdamW's variance, with use_precision_aware_optimizer."""

    def check(self, key: str) -> None:
        """Raise ConfigError where settings of this section, which ``key`` names, contradict each other."""
        if len(self.betas) != 2:
            raise ConfigError(f"{key}.betas={self.betas} must be two numbers, such as [0.9, 0.95]")
        if self.min_lr > self.lr:
            raise ConfigError(f"{key}.min_lr={self.min_lr} exceeds {key}.lr={self.lr}, to which it belongs as its end")
        aware = f"{key}.use_precision_aware_optimizer"
        if self.name == "muon":
            for name in ("cpu_offload", "use_precision_aware_optimizer"):
                if getattr(self, name):
                    raise ConfigError(f"{key}.{name}=true is only for AdamW: set it to false, or {key}.name=adamw")
        if self.use_precision_aware_optimizer and self.cpu_offload:
            raise ConfigError(f"{aware}=true is for state on the GPU: set {key}.cpu_offload=false")
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if getattr(self, name) != "float32" and not self.use_precision_aware_optimizer:
                raise ConfigError(f"{key}.{name}={getattr(self, name)} needs {aware}=true")
