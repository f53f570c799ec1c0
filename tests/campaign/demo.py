"""The demo, made small: what a campaign runs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tests.campaign.checks import Expected, rows_of
from tests.campaign.processes import ROOT

REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    "    return {'score': 1.0 if len(solution_str) % 2 else -1.0, 'acc': float(len(solution_str) % 2)}\n"
)
"""Varies inside a group whatever the model can do: without it there would be no gradient."""


def shrink_demo(tree: DictConfig, steps: int) -> None:
    """Make a demo's configuration one that runs in a minute or two: less of everything, learning little."""
    tree.trainer.total_steps = steps
    tree.demo.update({"pretrain_rows": 1600, "sft_rows": 640, "train_rows": 64, "val_rows": 12, "sft_val_rows": 16})
    tree.sft.stages[0].steps, tree.sft.stages[1].steps = 80, 60
    tree.data.train_batch_size = 4
    OmegaConf.update(tree, "rollout.val.n", 2)
    OmegaConf.update(tree, "learner.mini_batch_size", 16)
    # On a busy machine code and responses take longer than the demo gives them, and a run would not repeat.
    OmegaConf.update(tree, "rollout.multi_turn.max_wall_seconds", 600)
    OmegaConf.update(tree, "tools.code_interpreter.run_timeout_seconds", 10.0)
    # After so little SFT most groups are all wrong; with the filter off every step trains on what there is.
    OmegaConf.update(tree, "algorithm.dynamic_sampling.enable", False)


def write_config(directory: Path, name: str, steps: int, variant: str = "", **trainer: Any) -> Path:
    """Settings of the demo's whole pipeline with few small steps, as a file in ``directory``; runs lie there too.

    ``variant`` names a file of configs/ that extends demo_cpu.yaml.
    """
    tree: Any = OmegaConf.load(ROOT / "configs" / "demo_cpu.yaml")
    if variant:
        own: Any = OmegaConf.load(ROOT / "configs" / f"{variant}.yaml")
        assert own.pop("extends") == "demo_cpu.yaml"
        tree = OmegaConf.merge(tree, own)
    shrink_demo(tree, steps)
    tree.trainer.update({"runs_dir": str(directory), "experiment_name": name} | trainer)
    reward = directory / "reward.py"
    reward.write_text(REWARD)
    tree.reward = {"function": f"{reward}:compute_score"}
    config = directory / f"{name}.yaml"
    OmegaConf.save(tree, config)
    return config


@dataclass(frozen=True)
class Prepared:
    """An uninterrupted run of the small demo: its data, model and rollouts, which other runs start from."""

    config: Path
    run_dir: Path
    runs_dir: Path
    """Where runs of the campaign go."""

    @property
    def expected(self) -> Expected:
        tree: Any = OmegaConf.load(self.config)
        steps, frequency = int(tree.trainer.total_steps), int(tree.trainer.test_freq)
        validated = {step for step in range(1, steps + 1) if frequency and step % frequency == 0} | {0, steps}
        groups, responses = int(tree.data.train_batch_size), int(tree.rollout.train.n)
        return Expected(steps, groups, responses, frozenset(validated))

    def uninterrupted(self) -> dict[int, dict[str, Any]]:
        return {row["step"]: row for row in rows_of(self.run_dir)}

    def command(self, name: str, hang_seconds: float, replay: bool) -> list[str]:
        """The run's command line: training alone. A run that hangs ends, to be started again."""
        return [
            *("train", "--config", str(self.config), f"trainer.experiment_name={name}"),
            f"trainer.runs_dir={self.runs_dir}",
            f"demo.directory={self.run_dir / 'data'}",
            f"model.path={self.run_dir / 'sft_hf'}",
            f"model.mcore_path={self.run_dir / 'sft_mcore'}",
            f"trainer.hang_timeout_seconds={hang_seconds}",
            f"trainer.start_hang_timeout_seconds={2 * hang_seconds}",
            "trainer.hang_action=abort",
            "trainer.max_learner_restarts=1000",
            *([f"rollout.replay_dir={self.run_dir / 'rollouts'}"] if replay else []),
        ]


def prepare(directory: Path, steps: int) -> Prepared:
    """Run the demo's pipeline without interruption, unless an earlier campaign did so in ``directory``.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    runs_dir = directory / "runs"
    runs_dir.mkdir(parents=True, exist_ok=True)
    config = directory / "prepared.yaml"
    prepared = Prepared(config, directory / "prepared", runs_dir)
    if not (prepared.run_dir / "report" / "index.html").exists():
        write_config(directory, "prepared", steps, test_freq=2, save_freq=1, keep_checkpoints=2)
        with open(directory / "prepared.log", "ab") as log:
            command = [sys.executable, "-m", "megatron_retool", "pipeline", "--config", str(config)]
            subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=True)
    return prepared
