"""The learner: a Megatron-Core model, its optimizer, and the steps that train it. Entry point: ``learner.Learner``."""

import warnings

from megatron_retool.learner import cpu

# Megatron-Core says this in every module that looks for them; precision.Acceleration says it once.
warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")
# Megatron-Core 0.16 on newer torch: its own look at gradients of views, and names that torch has replaced.
warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf", module="megatron")
warnings.filterwarnings("ignore", message="`torch.distributed.*` is deprecated", category=FutureWarning)

# Before any module of the room imports megatron.core.
cpu.install()
