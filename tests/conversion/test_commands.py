"""The conversion commands as a user meets them: help, a Python without packages, verification by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conversion import fp8_export, hf_to_mcore, mcore_to_hf, verify

ROOT = Path(__file__).parents[2]
COMMANDS = {"hf_to_mcore": hf_to_mcore, "mcore_to_hf": mcore_to_hf, "fp8_export": fp8_export, "verify": verify}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_and_a_python_without_packages(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        COMMANDS[name].main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"python conversion/{name}.py --" in text and "Exit status: 0" in text

    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    script = str(ROOT / "conversion" / f"{name}.py")
    bare = subprocess.run(
        [sys.executable, "-S", script, "--help"], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert (bare.returncode, bare.stdout) == (1, "")
    (line,) = bare.stderr.splitlines()
    assert f"lacks the package rich, which `python conversion/{name}.py` needs" in line and "/activate`" in line


def test_verification_by_hand(model_directory, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(verify, "_mcore_logits", verify._hf_logits)
    monkeypatch.setattr(verify, "run_alone", lambda function, job: function(job))
    source = model_directory("llama")
    assert verify.main(["--hf-dir", str(source), "--mcore-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "the same model: the logits differ by at most 0.000e+00\n"
    monkeypatch.setattr(verify, "_mcore_logits", lambda comparison, ids: verify._hf_logits(comparison, ids.flip(1)))
    assert verify.main(["--hf-dir", str(source), "--mcore-dir", str(tmp_path), "--dtype", "bfloat16"]) == 1
    assert capsys.readouterr().err.startswith("error: verification failed: the logits of")
    assert verify.main(["--hf-dir", str(tmp_path / "nowhere"), "--mcore-dir", str(tmp_path)]) == 1
    assert "nowhere" in capsys.readouterr().err


def test_fp8_export_by_hand(model_directory, tmp_path: Path, capsys) -> None:
    arguments = ["--target", str(tmp_path / "fp8"), "--scheme", "per-tensor", "--calibration", str(tmp_path / "no.txt")]
    assert fp8_export.main(["--hf-dir", str(tmp_path), *arguments]) == 1
    assert "is no Hugging Face directory: config.json is missing" in capsys.readouterr().err
    assert fp8_export.main(["--hf-dir", str(model_directory("llama")), *arguments]) == 1
    assert f"calibration file {tmp_path / 'no.txt'} cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "fp8").exists()


REFUSED = {
    "fp8_export": (
        ["--hf-dir", "MODEL", "--target", "out", "--scheme", "nvfp4", "--calibration", "no.txt"],
        "no.txt cannot be read",
    ),
    "hf_to_mcore": (["--hf-dir", "MODEL", "--mcore-dir", "MODEL"], "MODEL"),
    "mcore_to_hf": (["--mcore-dir", "no", "--hf-dir", "out"], "no does not exist"),
    "verify": (["--hf-dir", "MODEL", "--mcore-dir", "no"], "no does not exist"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_what_cannot_be_used_is_said_before_heavy_imports(name: str, model_directory, tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, list[str]]:
        script = [sys.executable, "-X", "importtime", str(ROOT / "conversion" / f"{name}.py"), *arguments]
        ended = subprocess.run(script, capture_output=True, text=True, cwd=tmp_path, timeout=60)
        imported = [line for line in ended.stderr.splitlines() if line.startswith("import time:")]
        assert not any(line.rpartition("|")[2].strip() == "torch" for line in imported)
        return ended.returncode, [line for line in ended.stderr.splitlines() if not line.startswith("import time:")]

    status, said = run()
    assert status == 2
    assert "arguments are required" in said[-1]
    assert run("--help") == (0, [])
    arguments, words = REFUSED[name]
    model = str(model_directory("llama"))
    status, (line,) = run(*[argument.replace("MODEL", model) for argument in arguments])
    assert status == 1
    assert line.startswith("error: ")
    assert words.replace("MODEL", model) in line
