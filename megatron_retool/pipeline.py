"""From nothing to a trained model: what `bash scripts/train_dapo_megatron.sh` runs.

Where ``demo.enable`` is off this is training alone. Where it is on:

    make-demo → evaluate the random model → SFT → mcore_to_hf → hf_to_mcore → DAPO → mcore_to_hf → report

Each stage is the command a user would type, and leaves a result that appears complete or not at all; a stage whose
result is there is not run again, so a pipeline that was stopped goes on where it stopped. One that is asked to leave
hands that on to its stage: training checkpoints and leaves, the other stages are short and end first.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from conversion.files.directory import COMPLETE_NAME
from megatron_retool.config import Config, ConfigError, load_config
from megatron_retool.interruption import INTERRUPTED, interrupts, run_stage
from megatron_retool.reports.run import write_report
from megatron_retool.runs.checkpoints import Checkpoint, complete_checkpoints, set_aside
from megatron_retool.runs.files import write_text
from megatron_retool.runs.leave import REQUEUE, LeaveAsked, LeaveRequest, passed_on
from megatron_retool.runs.metrics_file import read_metrics

ROOT = Path(__file__).parents[1]


def run_pipeline(
    config: Config,
    config_file: str,
    overrides: list[str],
    console: Console,
    train: Callable[[Config, Console, LeaveRequest], int],
    leave: LeaveRequest,
) -> int:
    """Run what is left to do. ``train`` runs the RL loop of a configuration in this process.

    Returns:
        0, or the exit code of ``train``, or REQUEUE where ``leave`` is set before the last stage.

    Raises:
        ConfigError: the run's directory holds results that were made under other settings.
        RuntimeError: a stage's command failed.
    """
    if config.trainer.resume_mode == "disable":
        moved = set_aside(config.run_dir)
        if moved is not None:
            console.print(f"trainer.resume_mode=disable: the earlier run was moved to {moved}")
    if not config.demo.enable:
        return train(config, console, leave)
    stages = Stages(config.run_dir, config, console, leave)
    try:
        return _run_stages(config, config_file, overrides, stages, train)
    except LeaveAsked:
        console.print("asked to leave: the next start goes on with the stage that is not complete")
        return REQUEUE


def _run_stages(
    config: Config,
    config_file: str,
    overrides: list[str],
    stages: Stages,
    train: Callable[[Config, Console, LeaveRequest], int],
) -> int:
    run_dir, console = config.run_dir, stages.console
    command = [sys.executable, "-m", "megatron_retool"]
    common = ["--config", config_file, *overrides]
    model = Path(config.model.path)

    stages.run("make-demo", [*command, "make-demo", *common], done=model)
    stages.run(
        "evaluate-untrained",
        [
            *command,
            "evaluate",
            *common,
            *_names(config, "untrained"),
            "rollout.val.n=1",
            "trainer.log_val_generations=0",
        ],
        done=run_dir / "untrained" / "metrics.jsonl",
    )
    sft_hf, sft_mcore = fine_tune(config, stages, common)
    rl_config = load_config(config_file, [*overrides, f"model.path={sft_hf}", f"model.mcore_path={sft_mcore}"])
    code = stages.call("rl", lambda: train(rl_config, console, stages.leave))
    if code:
        return code
    export = run_dir / "export"
    newest = complete_checkpoints(run_dir)[-1]
    stages.run("export", [*_mcore_to_hf(config, newest, export), "--overwrite"], done=export, step=newest.step)
    summary = demo_summary(run_dir)
    page = write_report(run_dir, notes=summary_text(summary, stages.seconds))
    _print_summary(console, summary, stages.seconds)
    console.print(f"model {export}\nreport {page}")
    return 0


def fine_tune(config: Config, stages: Stages, arguments: list[str]) -> tuple[Path, Path]:
    """The stages from the demo's random model to the one that RL starts from.

    ``arguments`` are the command line's: --config, file, overrides.

    Returns:
        Its Hugging Face directory and its Megatron-Core one.
    """
    sft = config.run_dir / "sft"
    sft_hf, sft_mcore = config.run_dir / "sft_hf", config.run_dir / "sft_mcore"
    stages.run(
        "sft",
        [sys.executable, "-m", "megatron_retool", "sft", *arguments, *_names(config, "sft")],
        done=sft / COMPLETE_NAME,
    )
    stages.run("mcore_to_hf", _mcore_to_hf(config, complete_checkpoints(sft)[-1], sft_hf), done=sft_hf)
    stages.run(
        "hf_to_mcore",
        [
            sys.executable,
            str(ROOT / "conversion" / "hf_to_mcore.py"),
            "--hf-dir",
            str(sft_hf),
            "--mcore-dir",
            str(sft_mcore),
            "--verify",
            *_families(config),
        ],
        done=sft_mcore,
    )
    return sft_hf, sft_mcore


class Stages:
    """Runs stages in order, remembers how long each took, and refuses to mix results of different settings.

    Raises:
        LeaveAsked: from ``run`` and ``call``, in place of a stage that would begin after ``leave`` was set.
    """

    def __init__(self, run_dir: Path, config: Config, console: Console, leave: LeaveRequest | None = None) -> None:
        self.console = console
        self.leave = leave or LeaveRequest()
        self.file = run_dir / "pipeline.json"
        settings = _settings(config)
        state: dict[str, Any] = {"settings": settings, "seconds": {}, "steps": {}}
        if self.file.exists():
            state |= json.loads(self.file.read_text(encoding="utf-8"))
            # A key that is new since then has its default in both.
            changed = [key for key, value in state["settings"].items() if settings.get(key) != value]
            if changed:
                raise ConfigError(
                    f"{run_dir} was made with other settings ({changed[0]}={state['settings'][changed[0]]!r}, now "
                    f"{settings.get(changed[0])!r}): choose another trainer.experiment_name, or start over with "
                    "trainer.resume_mode=disable"
                )
        self.state = state
        self.seconds: dict[str, float] = state["seconds"]

    def run(self, name: str, command: list[str], done: Path, step: int | None = None) -> None:
        """Run a command unless its result ``done`` exists, and was made of training step ``step`` where that is given.

        With a step the command has to replace an older result by itself.
        """
        if done.exists() and self.state["steps"].get(name) == step:
            self.console.print(f"[dim]{name}: {done} is there already[/]")
            return

        def execute() -> int:
            with interrupts(how_to_go_on=lambda: f"the same command goes on with {name}"):
                code = run_stage(command, ROOT, lambda process: passed_on(self.leave, lambda: [process]))
            if code == INTERRUPTED:
                raise KeyboardInterrupt
            if code == REQUEUE:
                raise LeaveAsked
            if code:
                raise RuntimeError(f"stage {name} failed with exit code {code}, see above: {' '.join(command)}")
            if step is not None:
                self.state["steps"][name] = step
            return 0

        self.call(name, execute)

    def call(self, name: str, work: Callable[[], int]) -> int:
        if self.leave.is_set():
            raise LeaveAsked
        self.console.rule(f"[bold]{name}", align="left")
        start = time.perf_counter()
        code = work()
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - start, 1)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.file, json.dumps(self.state, indent=1))
        return code


def demo_summary(run_dir: Path) -> dict[str, dict[str, float]]:
    """Held-out figures of the three models: untrained, after SFT, after RL."""
    rl = read_metrics(run_dir / "metrics.jsonl")
    validated = [row for row in rl if "val-aux/tool/use_rate" in row]
    rows = {
        "untrained": read_metrics(run_dir / "untrained" / "metrics.jsonl")[-1],
        "after SFT": validated[0],
        "after RL": validated[-1],
    }
    summary = {}
    for name, row in rows.items():
        accuracy = next(value for key, value in row.items() if key.startswith("val-core/all/acc/mean@"))
        summary[name] = {
            "accuracy": accuracy,
            "tool use": row["val-aux/tool/use_rate"],
            "tool success": row["val-aux/tool/success_rate"],
            "turns": row["val-aux/num_turns/mean"],
        }
    return summary


def summary_text(summary: dict[str, dict[str, float]], seconds: dict[str, float]) -> str:
    lines = [f"{name}: " + ", ".join(f"{k} {v:.3f}" for k, v in row.items()) for name, row in summary.items()]
    return "\n".join([*lines, "seconds by stage: " + ", ".join(f"{k} {v:.0f}" for k, v in seconds.items())])


def _print_summary(console: Console, summary: dict[str, dict[str, float]], seconds: dict[str, float]) -> None:
    table = Table(title="held-out problems")
    table.add_column("model")
    for key in next(iter(summary.values())):
        table.add_column(key, justify="right")
    for name, row in summary.items():
        table.add_row(name, *(f"{value:.3f}" for value in row.values()))
    console.print(table)
    times = Table(title="time by stage")
    times.add_column("stage")
    times.add_column("seconds", justify="right")
    for name, value in {**seconds, "all": sum(seconds.values())}.items():
        times.add_row(name, f"{value:.0f}")
    console.print(times)


def _names(config: Config, stage: str) -> list[str]:
    """Overrides that put a stage's own run under the pipeline's run, and leave its data where they are."""
    return [
        f"trainer.experiment_name={config.trainer.experiment_name}/{stage}",
        f"demo.directory={config.demo.directory}",
        f"model.path={config.model.path}",
    ]


def _mcore_to_hf(config: Config, checkpoint: Checkpoint, hf_dir: Path) -> list[str]:
    script = ROOT / "conversion" / "mcore_to_hf.py"
    source = ["--mcore-dir", str(checkpoint.learner), "--hf-dir", str(hf_dir)]
    return [sys.executable, str(script), *source, *_families(config)]


def _families(config: Config) -> list[str]:
    return [argument for target in config.model.families for argument in ("--family", target)]


def _settings(config: Config) -> dict[str, Any]:
    """The settings that results of stages before RL depend on, by dotted key."""
    flat: dict[str, Any] = {"trainer.seed": config.trainer.seed}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{prefix}.{key}", inner)
        elif isinstance(value, list):
            for index, inner in enumerate(value):
                add(f"{prefix}[{index}]", inner)
        else:
            flat[prefix] = value

    add("demo", dataclasses.asdict(config.demo))
    add("sft", dataclasses.asdict(config.sft))
    return flat
