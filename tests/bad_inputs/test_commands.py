"""Arguments, directories and own functions that no command accepts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bad_inputs.conftest import Refused

ROOT = Path(__file__).parents[2]
COMMANDS = [
    ("trian", "'trian'"),
    ("train --confg x.yaml", "--confg"),
    ("train --config", "--config"),
    ("report", "RUN"),
    ("report a b c", "b c"),
    ("report gone", "gone is no directory", "runs/<experiment_name>"),
    ("report mismatch gone", "gone is no directory"),
    ("report empty", "empty", "metrics.jsonl"),
    ("report a_file", "a_file is no directory"),
    ("report junk", "junk", "metrics.jsonl"),
    ("report mismatch empty", "empty"),
    ("report referee gone", "gone is no directory"),
    ("report referee empty", "empty", "has not trained a step yet"),
    ("report referee a_file", "a_file is no directory"),
    ("report referee stepped", "config.yaml is missing"),
    ("report referee configured", "are not on disk", "trainer.save_freq=1"),
    ("report referee configured --step 3", "step 3", "not on disk", "trainer.keep_checkpoints=0"),
    ("report referee configured --step 4", "of step 4", "those of step 3"),
    ("report referee empty --step 0", "--step"),
    ("report referee empty --sample none", "--sample"),
    ("report referee empty --dtype int8", "--dtype"),
    ("plan --gpus H100", "H100"),
    ("plan --gpus A1000x8", "A1000"),
    ("plan --gpus H100x0", "H100x0"),
    ("plan --gpus H100x8 --model gone", "gone"),
    ("plan --gpus H100x8 --model empty", "empty"),
    ("plan --gpus H100x8 --gpus-per-node 0", "--gpus-per-node"),
    ("plan --gpus H100x8 --run gone", "gone"),
    ("plan --gpus H100x8 --run junk", "junk"),
    ("plan --gpus H100x8 --model qwen2.5-32b --steps -1", "--steps"),
    ("plan --gpus H100x8 --model qwen2.5-32b --response-mean -5", "--response-mean"),
    ("plan --gpus H100x8 --model qwen2.5-32b --clip-ratio 3", "--clip-ratio"),
    ("plan --gpus H100x8 --model qwen2.5-32b --kept-groups 0", "--kept-groups"),
    ("plan --gpus H100x8 --sizes 8,x", "--sizes"),
    ("plan --gpus H100x8 --suggestions many", "--suggestions"),
    ("plan", "model"),
    ("doctor --steps nosuch", "--steps nosuch", "--list"),
    ("doctor --output empty", "--output empty is a directory"),
    ("doctor --output a_file/report.json", "a_file is a file", "--output"),
    ("admit qwen3-30b-a3b --json empty", "--json empty is a directory"),
    ("admit qwen3-30b-a3b --json a_file/found.json", "a_file is a file", "--json"),
    ("data prepare gsm8k --output a_file", "a_file is a file", "--output"),
    ("train --config large.yaml", "large.yaml has 5 MiB", "at most 4"),
    ("view configured --host nowhere.invalid", "--host nowhere.invalid", "address of this machine"),
    ("doctor --keep a_file", "a_file is a file", "--keep"),
    ("doctor --node-rank 5", "belong together"),
    ("check gone", "gone is no directory"),
    ("view configured --port 99999", "'99999' is not a port"),
    ("serve configured --port 70000", "'70000' is not a port"),
    ("serve configured --log-dir a_file", "a_file is a file", "--log-dir"),
    ("diff configured damaged", "damaged/config.yaml cannot be read"),
    ("check a_file", "a_file is no directory"),
    ("sft trainer.runs_dir=here sft.stages=[]", "sft.stages is empty"),
    ("sft --config configuration.yaml", "model.path is not set"),
    ("sft --config configuration.yaml model.path=m sft.stages=[{train_files: gone.parquet}]", "gone.parquet"),
    ("sft --config configuration.yaml model.path=model sft.stages=[{name: ' '}]", "sft.stages[0].name is empty"),
    ("make-demo demo.vocab_size=300", "demo.vocab_size=300"),
    ("make-demo demo.hidden_size=130", "demo.hidden_size=130"),
    ("make-demo demo.num_key_value_heads=3", "demo.num_key_value_heads=3"),
    ("make-demo demo.num_experts=-1", "demo.num_experts=-1"),
    ("make-demo demo.num_experts=4 demo.num_experts_per_tok=5", "demo.num_experts_per_tok=5", "demo.num_experts=4"),
    ("make-demo demo.num_experts=4 demo.moe_intermediate_size=0", "demo.moe_intermediate_size=0"),
    ("make-demo demo.val_rows=-1", "demo.val_rows=-1"),
    ("make-demo demo.directory=a_file", "a_file is a file", "demo.directory"),
    ("make-demo demo.directory=a_file/data", "a_file is a file"),
    ("make-demo demo.directory=", "demo.directory is empty"),
    ("make-demo demo.directory=junk", "demo.directory=junk holds files that make-demo did not write"),
    ("train trainer.runs_dir=a_file", "a_file is a file", "trainer.runs_dir"),
    ("train trainer.runs_dir=a_link", "a_link is a link that leads nowhere"),
    ("train trainer.runs_dir=a_file/runs", "a_file is a file"),
    ("sft trainer.runs_dir=a_file", "a_file is a file"),
    ("evaluate trainer.runs_dir=a_file", "a_file is a file"),
    ("evaluate trainer.runs_dir=. trainer.experiment_name=trained", "trained is a training run", "experiment_name"),
    ("pipeline trainer.runs_dir=a_file", "a_file is a file"),
    ("train trainer.loggers=[console,wandb]", "wandb, which is not installed", "pip install wandb"),
    ("sft trainer.loggers=[console,wandb]", "wandb, which is not installed"),
    ("evaluate trainer.loggers=[console,wandb]", "wandb, which is not installed"),
    ("evaluate --config configuration.yaml", "model.path is not set"),
    ("evaluate --config configuration.yaml model.path=./gone", "./gone", "does not exist"),
    ("evaluate --config configuration.yaml model.path=empty", "model.path=empty", "no config.json"),
    ("train --config configuration.yaml", "model.path is not set"),
    ("train --config configuration.yaml model.path=", "model.path is not set"),
    ("train model.path=a_file", "model.path=a_file is a file"),
    ("train model.path=a/b/c", "model.path=a/b/c: the directory does not exist"),
    ("train model.path=owner/name trainer.resume_mode=resume_path trainer.resume_from_path=gone", "gone"),
    ("train model.path=owner/name trainer.resume_mode=resume_path trainer.resume_from_path=empty", "empty"),
    ("train model.families=[gone.py:FAMILY]", "model.families", "gone.py"),
    ("train model.path=owner/name learner.world_size=8 cluster.gpus_per_node=2", "GPUs"),
]  # fmt: skip


@pytest.fixture
def places(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a_file").write_text("text\n")
    (tmp_path / "a_link").symlink_to("nowhere")
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "metrics.jsonl").write_bytes(b"\x00\xff not json\n")
    for name in ("stepped", "configured"):
        (tmp_path / name / "rollouts").mkdir(parents=True)
        for kind in ("", ".learner"):
            (tmp_path / name / "rollouts" / f"step_000003{kind}.parquet").touch()
    (tmp_path / "configured" / "config.yaml").write_text("model: {path: gone}\n")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.yaml").write_text("{")
    (tmp_path / "damaged" / "metrics.jsonl").write_text('{"step": 3}\n')
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "metrics.jsonl").write_text('{"step": 3}\n')
    (tmp_path / "large.yaml").write_text("#" * (5 * 2**20))
    (tmp_path / "configuration.yaml").write_text("sft: {stages: [{train_files: [a_file]}]}\n")


@pytest.mark.parametrize("case", COMMANDS, ids=[case[0] for case in COMMANDS])
def test_commands(case: tuple[str, ...], refused: Refused, places: None) -> None:
    refused(re.split(r" (?![^\[]*\])", case[0]) if case[0] else [], *case[1:])


@pytest.mark.parametrize("command", ["train", "evaluate", "sft"])
def test_a_demo_without_a_base_is_refused_before_heavy_imports(command: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    arguments = [sys.executable, "-X", "importtime", "-m", "megatron_retool", command, "--config"]
    ended = subprocess.run(
        [*arguments, "configs/demo_cpu.yaml"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    assert "error: model.path=runs/demo/data/model: the directory does not exist" in ended.stdout
    imported = [line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()]
    assert "torch" not in imported


OWN = {
    "reward.function": "compute_score",
    "algorithm.policy_loss": "loss",
    "algorithm.advantage": "advantage",
    "algorithm.loss_aggregation": "aggregation",
    "rollout.agent": "Agent",
    "rollout.multi_turn.format": "Format",
    "rollout.engine.backend": "Engine",
    "rollout.multi_turn.tools": "tool",
}
"""Setting -> the name of an own object for it."""


WRONG = [
    ("no_such_name", "'no_such_name'"),
    ("gone.py:{name}", "gone.py", "correct the path"),
    ("no_such_package.module:{name}", "there is no module no_such_package.module"),
    ("own.py:gone", "own.py has no 'gone'"),
    ("broken.py:{name}", "broken.py failed at line 2: SyntaxError"),
    ("raising.py:{name}", "raising.py failed at line 1: ZeroDivisionError"),
    ("own.py:NUMBER", "own.py:NUMBER: the int '3' cannot be called"),
]
OWN_CASES = [*((key, WRONG[0]) for key in OWN), *((key, WRONG[3]) for key in OWN)]
OWN_CASES += [(key, case) for key in ("reward.function", "algorithm.policy_loss") for case in WRONG if case[0] not in
              ("no_such_name", "own.py:gone")]  # fmt: skip


@pytest.mark.parametrize(("key", "case"), OWN_CASES, ids=[f"{key}={case[0]}" for key, case in OWN_CASES])
def test_own_objects(key: str, case: tuple[str, ...], refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("NUMBER = 3\n")
    (tmp_path / "broken.py").write_text("# a comment\ndef compute_score(:\n")
    (tmp_path / "raising.py").write_text("1 / 0\n")
    refused(["train", f"{key}={case[0].format(name=OWN[key])}"], key, *case[1:])


@pytest.mark.parametrize("command", ["pipeline", "evaluate"])
def test_own_objects_are_imported_before_every_command_that_uses_them(command: str, refused: Refused) -> None:
    refused([command, "reward.function=gone.py:compute_score"], "reward.function", "gone.py")
