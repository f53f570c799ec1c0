"""SGLang's server on a host without a GPU: its command-line arguments, and the environment of its process.

    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, *SERVER_ARGUMENTS]
    subprocess.Popen(command, env={**os.environ, **environment(os.environ)})

What SGLang lacks on a CPU comes from ``python_path/``, a directory on PYTHONPATH of that process and its children:
``sitecustomize`` makes torchvision importable, ``sgl_kernel`` stands for the package of CUDA kernels, an entry point
names ``plugin``. No other process of the environment sees them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

SGLANG_VERSION = "0.5.23"
"""The release whose functions ``plugin`` exchanges."""

PYTHON_PATH = Path(__file__).resolve().parent / "python_path"

WITHOUT_VARIABLE = "SGLANG_CPU_ENGINE_WITHOUT"
MODEL_CLASS_VARIABLE = "SGLANG_CPU_ENGINE_MODEL_CLASS"

SERVER_ARGUMENTS = (
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    "--sampling-backend",
    "pytorch",
    # Overlapping the scheduler with the device gains nothing where both are the same cores.
    "--disable-overlap-schedule",
    "--sleep-on-idle",
)
"""Of ``sglang.launch_server``."""


def environment(
    inherited: Mapping[str, str],
    *,
    threads: int = 1,
    tensor_parallel_size: int = 1,
    model_class: str | None = None,
    without: Collection[str] = (),
) -> dict[str, str]:
    """What the server's process needs in its environment, beside what it inherits.

    Args:
        inherited: the environment that it would have otherwise; its PYTHONPATH stays behind ``PYTHON_PATH``.
        threads: of each tensor-parallel rank. Compiled layers and --enable-deterministic-inference need 1.
        model_class: SGLang's class of the model as "module:class". With it the server starts sooner, because SGLang
            does not import every model that it has to find the class.
        without: operators that ``plugin`` leaves alone, because another plugin exchanges them: of "norm",
            "activation", "rotary", "attention" and "experts".
    """
    paths = [path for path in inherited.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != PYTHON_PATH]
    variables = {
        "PYTHONPATH": os.pathsep.join([str(PYTHON_PATH), *paths]),
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # Compiling the seeded sampler would need a C++ compiler on the host.
        "TORCHDYNAMO_DISABLE": "1",
        # The last tokens before a convolution, which a float32 model would lose digits of.
        "SGLANG_MAMBA_CONV_DTYPE": "float32",
        # A CUDA build of torch brings NCCL, which SGLang would then use between CPU ranks; it goes without one.
        "SGLANG_NCCL_SO_PATH": "none",
    }
    if tensor_parallel_size > 1:
        # SGLang wants a NUMA node for each rank unless the variable names the cores of each rank.
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = _cores_by_rank(tensor_parallel_size, threads)
    if model_class is not None:
        variables |= {
            "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_cpu_engine.served_model",
            MODEL_CLASS_VARIABLE: model_class,
        }
    if without:
        variables[WITHOUT_VARIABLE] = ",".join(sorted(without))
    return variables


def _cores_by_rank(ranks: int, threads: int) -> str:
    """Cores of each tensor-parallel rank, "0,1|2,3|…"; ranks share cores where there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    cores_of = (range(rank * threads, (rank + 1) * threads) for rank in range(ranks))
    return "|".join(",".join(str(cores[place % len(cores)]) for place in places) for places in cores_of)
