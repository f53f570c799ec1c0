"""From nothing to a trained model: what `bash scripts/train_dapo_megatron.sh` runs.

    make-demo → SFT → mcore_to_hf → hf_to_mcore → DAPO → mcore_to_hf → report

The stages before DAPO belong to the demo (``demo.enable``), and are left out where an earlier run made what they would
make (``demo.base``). What follows DAPO is ``trainer.at_end``, in every run.

Each stage is the command a user would type, and leaves a result that appears complete or not at all; a stage whose
result is there is not run again, so a pipeline that was stopped continues where it stopped. One that is asked to leave
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

from conversion.files.directory import COMPLETE_NAME
from megatron_retool.config import Config, ConfigError, DemoConfig, LoraConfig, ModelConfig, TrainerConfig, load_config
from megatron_retool.errors import OperationError
from megatron_retool.installation import ROOT
from megatron_retool.interruption import INTERRUPTED, interrupts, run_stage
from megatron_retool.reports.run_page import write_report
from megatron_retool.reports.summary import summarise
from megatron_retool.runs.checkpoints import Checkpoint, complete_checkpoints, set_aside
from megatron_retool.runs.demo_base import DemoBase, base_settings, difference, find_base, read_state
from megatron_retool.runs.leave import REQUEUE, LeaveAsked, LeaveRequest, passed_on
from megatron_retool.runs.metrics_file import read_metrics
from run_files import PIPELINE_FILE
from run_files.atomic_files import write_text

Train = Callable[[Config, Console, LeaveRequest], int]


def run_pipeline(
    config: Config, config_file: str, overrides: list[str], console: Console, train: Train, leave: LeaveRequest
) -> int:
    """Run what is left to do. ``train`` runs the RL loop of a configuration in this process.

    Returns:
        0, or the exit code of ``train``, or REQUEUE where ``leave`` is set before the last stage.

    Raises:
        ConfigError: the run's directory holds results that were made under other settings.
        RuntimeError: a stage's command failed.
    """
    if config.trainer.resume_mode == "disable":
        moved = set_aside(config.trainer.run_dir)
        if moved is not None:
            console.print(f"trainer.resume_mode=disable: the earlier run was moved to {moved}")
    stages = Stages(config.trainer.run_dir, console, leave)
    if config.demo.enable:
        try:
            config = _prepare_demo(config, config_file, overrides, stages)
        except LeaveAsked:
            return stages.left()
    return run_training(config, stages, train)


def run_training(config: Config, stages: Stages, train: Train) -> int:
    """The RL loop, and what ``trainer.at_end`` names once its last step is reached.

    Returns:
        0, or the exit code of ``train``, or REQUEUE where it was asked to leave before the export.

    Raises:
        RuntimeError: the export failed.
    """
    try:
        code = stages.call("rl", lambda: train(config, stages.console, stages.leave))
        return code if code or config.trainer.val_only else _finish(config.trainer, config.model, stages)
    except LeaveAsked:
        return stages.left()


def _finish(trainer: TrainerConfig, model: ModelConfig, stages: Stages) -> int:
    """What ``trainer.at_end`` names, of a run that reached its last step."""
    run_dir, wanted, left = trainer.run_dir, trainer.at_end, []
    checkpoints = complete_checkpoints(run_dir)
    if "export" in wanted and checkpoints:
        export = run_dir / "export"
        command = [*_mcore_to_hf(model, checkpoints[-1], export), *_predictors(model), "--overwrite"]
        stages.run("export", command, done=export, step=checkpoints[-1].step)
        left.append(f"model {export}")
    summary = summarise(run_dir, stages.seconds)
    if "report" in wanted and read_metrics(run_dir / "metrics.jsonl"):
        report = write_report(run_dir, summary.text())
        left += [f"report {report.page}", *(f"note: {problem}" for problem in report.problems)]
    if "summary" in wanted:
        summary.print(stages.console)
    for line in left:
        stages.console.print(line, highlight=False)
    return 0


def _prepare_demo(config: Config, config_file: str, overrides: list[str], stages: Stages) -> Config:
    """Data and a fine-tuned model, made here or by an earlier run; the configuration that RL starts with."""
    base = find_base(config)
    if base is not None:
        stages.start_from(base)
        data = base.data_overrides
    else:
        stages.claim(base_settings(config))
        base = _make_base(config, config_file, overrides, stages)
        data = []
    return load_config(config_file, [*data, *overrides, *base.model_overrides])


def _make_base(config: Config, config_file: str, overrides: list[str], stages: Stages) -> DemoBase:
    arguments = ["--config", config_file, *overrides]
    make = [sys.executable, "-m", "megatron_retool", "make-demo", *arguments]
    stages.run("make-demo", make, done=Path(config.model.path))
    return fine_tune(config, stages, arguments)


def fine_tune(config: Config, stages: Stages, arguments: list[str]) -> DemoBase:
    """The stages from the demo's random model to the one that RL starts from.

    ``arguments`` are the command line's: --config, file, overrides.
    """
    base = DemoBase(config.trainer.run_dir)
    sft = config.trainer.run_dir / "sft"
    stages.run(
        "sft",
        [
            sys.executable,
            "-m",
            "megatron_retool",
            "sft",
            *arguments,
            *_names(config.trainer, config.demo, config.model, "sft"),
            *_whole_model(),
        ],
        done=sft / COMPLETE_NAME,
    )
    stages.run("mcore_to_hf", _mcore_to_hf(config.model, complete_checkpoints(sft)[-1], base.sft_hf), done=base.sft_hf)
    stages.run(
        "hf_to_mcore",
        [
            sys.executable,
            str(ROOT / "conversion" / "hf_to_mcore.py"),
            "--hf-dir",
            str(base.sft_hf),
            "--mcore-dir",
            str(base.sft_mcore),
            "--verify",
            *_families(config.model),
        ],
        done=base.sft_mcore,
    )
    return base


class Stages:
    """Runs stages in order, remembers how long each took, and refuses to mix results of different settings.

    Attributes:
        state: pipeline.json: settings of the base, seconds by stage, training steps of results.

    Raises:
        LeaveAsked: from ``run`` and ``call``, in place of a stage that would begin after ``leave`` was set.
    """

    def __init__(self, run_dir: Path, console: Console, leave: LeaveRequest | None = None) -> None:
        self.run_dir = run_dir
        self.console = console
        self.leave = leave or LeaveRequest()
        self.state: dict[str, Any] = {"seconds": {}, "steps": {}, **read_state(run_dir)}
        self.seconds: dict[str, float] = self.state["seconds"]

    def claim(self, settings: dict[str, Any]) -> None:
        """Note the settings under which the run makes its base.

        Raises:
            ConfigError: it was begun under others.
        """
        if changed := difference(self.state.get("settings", {}), settings):
            raise ConfigError(
                f"{self.run_dir} was made with other settings ({changed}): choose another trainer.experiment_name, or "
                "start over with trainer.resume_mode=disable"
            )
        self.state["settings"] = settings

    def start_from(self, base: DemoBase) -> None:
        """Note that the run starts from another's base.

        Raises:
            ConfigError: it started from a different one.
        """
        earlier = self.state.get("base")
        if earlier is not None and Path(earlier).resolve() != base.run_dir.resolve():
            raise ConfigError(
                f"{self.run_dir} started from the base of {earlier}, not of {base.run_dir}: choose another "
                "trainer.experiment_name, or start over with trainer.resume_mode=disable"
            )
        self.state["base"] = str(base.run_dir)
        self.console.print(
            f"data and fine-tuned model are those of {base.run_dir} (demo.base=none makes new ones)", highlight=False
        )

    def left(self) -> int:
        """Say that the request to leave was followed; the exit status of it."""
        self.console.print("asked to leave: the next start continues with the stage that is not complete")
        return REQUEUE

    def run(self, name: str, command: list[str], done: Path, step: int | None = None) -> None:
        """Run a command unless its result ``done`` exists, and was made of training step ``step`` where that is given.

        With a step the command has to replace an older result by itself.
        """
        if done.exists() and self.state["steps"].get(name) == step:
            self.console.print(f"[dim]{name}: {done} is there already[/]")
            return

        def execute() -> int:
            with interrupts(how_to_go_on=lambda: f"the same command continues with {name}"):
                code = run_stage(command, lambda process: passed_on(self.leave, lambda: [process]))
            if code == INTERRUPTED:
                raise KeyboardInterrupt
            if code == REQUEUE:
                raise LeaveAsked
            if code:
                raise OperationError(f"stage {name} failed with exit code {code}, see above: {' '.join(command)}")
            if step is not None:
                self.state["steps"][name] = step
            return 0

        self.call(name, execute)

    def call(self, name: str, work: Callable[[], int]) -> int:
        """Run a stage under its heading, and write its seconds to the run's state file; the stage's exit status.

        Raises:
            LeaveAsked: the run was asked to leave before the stage began.
        """
        if self.leave.is_set():
            raise LeaveAsked
        self.console.rule(f"[bold]{name}", align="left")
        start = time.perf_counter()
        code = work()
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - start, 1)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        write_text(self.run_dir / PIPELINE_FILE, json.dumps(self.state, indent=1))
        return code


def _whole_model() -> list[str]:
    """Overrides without adapters: the demo's model begins with random values, which adapters would not change."""
    lora = dataclasses.asdict(LoraConfig())
    return [f"learner.lora.{name}={json.dumps(value)}" for name, value in lora.items()]


