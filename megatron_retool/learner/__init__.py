"""The learner: a Megatron-Core model, its optimizer, and the steps that train it. Entry point: ``learner.Learner``."""

import gc
import logging
import os
import warnings

from megatron_retool.cuda_toolkit import cuda_environment, has_driver, load_cudnn
from megatron_retool.learner import cpu

# Megatron-Core says this in every module that looks for them; precision.Acceleration says it once.
warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")
# GPTModel gets only repairs from now on; converted checkpoints keep what is not sharded in a file of its own; on a CPU
# there is one random state; the layout of the gradients' buffers is the default one.
for name in (
    "models.gpt.gpt_model",
    "dist_checkpointing.strategies.common",
    "tensor_parallel.random",
    "distributed.distributed_data_parallel",
):
    logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message="The argument order of load has been changed")
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
warnings.filterwarnings("ignore", message="MimoModelConfig is experimental")
warnings.filterwarnings("ignore", message="invalid escape sequence", category=SyntaxWarning)
# Megatron-Core 0.19 on newer torch: its own look at gradients of views, and names that torch has replaced.
warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf", module="megatron")
warnings.filterwarnings("ignore", message="`torch.distributed.*` is deprecated", category=FutureWarning)

# Muon's package logs by absl, which gives a root logger without a handler one of its own format.
if not logging.root.handlers and logging.lastResort is not None:
    logging.root.addHandler(logging.lastResort)

# Transformer Engine compiles some kernels at their first use.
if has_driver():
    os.environ.update(cuda_environment(os.environ))
    load_cudnn()

# A round of the collector through the objects of torch and Megatron-Core stops a rank, and all others wait for it.
gc.set_threshold(100_000)

# Before any module of the room imports megatron.core.
cpu.install()
