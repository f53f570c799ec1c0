"""What Megatron-Core needs without CUDA: refused when it comes too late, absent where CUDA is present."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_retool.learner import cpu

ROOT = Path(__file__).parents[2]


def _run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_too_late_is_an_error() -> None:
    result = _run("import megatron.core\nfrom megatron_retool.learner import cpu\ncpu.install()")
    assert result.returncode != 0
    assert "megatron.core was imported before megatron_retool.learner.cpu.install()" in result.stderr


def test_nothing_is_touched_where_cuda_is_present() -> None:
    result = _run(
        "import torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "before = torch.empty, torch.Tensor.to, torch.cuda.current_device, torch.cuda.Stream\n"
        "from megatron_retool.learner import cpu\n"
        "assert cpu.install() is False\n"
        "assert before == (torch.empty, torch.Tensor.to, torch.cuda.current_device, torch.cuda.Stream)\n"
    )
    assert result.returncode == 0, result.stderr


def test_meta_device_still_works() -> None:
    """Without it transformers fills buffers that no checkpoint holds with uninitialised memory."""
    result = _run(
        "import torch\n"
        "from megatron_retool.learner import cpu\n"
        "cpu.install()\n"
        "with torch.device('meta'):\n"
        "    assert torch.empty(2).is_meta and torch.arange(2).is_meta and torch.nn.Linear(2, 2).weight.is_meta\n"
    )
    assert result.returncode == 0, result.stderr


@pytest.fixture
def installed() -> None:
    assert cpu.install()
    assert cpu.install(), "calling it again changes nothing"


@pytest.mark.usefixtures("installed")
def test_the_host_answers_for_the_device() -> None:
    for tensor in (
        torch.zeros(2, device="cuda"),
        torch.arange(3, device=torch.cuda.current_device()),
        torch.empty(2, pin_memory=True),
        torch.ones(1).to("cuda:0").cuda(),
        torch.ones(1).to(device=torch.device("cuda", 0), dtype=torch.float64),
    ):
        assert tensor.device.type == "cpu"
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    torch.cuda.manual_seed(3)
    first = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2), first)


@pytest.mark.usefixtures("installed")
def test_type_names_are_cudas_only_while_megatron_compares_them() -> None:
    assert cpu._with_cuda_type_names(lambda: torch.ones(1).type())() == "torch.cuda.FloatTensor"
    assert torch.ones(1).type() == "torch.FloatTensor"
    assert torch.ones(1).type(torch.int64).dtype is torch.int64


@pytest.mark.usefixtures("installed")
def test_functions_stay_uncompiled() -> None:
    from megatron.core import jit

    def function() -> None: ...

    assert jit.jit_fuser(function) is function
    assert torch.compile.__module__.startswith("torch"), "torch's own is back for everybody else"