def _names(trainer: TrainerConfig, demo: DemoConfig, model: ModelConfig, stage: str) -> list[str]:
    """Overrides that put a stage's own run under the pipeline's run, and leave its data where they are."""
    return [
        f"trainer.experiment_name={trainer.experiment_name}/{stage}",
        f"demo.directory={demo.directory}",
        f"model.path={model.path}",
    ]


def _mcore_to_hf(model: ModelConfig, checkpoint: Checkpoint, hf_dir: Path) -> list[str]:
    script = ROOT / "conversion" / "mcore_to_hf.py"
    source = ["--mcore-dir", str(checkpoint.learner), "--hf-dir", str(hf_dir)]
    return [sys.executable, str(script), *source, *_families(model)]


def _predictors(model: ModelConfig) -> list[str]:
    """Layers for multi-token prediction, which the learner's checkpoint lacks, are those that the run began with."""
    from conversion.files.directory import local_directory
    from conversion.files.predictors import of_directory
    from conversion.model.architecture import Architecture

    directory = local_directory(model.path)
    if not (directory / "config.json").is_file():
        return []
    architecture = Architecture.from_pretrained(directory, model.families, dequantized=True)
    sources = [Path(model.mcore_path)] if model.mcore_path else []
    sources += [directory] if any(directory.glob("*.safetensors")) else []
    result = next((source for source in sources if of_directory(source, architecture).mappings), None)
    return [] if result is None else ["--predictors-from", str(result)]


def _families(model: ModelConfig) -> list[str]:
    return [argument for target in model.families for argument in ("--family", target)]
