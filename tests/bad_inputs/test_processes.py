"""The same from outside: commands and scripts as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "megatron_retool"]
CONVERTER = ROOT / "conversion" / "mcore_to_hf.py"
SUBMIT = ["bash", str(ROOT / "scripts" / "slurm" / "submit.sh"), "--dry-run"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([*COMMAND, "train", "trainer.sead=1"], "'trainer.seed'"),
        ([*COMMAND, "pipeline", "learner.world_size=0"], "learner.world_size=0 must be at least 1"),
        ([sys.executable, str(CONVERTER), "--mcore-dir=x", "--hf-dir=y"], "x does not exist"),
        ([sys.executable, str(CONVERTER), f"--mcore-dir={ROOT}", f"--hf-dir={ROOT}/docs"], "which is read"),
        ([*SUBMIT, "--config", "gone.yaml"], "gone.yaml does not exist"),
        ([*SUBMIT, "--nodes", "x"], "--nodes"),
    ],
)  # fmt: skip
def test_refused(command: list[str], words: str, tmp_path: Path) -> None:
    virtual_environment = str(Path(sys.executable).parents[1])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MEGATRON_RETOOL_VENV": virtual_environment}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    output = done.stdout + done.stderr
    assert done.returncode == 1 and words in output and "Traceback" not in output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "data.train_files=[bad.jsonl]"], "data.train_files: bad.jsonl"),
        (["sft", "learner.world_size=1", "sft.stages=[{train_files: bad.jsonl}]"], "column 'messages' is missing"),
        (["train", "model.path=model"], "model_type='bert'"),
    ],
)
def test_what_files_say_is_refused_before_torch_is_loaded(arguments: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "good.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "bert"}')
    files = ["model.path=model", "data.train_files=[good.jsonl]", "data.val_files=[good.jsonl]"]
    script = "import sys; from megatron_retool.__main__ import main; status = main()\nsys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", script, arguments[0], *files, *arguments[1:]]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "300"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    assert words in done.stdout and done.stdout.count("error:") == 1, done.stdout + done.stderr
    assert done.returncode == 0, "torch was loaded"
