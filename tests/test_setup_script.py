"""scripts/setup.sh: what it installs, in which order, and when it leaves an environment alone.

pip and uv are stand-ins.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]


class Checkout:
    """A copy of what the script reads, with programs that only say how they were called."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.errors = ""
        shutil.copytree(ROOT / "requirements", path / "requirements")
        (path / "scripts").mkdir()
        for name in ("scripts/setup.sh", "scripts/usage.sh", "scripts/package_index.sh", "pyproject.toml"):
            shutil.copy(ROOT / name, path / name)
        self.program("bin/python3.12", "exit 0")
        self.program(".venv/bin/python", 'echo "$@"')
        self.set_gpu(False)

    def set_gpu(self, present: bool) -> None:
        self.program("bin/nvidia-smi", f"exit {int(not present)}")

    def program(self, name: str, body: str) -> None:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/bash\n{body}\n")
        file.chmod(0o755)

    def setup(self, *arguments: str, code: int = 0, **variables: str) -> list[str]:
        """What was installed: requirement files and ".", sorted, for several are installed at once."""
        environment = {"PATH": f"{self.path}/bin:{os.defpath}", **variables}
        command = ["bash", "scripts/setup.sh", *arguments]
        done = subprocess.run(command, cwd=self.path, env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        self.errors = done.stderr
        calls = [line.split() for line in done.stdout.splitlines() if line.startswith("-m pip install")]
        return sorted(call[-1].removeprefix("requirements/").removesuffix(".txt") for call in calls)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


CPU = sorted(
    ["installer", "cpu-torch", "cpu", "sglang_only", "transformer_engine_only", "cookbook_only", "docs_only", "."]
)
GPU = sorted(["gpu-torch", "gpu-build", "gpu", "."])


@pytest.mark.parametrize(
    ("gpu", "arguments", "expected"), [(False, (), CPU), (True, (), GPU), (False, ("--gpu",), GPU)]
)
def test_installs_for_the_host_or_as_asked(
    checkout: Checkout, gpu: bool, arguments: tuple[str, ...], expected: list[str]
) -> None:
    checkout.set_gpu(gpu)
    assert checkout.setup(*arguments) == expected
    assert checkout.setup(*arguments) == [], "it is there already"


def test_a_changed_list_is_installed_again(checkout: Checkout) -> None:
    checkout.setup()
    with open(checkout.path / "requirements" / "cpu.txt", "a") as file:
        file.write("another==1.0\n")
    assert checkout.setup() == CPU


def test_an_environment_for_gpus_keeps_its_kind_on_a_login_node(checkout: Checkout) -> None:
    checkout.setup("--gpu")
    assert checkout.setup() == []
    with open(checkout.path / "requirements" / "gpu-build.txt", "a") as file:
        file.write("another==1.0\n")
    assert checkout.setup() == GPU


def test_packages_are_compiled_at_the_end_on_all_cores(checkout: Checkout) -> None:
    checkout.program(".venv/bin/python", 'echo "$@" >>calls')
    checkout.setup()
    *installed, compiled = (checkout.path / "calls").read_text().splitlines()
    words = compiled.split()
    assert words[:6] == ["-m", "compileall", "-q", "-q", "-j", "0"] and words[-1] == ".venv"
    skipped = re.compile(words[words.index("-x") + 1])
    packages = ".venv/lib/python3.12/site-packages/"
    assert skipped.search(packages + "sympy/core/tests/test_args.py")
    assert not skipped.search(packages + "transformers/models/auto/modeling_auto.py")
    assert not skipped.search(packages + "torch/testing.py")
    assert all("--no-compile" in call for call in installed if call.startswith("-m pip install"))


def test_torch_comes_first_and_nothing_is_added_to_the_list(checkout: Checkout) -> None:
    checkout.program(".venv/bin/python", '[[ "$*" != *pip\\ install* ]] || echo "$@" >>calls')
    checkout.setup()
    calls = (checkout.path / "calls").read_text().splitlines()
    assert [call.split()[-1] for call in calls[1:3]] == ["requirements/cpu-torch.txt", "requirements/cpu.txt"]
    assert all("--no-deps" in call for call in calls if "cpu-torch" not in call)


def test_uv_installs_from_the_indexes_of_pip(checkout: Checkout) -> None:
    variables = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS", "SSL_CERT_FILE")
    checkout.program(".venv/bin/uv", f'echo "$@ {" ".join(f"{name}=${name}" for name in variables)}" >>calls')
    settings = (
        "global.index-url='https://a/simple'",
        r"global.extra-index-url='https://b/simple\nhttps://c'",
        "global.find-links='/d /e'",
        "global.cert='/f.pem'",
    )
    listed = "; ".join(f'echo "{line}"' for line in settings)
    checkout.program(".venv/bin/python", f'if [[ "$*" == *config* ]]; then {listed}; else echo "$@"; fi')
    assert checkout.setup() == ["installer"], "pip is left with uv alone"
    calls = (checkout.path / "calls").read_text().splitlines()
    assert len(calls) == len(CPU) - 1
    places = "UV_DEFAULT_INDEX=https://a/simple UV_INDEX=https://b/simple https://c UV_FIND_LINKS=/d,/e"
    assert all(call.endswith(f"{places} SSL_CERT_FILE=/f.pem") for call in calls)


def test_what_uv_cannot_install_pip_does(checkout: Checkout) -> None:
    checkout.program(".venv/bin/uv", '[[ "$*" != *cpu.txt ]]')
    assert checkout.setup() == ["cpu", "installer"]


def test_without_uv_pip_does_all(checkout: Checkout) -> None:
    checkout.program(".venv/bin/python", '[[ "$*" != *installer.txt ]] && echo "$@"')
    assert checkout.setup() == sorted(set(CPU) - {"installer"})


def test_a_list_that_cannot_be_installed_ends_the_setup(checkout: Checkout) -> None:
    checkout.program(".venv/bin/python", '[[ "${@: -1}" != *cpu.txt ]]')
    checkout.setup(code=1)
    assert not (checkout.path / ".venv" / ".installed").exists()


MAKES_AN_ENVIRONMENT = """case "$*" in
  *ensurepip*) ;;
  "-m venv "*) mkdir -p "$3/bin"; echo 'echo "$@"' >"$3/bin/python"; chmod +x "$3/bin/python" ;;
esac"""


@pytest.mark.parametrize(
    ("place", "said_by_uv"),
    [
        ("bin/python3.12", None),
        ("bin/python3.13", None),
        ("bin/python3", None),
        ("pyenv/versions/3.13.1/bin/python3", None),
        ("elsewhere/versions/3.13.1/bin/python3", None),
        ("uv/python", "find"),
        ("uv/python", "install"),
    ],
)
def test_an_interpreter_is_found_where_there_is_one(tmp_path: Path, place: str, said_by_uv: str | None) -> None:
    checkout = Checkout(tmp_path)
    shutil.rmtree(tmp_path / ".venv")
    for name in ("python3.12", "python3.13", "python3", "python"):
        checkout.program(f"bin/{name}", "exit 1")  # another version, or pyenv's shim of one that is not active
    checkout.program(place, MAKES_AN_ENVIRONMENT)
    found = f'[[ "$2" == find && -e {tmp_path}/installed ]] && echo {tmp_path}/{place}'
    installs = f'[[ "$2" == install ]] && touch {tmp_path}/installed'
    checkout.program("bin/uv", f"{found} || {{ {installs}; }}")
    if said_by_uv == "find":
        (tmp_path / "installed").touch()
    checkout.program("elsewhere/bin/pyenv", "exit 1")
    path = f"{tmp_path}/bin:{tmp_path}/elsewhere/bin:{os.defpath}"
    assert checkout.setup(PYENV_ROOT=f"{tmp_path}/pyenv", PATH=path) == CPU
    assert (tmp_path / "installed").exists() == (said_by_uv is not None), "uv is asked last"


def test_without_an_interpreter_one_line_says_what_is_missing(checkout: Checkout) -> None:
    shutil.rmtree(checkout.path / ".venv")
    for name in ("python3.12", "python3.13", "python3", "python", "uv"):
        checkout.program(f"bin/{name}", "exit 1")
    checkout.setup(code=1)
    assert checkout.errors.splitlines() == [
        "setup: Python 3.12 or 3.13 is needed and was not found: install it (python3.12 with its venv package, conda, "
        "or uv python install 3.12)"
    ]


def test_one_of_the_versions_can_be_asked_for(checkout: Checkout) -> None:
    shutil.rmtree(checkout.path / ".venv")
    checkout.program("bin/python3.13", MAKES_AN_ENVIRONMENT.replace("*ensurepip*) ", "*ensurepip*\"'3.13'.split\"*) "))
    checkout.program("bin/python3.12", '[[ "$*" != *ensurepip* ]]')
    assert checkout.setup(MEGATRON_RETOOL_PYTHON="3.13") == CPU
    checkout.setup(code=1, MEGATRON_RETOOL_PYTHON="3.11; true")
    assert checkout.errors == "setup: MEGATRON_RETOOL_PYTHON=3.11; true: it can be 3.12 or 3.13\n"


def test_an_environment_of_an_older_python_is_said_to_be_old(checkout: Checkout) -> None:
    checkout.program(".venv/bin/python", '[[ "$1" == -V ]] && echo Python 3.11.7')
    checkout.setup(code=1)
    assert checkout.errors.splitlines() == [
        "setup: .venv was made with Python 3.11.7, and this needs Python 3.12 or 3.13: rm -r .venv, then run this again"
    ]


def test_an_unknown_argument_is_refused(checkout: Checkout) -> None:
    assert checkout.setup("--cuda", code=1) == []


def test_transformer_engine_is_compiled_with_the_headers_of_python_packages(checkout: Checkout) -> None:
    said = "echo $NVTE_FRAMEWORK $NVTE_BUILD_USE_NVIDIA_WHEELS $NVTE_PYTORCH_FORCE_BUILD"
    checkout.program(".venv/bin/python", f'echo "$@" >>calls; {said} >>calls')
    checkout.setup("--gpu")
    lines = (checkout.path / "calls").read_text().splitlines()
    calls = dict(zip(lines[::2], lines[1::2], strict=True))
    (build,) = (variables for call, variables in calls.items() if call.endswith("requirements/gpu.txt"))
    assert build == "pytorch 1 TRUE"
    assert any("--no-deps -r requirements/gpu-build.txt" in call for call in calls)
    assert "-c import torch, transformer_engine.pytorch" in calls
    # CUDA 13.0, as torch's own packages.
    headers = (ROOT / "requirements" / "gpu-build.txt").read_text()
    assert "nvidia-cuda-crt==13.0." in headers and "nvidia-cuda-cccl==13.0." in headers


LACKS = {
    "Python.h is missing": {"sysconfig.get_path": lambda name: "/nowhere"},
    "a C++ compiler is missing": {"shutil.which": lambda name: None},
    "glibc 2.31 is older than the 2.34": {"platform.libc_ver": lambda: ("glibc", "2.31")},
}
WARNS = {
    "no NVIDIA driver answers here": {"driver_version": lambda: None},
    "the driver 550.54.14 is too old for CUDA 13": {"driver_version": lambda: "550.54.14"},
    "/dev/shm has 64 MiB": {"shutil.disk_usage": lambda path: SimpleNamespace(total=64 << 20)},
}


@pytest.mark.parametrize("said", [*LACKS, *WARNS])
def test_what_a_host_lacks_is_said_before_anything_is_downloaded(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = runpy.run_path(str(ROOT / "megatron_retool" / "gpu_host.py"))
    names = check["main"].__globals__
    good = {
        "sysconfig.get_path": lambda name: str(tmp_path), "shutil.which": lambda name: "/usr/bin/c++",
        "platform.libc_ver": lambda: ("glibc", "2.39"), "driver_version": lambda: "580.65.06",
        "shutil.disk_usage": lambda path: SimpleNamespace(total=32 << 30),
    }  # fmt: skip
    (tmp_path / "Python.h").touch()
    for name, value in (good | (LACKS | WARNS)[said]).items():
        module, _, attribute = name.rpartition(".")
        if module:
            monkeypatch.setattr(names[module], attribute, value)
        else:
            monkeypatch.setitem(names, attribute, value)
    assert check["main"]() == int(said in LACKS)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("setup: ") and said in line


def test_an_environment_for_gpus_is_not_begun_where_it_cannot_be_built(checkout: Checkout) -> None:
    checkout.program("bin/python3.12", '[[ "$1" != megatron_retool/gpu_host.py ]]')
    (checkout.path / ".venv" / "bin" / "python").unlink()
    assert checkout.setup("--gpu", code=1) == []


def test_the_same_transformer_engine_with_and_without_a_gpu() -> None:
    from tests.learner.transformer_engine.kernels import VERSION

    gpu, cpu = ((ROOT / "requirements" / f"{name}.txt").read_text() for name in ("gpu", "transformer_engine_only"))
    assert f"\ntransformer-engine=={VERSION} " in gpu and f"\ntransformer-engine=={VERSION} " in cpu
