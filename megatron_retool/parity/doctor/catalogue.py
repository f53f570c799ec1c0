"""The steps of the doctor, in the order in which each relies on those before it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_retool.errors import InputError


@dataclass(frozen=True)
class DoctorStep:
    """
    Attributes:
        group: what of the stack it belongs to; the row of the table in docs/tested.md.
        summary: what it proves.
        check: what runs in its process, "module:function": takes a Session and returns figures; where the step
            stays, also what to ``stop()`` at its end.
        cure: what to do where it fails for a reason that it does not know better.
        timeout_seconds: after which it counts as hanging and is ended.
        needs: steps that have to pass first.
        stays: its process lives on, until the last step that needs it is done.
    """

    name: str
    group: str
    summary: str
    check: str
    cure: str
    timeout_seconds: float = 180.0
    needs: tuple[str, ...] = ()
    stays: bool = False


HOST, KERNELS, LEARNER, LAYOUTS = "host", "kernels", "learner", "layouts"
ENGINE, SYNC, MEMORY, CHECKPOINT, SPEED, DEMO = "engine", "weight sync", "memory", "checkpoint", "speed", "demo"

_INSTALL = "bash scripts/setup.sh (with --gpu on a node with GPUs) installs what requirements/ pins"
_KERNEL = (
    "build the package again against the torch that is installed (bash scripts/setup.sh --gpu); a GPU older than its "
    "kernels are built for needs NVTE_CUDA_ARCHS, or the package left out"
)
_PARITY = (
    "the figures name the model (dense or experts) and what differs. If kernels_* fail too, begin there; if fp32 "
    "holds and this does not, it is the number format"
)
_LAYOUT = (
    "with NCCL_DEBUG=INFO the log says which transport failed; a hang in a container: --shm-size or --ipc=host; "
    "NCCL_P2P_DISABLE=1 tells whether it is peer access. Figures beyond their bound with every rank answering: a bug, "
    "attach the JSON file to an issue"
)
_NETWORK = (
    "where it hangs, look at the other nodes' reports first: all have to reach this step, with the same --gpus. Too "
    "slow: NCCL_DEBUG=INFO names the adapters, one for each GPU; NET/Socket means that InfiniBand is not used "
    "(scripts/slurm/nccl.env has the variables, a container needs /dev/infiniband and --ulimit memlock=-1)"
)
_SYNC = (
    "docs/failures.md has the messages of weight syncs; until it is found, weight_sync.method can name a method whose "
    "step passes"
)

STEPS = (
    DoctorStep(
        "host",
        HOST,
        "processor, memory, shared memory and limits of this host or container",
        "megatron_retool.parity.doctor.host_steps:host",
        "raise the limit that the figure names: docker run --shm-size=16g --ulimit nofile=65536 --ulimit memlock=-1, "
        "or the node's own limits",
    ),
    DoctorStep(
        "versions",
        HOST,
        "installed packages against requirements/",
        "megatron_retool.parity.doctor.host_steps:versions",
        _INSTALL,
    ),
    DoctorStep(
        "driver",
        HOST,
        "GPUs, driver, CUDA of torch, peer access",
        "megatron_retool.parity.doctor.host_steps:driver",
        "nvidia-smi has to work and to list the GPUs; CUDA 13 needs a driver of the 580 series or newer; in a "
        "container: docker run --gpus all",
    ),
    DoctorStep(
        "kernels_torch",
        KERNELS,
        "matrix product, attention and softmax of torch on this device against float64",
        "megatron_retool.parity.doctor.kernel_steps:torch_kernels",
        "torch itself is wrong here: its CUDA version, the driver or the GPU (nvidia-smi -q, ECC errors)",
    ),
    DoctorStep(
        "kernels_transformer_engine",
        KERNELS,
        "Transformer Engine's layers, attention and Adam against torch's, and whether attention is fused",
        "megatron_retool.parity.doctor.kernel_steps:transformer_engine",
        _KERNEL + ". Attention that is not fused: cuDNN is missing or its parts are of several versions; "
        "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 megatron-retool doctor --steps kernels --keep DIR writes why into DIR",
    ),
    DoctorStep(
        "kernels_flash_attn",
        KERNELS,
        "flash-attn against torch",
        "megatron_retool.parity.doctor.kernel_steps:flash_attn",
        _KERNEL,
    ),
    DoctorStep(
        "kernels_apex",
        KERNELS,
        "Apex's fused weight gradients against torch",
        "megatron_retool.parity.doctor.kernel_steps:apex",
        _KERNEL,
    ),
    DoctorStep(
        "reference",
        LEARNER,
        "tiny models, and what transformers computes of them on the CPU in float32",
        "megatron_retool.parity.doctor.model:reference",
        _INSTALL,
    ),
    DoctorStep(
        "learner_fp32",
        LEARNER,
        "log-probs, loss and gradients in float32 against the CPU's, dense and experts",
        "megatron_retool.parity.doctor.learner_steps:fp32",
        _PARITY,
        needs=("reference",),
    ),
    DoctorStep(
        "learner_bf16",
        LEARNER,
        "the same in bfloat16",
        "megatron_retool.parity.doctor.learner_steps:bf16",
        _PARITY,
        needs=("reference",),
    ),
    DoctorStep(
        "learner_own_attention",
        LEARNER,
        "the same of latent attention, gated delta nets, Mamba-2 and attention sinks",
        "megatron_retool.parity.doctor.learner_steps:own_attention",
        _PARITY,
    ),
    DoctorStep(
        "learner_fp8_tensorwise",
        LEARNER,
        "the same with learner.fp8.recipe=tensorwise",
        "megatron_retool.parity.doctor.learner_steps:fp8_tensorwise",
        _PARITY,
        needs=("reference",),
    ),
    DoctorStep(
        "learner_fp8_blockwise",
        LEARNER,
        "the same with learner.fp8.recipe=blockwise",
        "megatron_retool.parity.doctor.learner_steps:fp8_blockwise",
        _PARITY,
        needs=("reference",),
    ),
    DoctorStep(
        "learner_fp8_parameters",
        LEARNER,
        "weights kept in FP8: the same numbers after steps as with weights in bfloat16",
        "megatron_retool.parity.doctor.learner_steps:fp8_parameters",
        _PARITY,
        needs=("reference",),
    ),
    DoctorStep(
        "learner_fp8_mxfp8",
        LEARNER,
        "the same with learner.fp8.recipe=mxfp8",
        "megatron_retool.parity.doctor.learner_steps:fp8_mxfp8",
        _PARITY,
        needs=("reference",),
    ),
    DoctorStep(
        "learner_nvfp4",
        LEARNER,
        "the same with learner.fp8.recipe=nvfp4",
        "megatron_retool.parity.doctor.learner_steps:nvfp4",
        _PARITY,
        needs=("reference",),
    ),
    DoctorStep(
        "collectives",
        LAYOUTS,
        "each collective between all ranks: right sums, and bytes a second",
        "megatron_retool.parity.doctor.layout_steps:collectives",
        _LAYOUT,
    ),
    DoctorStep(
        "collectives_between_nodes",
        LAYOUTS,
        "all-reduce and all-gather between nodes: right sums, and bytes a second of a GPU's link",
        "megatron_retool.parity.doctor.node_steps:between_nodes",
        _NETWORK,
        timeout_seconds=600,
    ),
    *(
        DoctorStep(
            f"layout_{key}",
            LAYOUTS,
            f"{name}: the same log-probs, loss and gradients on several ranks",
            f"megatron_retool.parity.doctor.layout_steps:{key}",
            _LAYOUT,
            needs=("reference",),
        )
        for key, name in (
            ("dp", "data parallel"),
            ("tp", "tensor parallel"),
            ("sp", "tensor parallel with sequence parallelism"),
            ("pp", "pipeline parallel"),
            ("cp", "context parallel"),
            ("ep", "expert parallel, experts replayed"),
        )
    ),
    DoctorStep(
        "preload",
        ENGINE,
        "what is loaded into a colocated engine before Python finds its libraries",
        "megatron_retool.parity.doctor.engine_steps:preload",
        "the library that is named comes with NVIDIA's packages or the driver: " + _INSTALL,
        needs=("reference",),
    ),
    DoctorStep(
        "kernels_sglang",
        ENGINE,
        "SGLang compiles and links kernels for this GPU with the packages' nvcc",
        "megatron_retool.parity.doctor.engine_steps:kernels",
        "the compiler names what is missing: g++, ninja, or nvidia-cuda-nvcc and the packages that it needs; "
        + _INSTALL,
        timeout_seconds=600,
        needs=("reference",),
    ),
    DoctorStep(
        "exact_operators",
        ENGINE,
        "whether a row depends on its neighbours in the operators of learner.match_engine=exact",
        "megatron_retool.parity.doctor.exact_steps:operators",
        "docs/mismatch.md, Exact; learner.match_engine=none trains without them",
        timeout_seconds=600,
    ),
    DoctorStep(
        "engine_exact",
        ENGINE,
        "an engine and a learner with learner.match_engine=exact: the same log-probs to the bit",
        "megatron_retool.parity.doctor.exact_steps:engine",
        "docs/mismatch.md, Exact; learner.match_engine=none trains without it",
        timeout_seconds=600,
        needs=("reference",),
    ),
    DoctorStep(
        "engine",
        ENGINE,
        "SGLang starts, with a mixture of experts, and generates",
        "megatron_retool.parity.doctor.engine_steps:engine",
        "docs/failures.md has the messages of engines that do not start",
        timeout_seconds=600,
        needs=("reference",),
        stays=True,
    ),
    DoctorStep(
        "engine_log_probs",
        ENGINE,
        "log-probs of a fixed text, engine against learner",
        "megatron_retool.parity.doctor.engine_steps:log_probs",
        "docs/mismatch.md, The first sync",
        needs=("engine",),
    ),
    DoctorStep(
        "engine_replay",
        ENGINE,
        "log-probs of sampled responses against the learner's, with the engine's experts replayed",
        "megatron_retool.parity.doctor.engine_steps:replay",
        "docs/mismatch.md and docs/algorithms.md; learner.routing_replay=none continues without replay",
        needs=("engine",),
    ),
    DoctorStep(
        "sync_disk",
        SYNC,
        "new weights by files, every checksum",
        "megatron_retool.parity.doctor.sync_steps:disk",
        _SYNC,
        needs=("engine",),
    ),
    DoctorStep(
        "sync_tensor",
        SYNC,
        "new weights by shared memory or CUDA IPC, every checksum",
        "megatron_retool.parity.doctor.sync_steps:tensor",
        _SYNC,
        needs=("engine",),
    ),
    DoctorStep(
        "sync_distributed",
        SYNC,
        "new weights by broadcast, every checksum",
        "megatron_retool.parity.doctor.sync_steps:distributed",
        _SYNC,
        needs=("engine",),
    ),
    DoctorStep(
        "sleep_wake",
        MEMORY,
        "engine and learner give their GPU memory back, and take it again",
        "megatron_retool.parity.doctor.memory_steps:sleep_wake",
        "PYTORCH_CUDA_ALLOC_CONF must not set expandable_segments; torch_memory_saver has to match torch",
        needs=("engine",),
    ),
    DoctorStep(
        "engine_dense",
        ENGINE,
        "log-probs of a fixed text by a dense model's engine against the learner",
        "megatron_retool.parity.doctor.engine_steps:dense",
        "docs/mismatch.md, The first sync",
        timeout_seconds=600,
        needs=("reference",),
    ),
    DoctorStep(
        "engine_fp8",
        ENGINE,
        "an engine that serves FP8 and starts empty: synced weights, log-probs of a fixed text against the learner",
        "megatron_retool.parity.doctor.engine_steps:fp8",
        "docs/mismatch.md, The first sync; if engine_dense passes, rollout.engine.quantization=null does too",
        timeout_seconds=600,
        needs=("reference",),
    ),
    DoctorStep(
        "checkpoint",
        CHECKPOINT,
        "saved, loaded, in another layout too: loss and learning rate continue",
        "megatron_retool.parity.doctor.checkpoint_steps:checkpoint",
        "a disk that is full or slow shows in the log; megatron-retool check DIR holds files against checksums",
        needs=("reference",),
    ),
    DoctorStep(
        "bandwidth",
        SPEED,
        "copies between host and device, and within each",
        "megatron_retool.parity.doctor.speed_steps:bandwidth",
        "nvidia-smi -q -d PERFORMANCE,PCIE: a narrow link, a throttled GPU, or somebody else on it",
    ),
    DoctorStep(
        "step_time",
        SPEED,
        "an optimizer step in bfloat16 and FP8: seconds, memory, share of the peak (MFU), attention kernel",
        "megatron_retool.parity.doctor.speed_steps:step_time",
        "kernels_* tell which fused kernels are there; without Transformer Engine layers and attention are torch's",
        timeout_seconds=300,
    ),
    DoctorStep(
        "demo",
        DEMO,
        "some steps of the demo, learner and engines taking turns on the same GPUs",
        "megatron_retool.parity.doctor.demo_steps:colocated_demo",
        "docs/failures.md has a run's messages; logs/ of the run has a file for each process",
        timeout_seconds=1500,
        needs=("engine_log_probs", "sync_tensor", "sleep_wake"),
    ),
)


class UnknownStep(InputError):
    """--steps names none of the steps. The message has the nearest."""


def select(names: Sequence[str] | None) -> list[DoctorStep]:
    """The steps of these groups or names, with all that they need, in the doctor's order; None: all.

    A name that is both is the group.

    Raises:
        UnknownStep: a name is neither a step's nor a group's.
    """
    if names is None:
        return list(STEPS)
    by_name = {step.name: step for step in STEPS}
    groups = {step.group for step in STEPS}
    wanted: set[str] = set()
    left = []
    for name in names:
        if name not in by_name and name not in groups:
            nearest = difflib.get_close_matches(name, [*by_name, *groups], n=1, cutoff=0.0)[0]
            raise UnknownStep(f"--steps {name}: no such step; the nearest is {nearest}, --list has all")
        left += [step.name for step in STEPS if step.group == name] if name in groups else [name]
    while left:
        name = left.pop()
        if name not in wanted:
            wanted.add(name)
            left += by_name[name].needs
    return [step for step in STEPS if step.name in wanted]
