"""Runs of an experiment: what each starts from, the commands that make it, and who makes it where several could.

A run lies in <experiment>/<arm>_seed<n>. Commands that are given at the same time share the work: a run belongs to the
one that holds its lock, which the kernel takes from the dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from experiments.mismatch.arms import MOE_CONFIG, TWO_TOOLS_CONFIG, Arm, Experiment
from megatron_retool.commands.stages import Stages, fine_tune
from megatron_retool.config import ConfigError, load_config
from megatron_retool.interruption import INTERRUPTED, run_stage
from megatron_retool.runs.checkpoints import Checkpoint, complete_checkpoints
from megatron_retool.runs.demo_base import DemoBase, base_settings

_QUICK_BASE = (
    "demo.pretrain_rows=1600", "demo.sft_rows=640", "demo.train_rows=64", "demo.val_rows=12", "demo.sft_val_rows=16",
)  # fmt: skip
_QUICK_SFT_STEPS = 80
_BASE_NAMES = {TWO_TOOLS_CONFIG: "base_two_tools", MOE_CONFIG: "base_moe"}


@dataclass(frozen=True)
class Run:
    """One arm with one seed."""

    directory: Path
    """Of the experiment."""
    arm: Arm
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.arm.name}_seed{self.seed}"

    @property
    def path(self) -> Path:
        return self.directory / self.name

    @property
    def saves_every(self) -> int:
        """Steps between two checkpoints."""
        return max(self.steps // 4, 1)

    @property
    def halfway(self) -> int:
        """The step whose checkpoint arms that start from this one begin with."""
        return max(self.steps // 2 // self.saves_every, 1) * self.saves_every

    @property
    def newest(self) -> Checkpoint | None:
        result = complete_checkpoints(self.path)
        return result[-1] if result else None

    @property
    def trained(self) -> bool:
        return self.newest is not None and self.newest.step >= self.steps

    @property
    def evaluation(self) -> Path:
        """Where the evaluation of its last weights in a float32 engine lies."""
        step = self.newest.step if self.newest is not None else self.steps
        return self.path / f"float32_step_{step}"

    def start(self) -> Path | None:
        """The checkpoint of another arm that it begins with."""
        if self.arm.starts_from is None:
            return None
        other = self.directory / f"{self.arm.starts_from}_seed{self.seed}"
        return other / "checkpoints" / f"global_step_{self.halfway}"


def is_complete(run: Run, experiment: Experiment) -> bool:
    return run.trained and (not experiment.evaluate_in_float32 or (run.evaluation / "metrics.jsonl").exists())


def complete_runs(directory: Path, experiment: Experiment, steps: int) -> list[Run]:
    """The runs that are there, whichever command made them, in the order of arms and seeds."""
    result = []
    for arm in experiment.arms:
        seeds = [path.name.rpartition("_seed")[2] for path in directory.glob(f"{arm.name}_seed*")]
        runs = [Run(directory, arm, int(seed), steps) for seed in seeds if seed.isdecimal()]
        result += sorted((run for run in runs if is_complete(run, experiment)), key=lambda run: run.seed)
    return result


def make_run(
    run: Run, experiment: Experiment, model: DemoBase, common: Sequence[str], quick: Sequence[str], console: Console
) -> None:
    """Train and evaluate, or what is left of it.

    Args:
        common: overrides of every run.
        quick: overrides that come last.

    Raises:
        RuntimeError: a command failed, or the checkpoint that it begins with is not there.
    """
    if not run.trained:
        _call(run, "train", train_arguments(run, experiment, model, common, quick))
    if experiment.evaluate_in_float32 and not is_complete(run, experiment):
        console.print(f"[dim]{run.name}: its own weights in a float32 engine[/]")
        _call(run, "evaluate", evaluate_arguments(run, experiment, model, common, quick))


def train_arguments(
    run: Run, experiment: Experiment, model: DemoBase, common: Sequence[str], quick: Sequence[str]
) -> list[str]:
    """Arguments of the command train.

    Raises:
        RuntimeError: the checkpoint that the run begins with is not there.
    """
    settings = [
        f"trainer.runs_dir={run.directory}", f"trainer.experiment_name={run.name}", f"trainer.seed={run.seed}",
        f"trainer.total_steps={run.steps}", f"trainer.test_freq={run.saves_every}",
        f"trainer.save_freq={run.saves_every}", "trainer.keep_checkpoints=1", "trainer.log_val_generations=0",
        "demo.enable=false", f"trainer.at_end={'[export]' if experiment.evaluate_in_float32 else '[]'}",
        *model.data_overrides, *model.model_overrides,
    ]  # fmt: skip
    if any(arm.starts_from == run.arm.name for arm in experiment.arms):
        settings.append(f"trainer.keep_every={run.halfway}")
    start = run.start()
    if start is not None and run.newest is None:
        if not start.exists():
            raise RuntimeError(
                f"{run.name} starts from {start}, which is not there: run the arm {run.arm.starts_from} with the same "
                "--steps and --seeds first"
            )
        settings += ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={start}"]
    return ["--config", str(experiment.config), *settings, *common, *run.arm.overrides, *quick]


def evaluate_arguments(
    run: Run, experiment: Experiment, model: DemoBase, common: Sequence[str], quick: Sequence[str]
) -> list[str]:
    """Arguments of the command evaluate: the same for every arm, whatever its own engine and limits are."""
    settings = [
        *common, *quick, f"trainer.runs_dir={run.path}", f"trainer.experiment_name={run.evaluation.name}",
        "trainer.log_val_generations=0", "demo.enable=false", *model.data_overrides,
        f"model.path={run.path / 'export'}", "model.mcore_path=null", "rollout.engine.dtype=float32",
        "weight_sync.round_to=null",
    ]  # fmt: skip
    return ["--config", str(experiment.config), *settings]


def _call(run: Run, command: str, arguments: Sequence[str]) -> None:
    code = call_command([command, *arguments])
    if code:
        raise RuntimeError(f"{run.name}: {command} ended with exit code {code}; its logs are in {run.path / 'logs'}")


def call_command(arguments: Sequence[str]) -> int:
    """Run a command of megatron_retool to its end; its exit status.

    Raises:
        KeyboardInterrupt: it was interrupted, or this process was.
    """
    code = run_stage([sys.executable, "-m", "megatron_retool", *arguments], lambda process: contextlib.nullcontext())
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return code


@contextlib.contextmanager
def lock(directory: Path, name: str, *, wait: bool = False) -> Iterator[bool]:
    """Hold the lock ``name`` for the length of the block; False: another process has it. ``wait``: until it has not."""
    (directory / ".locks").mkdir(parents=True, exist_ok=True)
    with (directory / ".locks" / name).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def find_base(run_dir: Path, experiment: Experiment) -> DemoBase:
    """The fine-tuned model of a demo run, which every run of an experiment starts from, and its data.

    Raises:
        ConfigError: the run has none, or is of another demo.
    """
    base = DemoBase(run_dir.absolute())
    if base.missing is not None:
        raise ConfigError(f"--base {run_dir}: {base.missing} does not exist; give a demo run whose fine-tuning is done")
    demo = json.loads((base.data / "manifest.json").read_text(encoding="utf-8"))["demo"]
    made, variant = demo.get("variant", "one_tool"), load_config(experiment.config).demo.variant
    if made != variant:
        raise ConfigError(f"--base {run_dir} was made with demo.variant={made}; this experiment needs {variant}")
    if bool(demo.get("num_experts")) != (experiment.config == MOE_CONFIG):
        kind = "a mixture of experts" if demo.get("num_experts") else "a dense model"
        raise ConfigError(
            f"--base {run_dir} has {kind}; this experiment needs a run of configs/{experiment.config.name}"
        )
    return base


def make_base(output: Path, experiment: Experiment, quick: bool, console: Console) -> DemoBase:
    """The demo's data and fine-tuned model under ``output``, unless they are there; each demo has its own."""
    config_file = experiment.config
    name = _BASE_NAMES.get(config_file, "base")
    overrides = [f"trainer.runs_dir={output.absolute()}", f"trainer.experiment_name={name}"]
    config = load_config(config_file, overrides)
    if quick:
        quick_stages = [asdict(replace(stage, steps=_QUICK_SFT_STEPS)) for stage in config.sft.stages]
        overrides += [*_QUICK_BASE, f"sft.stages={json.dumps(quick_stages)}"]
        config = load_config(config_file, overrides)
    arguments = ["--config", str(config_file), *overrides]
    with lock(output, name, wait=True):
        stages = Stages(config.trainer.run_dir, console)
        stages.claim(base_settings(config))
        stages.run(
            "make-demo",
            [sys.executable, "-m", "megatron_retool", "make-demo", *arguments],
            done=Path(config.model.path),
        )
        fine_tune(config, stages, arguments)
    return find_base(config.trainer.run_dir, experiment)
