"""Number formats, recomputation and fused kernels: what the config asks for, what the machine has, Megatron's options.

No CUDA, Transformer Engine or Megatron import happens here, so that every rule can be checked and tested anywhere.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from conversion.model.architecture import Architecture
from megatron_retool.config import ConfigError, LearnerConfig, OptimizerConfig
from megatron_retool.machine import installed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Fp8Recipe:
    """What a recipe needs (Transformer Engine and compute capability), multiples that its kernels want (tokens of a
    micro-batch; both sizes of a matrix), and the format that Transformer Engine gives it where none is asked for."""

    minimum_te: tuple[int, int]
    minimum_capability: tuple[int, int]
    token_multiple: int
    matrix_multiple: int
    format: str


# Delayed scaling is left out: its scales start at 1 and move only while gradients are computed, so that the first
# step's old log-probs and all of the reference's would be wrong; and Transformer Engine refuses to load its state.
FP8_RECIPES = {
    "tensorwise": Fp8Recipe((2, 2), (8, 9), 16, 16, "hybrid"),
    "blockwise": Fp8Recipe((2, 3), (9, 0), 128, 16, "e4m3"),
    "mxfp8": Fp8Recipe((2, 1), (10, 0), 32, 32, "e4m3"),
    "nvfp4": Fp8Recipe((2, 7), (10, 0), 128, 16, "e2m1"),
}
FLASH_ATTENTION = ("flash-attn-3", "flash-attn-4", "flash-attn")
"""In the order in which Transformer Engine prefers them on Hopper."""
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act")
_OF_TRANSFORMER_ENGINE = {"layernorm": "random states", "moe_act": "grouped experts"}
"""Those of them that Megatron-Core computes again only with it, and by what of it."""


@dataclass(frozen=True)
class Acceleration:
    """What this process can use."""

    cuda: bool
    capability: tuple[int, int] | None = None
    gpu_name: str | None = None
    transformer_engine: str | None = None
    """Version; None where it is missing or there is no GPU for it."""
    apex: bool = False
    fused_weight_gradient: bool = False
    """Apex's kernel that adds weight gradients to the fp32 main gradients inside the matrix product."""
    flash_attention: str | None = None
    """What Transformer Engine takes on Hopper where it leaves cuDNN's attention: name and version of the package."""

    @classmethod
    def detect(cls) -> Acceleration:
        """What this process finds: GPU, Transformer Engine, Apex, flash-attn."""
        if not torch.cuda.is_available():
            return cls(cuda=False)
        version = None
        if importlib.util.find_spec("transformer_engine") is not None:
            version = installed("transformer_engine") or importlib.metadata.version("transformer-engine-torch")
        return cls(
            cuda=True,
            capability=torch.cuda.get_device_capability(),
            gpu_name=torch.cuda.get_device_name(),
            transformer_engine=version,
            apex=importlib.util.find_spec("apex") is not None,
            fused_weight_gradient=importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
            flash_attention=next((f"{name} {installed(name)}" for name in FLASH_ATTENTION if installed(name)), None),
        )

    def local(self) -> Acceleration:
        """The same device with Megatron-Core's and torch's own layers and kernels."""
        return replace(self, transformer_engine=None, apex=False, fused_weight_gradient=False, flash_attention=None)

    def packs_attention(self, architecture: Architecture, context_parallel_size: int = 1) -> bool:
        """Whether attention of such a model is the learner's own (``attention.py``) and not Transformer Engine's."""
        return self.transformer_engine is None or architecture.needs_packed_attention(context_parallel_size)

    def describe(self) -> str:
        """One line for the start of a run."""
        if not self.cuda:
            return f"CPU, {torch.get_num_threads()} thread(s); local layer spec, torch attention and Adam"
        te = (
            f"Transformer Engine {self.transformer_engine}" if self.transformer_engine else "without Transformer Engine"
        )
        return (
            f"{self.gpu_name} (sm{''.join(map(str, self.capability or ()))}); {te}; apex {_yes(self.apex)}; "
            f"fused weight gradients {_yes(self.fused_weight_gradient)}; "
            f"{'Transformer Engine' if self.transformer_engine else 'local'} layer spec"
        )


