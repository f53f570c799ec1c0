"""CUDA_HOME out of packages: links that a compiler and a linker find, and SGLang's kernels compiled with them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_retool.config import EngineConfig
from megatron_retool.cuda_toolkit import cuda_environment, cuda_packages, link_toolkit, load_cudnn
from megatron_retool.parity.doctor import engine_steps
from megatron_retool.parity.doctor.host_steps import read_pins
from sglang_rollout.engine.process import SGLangServer

ROOT = Path(__file__).parents[1]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "site" / "nvidia" / "cu13"
    for name in ("bin/nvcc", "include/cuda.h", "nvvm/bin/cicc", "lib/libcudart.so.13", "lib/libcudart_static.a"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(name)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return path


def test_a_toolkit_of_links(packages: Path, tmp_path: Path) -> None:
    home = link_toolkit(packages, tmp_path / "home")
    for name in ("bin/nvcc", "include/cuda.h", "nvvm/bin/cicc"):
        assert (home / name).read_text() == name
    for name in ("libcudart.so.13", "libcudart.so"):
        assert (home / "lib64" / name).read_text() == "lib/libcudart.so.13"
    assert (home / "lib64" / "libcudart_static.a").is_file() and (home / "lib64" / "stubs").is_dir()


def test_links_into_packages_that_are_gone_are_made_again(packages: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "lib64").mkdir(parents=True)
    (home / "bin").symlink_to(tmp_path / "gone")
    (home / "lib64" / "libcudart.so").symlink_to(tmp_path / "gone")
    assert (link_toolkit(packages, home) / "bin" / "nvcc").is_file() and (home / "lib64" / "libcudart.so").is_file()


def test_it_takes_the_place_of_a_toolkit_on_the_node(packages: Path, tmp_path: Path) -> None:
    assert cuda_packages() == packages
    node = {"CUDA_HOME": "/usr/local/cuda-12", "PATH": "/usr/local/cuda-12/bin:/bin", "LD_LIBRARY_PATH": "/of/user"}
    home = tmp_path / "cuda_home"
    expected = {
        "CUDA_HOME": str(home),
        "PATH": f"{home}/bin:/usr/local/cuda-12/bin:/bin",
        "LD_LIBRARY_PATH": f"{packages}/lib:/of/user",
    }
    assert cuda_environment(node) == expected
    assert cuda_environment(expected) == expected, "given twice it stays the same"


def test_compiled_kernels_outlive_a_container(packages: Path) -> None:
    found = cuda_environment({"MEGATRON_RETOOL_LOCAL_DIR": "/scratch", "TRITON_CACHE_DIR": "/of/user"})
    place = f"/scratch/megatron_retool_kernels_{os.getuid()}"
    assert found["SGLANG_CACHE_DIR"] == f"{place}/sglang" and found["SGLANG_JIT_CACHE_DIR"] == f"{place}/sglang/jit"
    assert "TRITON_CACHE_DIR" not in found and "SGLANG_CACHE_DIR" not in cuda_environment({})


def test_libraries_without_a_compiler_leave_the_toolkit_of_the_node(packages: Path) -> None:
    (packages / "bin" / "nvcc").unlink()
    assert cuda_environment({}) == {"LD_LIBRARY_PATH": str(packages / "lib")}


def test_parts_of_cudnn_are_all_of_the_packages(packages: Path, tmp_path: Path) -> None:
    """Libraries of the names and needs of cuDNN's, of the packages' version and of another, which the node has."""
    assert load_cudnn() == []
    node = tmp_path / "node"
    for version, place in ((924, packages.parent / "cudnn" / "lib"), (914, node)):
        place.mkdir(parents=True)
        for name, code, needed in (
            ("graph", f"int graph(void) {{ return {version}; }}", []),
            ("heuristic", "int graph(void); int version(void) { return graph(); }", ["-l:libcudnn_graph.so.9"]),
            ("adv", "", ["-l:libcudnn_heuristic.so.9"]),
        ):
            library = f"libcudnn_{name}.so.9"
            flags = ["-shared", "-fPIC", f"-Wl,-soname,{library}", "-Wl,--no-as-needed", f"-L{place}"]
            command = ["cc", "-x", "c", *flags, "-o", str(place / library), "-", *needed]
            subprocess.run(command, input=code.encode(), check=True)
    code = "import ctypes; print(ctypes.CDLL('libcudnn_adv.so.9').version())"
    load = f"import sys; sys.path[:0] = {[str(packages.parents[1]), str(ROOT)]}; " + (
        "from megatron_retool.cuda_toolkit import load_cudnn; load_cudnn(); "
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(node)}
    found = [
        subprocess.run([sys.executable, "-c", each], env=environment, capture_output=True, text=True, check=True).stdout
        for each in (code, load + code)
    ]
    assert found == ["914\n", "924\n"]


def test_an_engine_on_a_gpu_gets_it(packages: Path, tmp_path: Path) -> None:
    for device, given in (("cuda", str(tmp_path / "cuda_home")), ("cpu", os.environ.get("CUDA_HOME"))):
        config = EngineConfig(device=device)
        server = SGLangServer(config, model_path=tmp_path, log_file=tmp_path / "log")
        (tmp_path / "config.json").write_text("{}")
        assert server.environment().get("CUDA_HOME") == given


FAKE_GPU = """
import types
import torch
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.get_device_name = lambda device=None: "NVIDIA H100 80GB HBM3"
torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(
    major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, name="NVIDIA H100 80GB HBM3", uuid="0"
)
torch.version.cuda = "13.0"
"""


@pytest.mark.rare
@pytest.mark.real_weights
def test_the_pinned_packages_preload_and_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a node's packages: the memory saver's preload resolves, and SGLang's kernels compile and link."""
    pins = dict(read_pins((ROOT / "requirements" / "gpu.txt").read_text()))
    wanted = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-cuda-runtime", "nvidia-nvvm")
    names = [f"{name}=={pins[name]}" for name in (*wanted, "torch-memory-saver")]
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), *names]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"the packages cannot be had: {done.stderr[-200:]}")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    # Driver and device are all that is missing here.
    subprocess.run(
        ["c++", "-shared", "-Wl,-soname,libcuda.so.1", "-o", site / "libcuda.so.1", "-x", "c++", "/dev/null"]
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", str(site))
    monkeypatch.setenv("HOME", str(tmp_path))  # compiled kernels of before are no proof
    server = SGLangServer(EngineConfig(device="cuda"), model_path=tmp_path, log_file=tmp_path / "log")
    on_cpu = SGLangServer(EngineConfig(device="cpu"), model_path=tmp_path, log_file=tmp_path / "log").environment()
    environment = server.environment() | {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": on_cpu["PYTHONPATH"]}

    library = site / "torch_memory_saver_hook_mode_preload_cu13.abi3.so"
    mapped = engine_steps.preloaded(environment, library)
    assert str(library) in mapped and any(str(site / "nvidia" / "cu13") in path for path in mapped)

    compiled = engine_steps.compiled_kernels(environment, FAKE_GPU)
    assert compiled == list(engine_steps.KERNELS), compiled
