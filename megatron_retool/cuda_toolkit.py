"""The CUDA toolkit that the environment's packages bring, for what compiles and links kernels while it runs.

SGLang, FlashInfer and tvm-ffi compile kernels at their first use with the nvcc of CUDA_HOME, and link against its
lib64. The packages (nvidia-cuda-nvcc and others) hold all of it in ``nvidia/cu13``, in another arrangement than a
toolkit has. So CUDA_HOME becomes a directory of links into them, and neither a missing toolkit nor one of another CUDA
version on the node matters. Their libraries also go on LD_LIBRARY_PATH: a library that is preloaded, as
torch_memory_saver's is, is resolved before torch could load them.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

LOCAL_DIRECTORY_VARIABLE = "MEGATRON_RETOOL_LOCAL_DIR"
_CACHES = {
    "SGLANG_CACHE_DIR": "sglang",  # DeepGEMM's, FlashInfer's and inductor's of an engine lie below it
    "SGLANG_JIT_CACHE_DIR": "sglang/jit",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "nv",
}
_CUDNN_FIRST = ("libcudnn_graph", "libcudnn_ops")
"""The second needs the first, and all others need both."""
DRIVER = Path("/proc/driver/nvidia/version")
_DRIVER_LIBRARY = "libcuda.so.1"
_LIBRARY_DIRECTORIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib/aarch64-linux-gnu", "/usr/lib/wsl/lib")


def has_driver() -> bool:
    """Whether this host has NVIDIA's driver; torch is not imported for it."""
    return DRIVER.exists()


def cuda_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """CUDA_HOME, PATH, LD_LIBRARY_PATH and caches of a process that uses a GPU, given the ``environment`` of before.

    They replace a CUDA_HOME that is set: a node's own toolkit may be of another version than torch. Without NVIDIA's
    packages (CUDA from conda or from the system) it stays. Compiled kernels are kept in MEGATRON_RETOOL_LOCAL_DIR where
    that is set, for the home directory of a container goes with it; a cache's place that is set stays.
    """
    result = {}
    if local := environment.get(LOCAL_DIRECTORY_VARIABLE):
        caches = Path(local) / f"megatron_retool_kernels_{os.getuid()}"
        result = {name: str(caches / place) for name, place in _CACHES.items() if name not in environment}
    packages = cuda_packages()
    if packages is None:
        return result
    result |= {"LD_LIBRARY_PATH": _first(packages / "lib", environment.get("LD_LIBRARY_PATH"))}
    if (packages / "bin" / "nvcc").is_file():
        home = link_toolkit(packages, _home())
        result |= {"CUDA_HOME": str(home), "PATH": _first(home / "bin", environment.get("PATH"))}
    return result


def load_cudnn() -> list[Path]:
    """Load every part of the packages' cuDNN into this process, before Transformer Engine looks for one.

    It would take the node's where LD_LIBRARY_PATH or the loader's cache has one. Parts of two versions do not fit: its
    import fails, or its attention goes without cuDNN, with memory that grows with the square of a sequence's length.
    A part that is loaded is what others that need it get.

    Returns:
        What was loaded, in this order; [] without NVIDIA's packages.
    """
    packages = cuda_packages()
    if packages is None:
        return []
    libraries = (packages.parent / "cudnn" / "lib").glob("libcudnn*.so.*")
    result = sorted(libraries, key=lambda path: (path.name.split(".")[0] not in _CUDNN_FIRST, path.name))
    for path in result:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return result


def cuda_packages() -> Path | None:
    """The directory that NVIDIA's packages share, such as site-packages/nvidia/cu13; None where there is none.

    Of several, one with a compiler, then that of the newest CUDA.
    """
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    result = [
        path for place in places for path in Path(place).glob("cu[0-9][0-9]") if any(path.glob("lib/libcudart.so.*"))
    ]
    return max(result, key=lambda path: ((path / "bin" / "nvcc").is_file(), int(path.name[2:])), default=None)


def link_toolkit(packages: Path, home: Path) -> Path:
    """Make ``home`` a CUDA_HOME: bin, include, nvvm, and lib64 with the names that a linker looks for.

    Several processes may do so at the same time; links that are right stay.
    """
    (home / "lib64" / "stubs").mkdir(parents=True, exist_ok=True)
    for name in ("bin", "include", "nvvm"):
        _link(home / name, packages / name)
    for library in sorted((packages / "lib").iterdir()):
        _link(home / "lib64" / library.name, library)
        stem, numbered, _ = library.name.partition(".so.")
        if numbered:
            _link(home / "lib64" / f"{stem}.so", library)
    # Toolkits have a stub of the driver's library to link against; the packages have none, but here is the driver.
    for directory in _LIBRARY_DIRECTORIES:
        if (driver := Path(directory) / _DRIVER_LIBRARY).exists():
            _link(home / "lib64" / "stubs" / "libcuda.so", driver)
            break
    return home


def _home() -> Path:
    """In the environment itself, or among temporary files where it is not ours to write."""
    home = Path(sys.prefix) / "cuda_home"
    if home.is_dir() or os.access(sys.prefix, os.W_OK):
        return home
    return Path(tempfile.gettempdir()) / "cuda_home"


def _link(link: Path, target: Path) -> None:
    with contextlib.suppress(OSError):
        if os.readlink(link) == str(target):
            return
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)


def _first(directory: Path, others: str | None) -> str:
    rest = [other for other in (others or "").split(os.pathsep) if other and other != str(directory)]
    return os.pathsep.join([str(directory), *rest])