def acceleration_for(learner: LearnerConfig) -> Acceleration:
    """What this process uses: what it finds, but for exact numbers (learner.match_engine) no Transformer Engine."""
    found = Acceleration.detect()
    return found.local() if learner.match_engine == "exact" else found


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def check_precision(
    learner: LearnerConfig, optimizer: OptimizerConfig, architecture: Architecture, acceleration: Acceleration
) -> None:
    """Hold the settings against the machine, before any weight is read.

    Raises:
        ConfigError: naming the key, what is missing and what would do.
    """
    recipe = learner.fp8.recipe
    if learner.dtype == "float16" and not acceleration.cuda:
        raise ConfigError("learner.dtype=float16 needs CUDA: use float32 or bfloat16 on a CPU")
    if recipe is not None:
        if recipe not in FP8_RECIPES:
            raise ConfigError(f"learner.fp8.recipe={recipe!r} is not one of {', '.join(FP8_RECIPES)}")
        needs = FP8_RECIPES[recipe]
        if recipe == "nvfp4" and learner.fp8.format is not None:
            raise ConfigError(
                f"learner.fp8.format={learner.fp8.format} is of FP8, and learner.fp8.recipe=nvfp4 has a format of its "
                "own: set it to null"
            )
        if learner.dtype != "bfloat16":
            raise ConfigError(f"learner.fp8.recipe={recipe} needs learner.dtype=bfloat16, not {learner.dtype}")
        if not acceleration.cuda:
            width = "FP4" if recipe == "nvfp4" else "FP8"
            raise ConfigError(
                f"learner.fp8.recipe={recipe} needs a CUDA device with {width}, and this host has none: set "
                "learner.fp8.recipe=null"
            )
        if acceleration.transformer_engine is None:
            raise ConfigError(
                f"learner.fp8.recipe={recipe} needs Transformer Engine, which is not installed: "
                "run scripts/setup.sh --gpu"
            )
        if _version(acceleration.transformer_engine) < needs.minimum_te:
            raise ConfigError(
                f"learner.fp8.recipe={recipe} needs Transformer Engine {_dotted(needs.minimum_te)} or later, "
                f"found {acceleration.transformer_engine}"
            )
        if acceleration.capability is not None and acceleration.capability < needs.minimum_capability:
            raise ConfigError(
                f"learner.fp8.recipe={recipe} needs compute capability {_dotted(needs.minimum_capability)} "
                f"or later, {acceleration.gpu_name} has {_dotted(acceleration.capability)}"
            )
    if optimizer.cpu_offload and not (acceleration.cuda and acceleration.transformer_engine):
        raise ConfigError("learner.optimizer.cpu_offload=true needs CUDA and Transformer Engine: set it to false")
    if optimizer.cpu_offload and not learner.use_distributed_optimizer:
        raise ConfigError("learner.optimizer.cpu_offload=true needs learner.use_distributed_optimizer=true")
    _check_recompute(learner, architecture, acceleration)


def _check_recompute(learner: LearnerConfig, architecture: Architecture, acceleration: Acceleration) -> None:
    recompute = learner.recompute
    if recompute.granularity not in (None, "full", "selective"):
        raise ConfigError(
            f"learner.recompute.granularity={recompute.granularity!r} is not one of full, selective, null"
        )
    if recompute.granularity == "full":
        if recompute.method not in (None, "uniform", "block"):
            raise ConfigError(f"learner.recompute.method={recompute.method!r} is not one of uniform, block, null")
        if recompute.modules:
            raise ConfigError("learner.recompute.modules belongs to learner.recompute.granularity=selective")
        layers = architecture.num_layers // learner.pipeline_model_parallel_size
        if recompute.num_layers is not None and not 1 <= recompute.num_layers <= layers:
            raise ConfigError(
                f"learner.recompute.num_layers={recompute.num_layers} is not between 1 and the {layers} layers of a "
                "pipeline stage"
            )
    elif recompute.method is not None or recompute.num_layers is not None:
        raise ConfigError("learner.recompute.method and num_layers belong to learner.recompute.granularity=full")
    if recompute.granularity == "selective":
        for module in recompute.modules:
            if module not in RECOMPUTE_MODULES:
                raise ConfigError(f"learner.recompute.modules: {module!r} is not one of {', '.join(RECOMPUTE_MODULES)}")
            if module in ("moe", "moe_act") and not architecture.is_moe:
                raise ConfigError(f"learner.recompute.modules: {module} needs a mixture-of-experts model")
            if module in _OF_TRANSFORMER_ENGINE and not acceleration.transformer_engine:
                raise ConfigError(
                    f"learner.recompute.modules: {module} needs Transformer Engine's {_OF_TRANSFORMER_ENGINE[module]}, "
                    "and it is not used here: leave it out"
                )
    elif recompute.modules:
        raise ConfigError("learner.recompute.modules needs learner.recompute.granularity=selective")


def transformer_options(learner: LearnerConfig, acceleration: Acceleration) -> dict[str, Any]:
    """Keyword arguments of Megatron's TransformerConfig for precision, recomputation and fused kernels."""
    dtype = DTYPES[learner.dtype]
    options: dict[str, Any] = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": learner.dtype == "bfloat16",
        "fp16": learner.dtype == "float16",
        "apply_rope_fusion": acceleration.transformer_engine is not None,
        "bias_activation_fusion": acceleration.cuda,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }
    if learner.fp8.recipe is not None:
        width = "fp4" if learner.fp8.recipe == "nvfp4" else "fp8"
        options |= {
            width: learner.fp8.format or FP8_RECIPES[learner.fp8.recipe].format,
            f"{width}_recipe": learner.fp8.recipe,
            "first_last_layers_bf16": learner.fp8.keep_first_last_bf16,
        }
    recompute = learner.recompute
    if recompute.granularity == "full":
        options |= {
            "recompute_granularity": "full",
            "recompute_method": recompute.method or "uniform",
            "recompute_num_layers": recompute.num_layers or 1,
        }
    elif recompute.granularity == "selective":
        options |= {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules) or ["core_attn"]}
    return options


def optimizer_options(learner: LearnerConfig, optimizer: OptimizerConfig) -> dict[str, Any]:
    """Keyword arguments of Megatron's OptimizerConfig: AdamW on fp32 main parameters and gradients."""
    options: dict[str, Any] = {
        "optimizer": "adam",
        "lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_eps": optimizer.eps,
        "clip_grad": optimizer.clip_grad,
        "grad_norm_skip_threshold": math.inf if optimizer.skip_grad_norm is None else optimizer.skip_grad_norm,
        "params_dtype": DTYPES[learner.dtype],
        "bf16": learner.dtype == "bfloat16",
        "fp16": learner.dtype == "float16",
        "use_distributed_optimizer": learner.use_distributed_optimizer,
        "overlap_param_gather": learner.overlap_param_gather,
    }
    if learner.fp8.recipe not in (None, "nvfp4"):
        options["fp8_recipe"] = learner.fp8.recipe
        options["reuse_grad_buf_for_mxfp8_param_ag"] = learner.fp8.parameters and learner.fp8.recipe == "mxfp8"
    if optimizer.cpu_offload:
        options |= {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 1.0,
            "use_precision_aware_optimizer": True,
            "overlap_cpu_optimizer_d2h_h2d": True,
        }
    return options


def muon_options(learner: LearnerConfig, optimizer: OptimizerConfig) -> dict[str, Any]:
    """Keyword arguments of Megatron's OptimizerConfig: Muon beside the AdamW of ``optimizer_options``.

    The update of a matrix M is 0.2 sqrt(max(rows, columns)) O(M), as Moonshot AI scales it (arXiv:2502.16982, section
    2.2): its root mean square is that of AdamW's updates. O takes five steps of Newton-Schulz with Keller Jordan's
    coefficients (https://kellerjordan.github.io/posts/muon/), in float32 where weights are, else in bfloat16. Ranks
    that share a matrix gather it and compute the same.
    """
    return {
        "optimizer": "muon",
        "muon_momentum": optimizer.muon_momentum,
        "muon_nesterov": True,
        "muon_coefficient_type": "simple",
        "muon_num_ns_steps": 5,
        "muon_scale_mode": "spectral",
        "muon_extra_scale_factor": 0.2,
        "muon_split_qkv": True,
        "muon_tp_mode": "duplicated",
        "muon_fp32_matmul_prec": "highest" if learner.dtype == "float32" else "medium",
    }


def token_multiple(learner: LearnerConfig) -> int:
    """Tokens of a micro-batch are padded to a multiple of this on every rank."""
    return FP8_RECIPES[learner.fp8.recipe].token_multiple if learner.fp8.recipe else 1


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def engine_version(acceleration: Acceleration) -> tuple[int, int]:
    """Transformer Engine's; (0, 0) where it is missing."""
    return _version(acceleration.transformer_engine or "0.0")


def _version(text: str) -> tuple[int, int]:
    major, minor = (text.split(".") + ["0"])[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)
