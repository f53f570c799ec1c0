"""The command of an experiment: arms, each a set of overrides, run with several seeds from the same fine-tuned model.

Every run is `python -m megatron_retool train` with the arm's overrides, in a directory of its own under
runs/mismatch/<experiment>/<arm>_seed<n>, so whatever the project can do with a run it can do with these. A command that
is given again continues: finished runs are skipped, the one that was cut off resumes from its last checkpoint. One that
is given while another runs takes the runs that the other has not begun.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from experiments.mismatch.arms import Arm, Experiment
from experiments.mismatch.results import results_table, write_results
from experiments.mismatch.runs import Run, complete_runs, find_base, is_complete, lock, make_base, make_run
from megatron_retool.config import ConfigError, load_config
from megatron_retool.interruption import end_when_interrupted, interrupts, run_interruptible
from megatron_retool.parity.mismatch import write_mismatch_report
from megatron_retool.runs.demo_base import DemoBase

QUICK = (
    "data.train_batch_size=4", "rollout.train.n=4", "learner.mini_batch_size=8", "learner.world_size=1",
    "rollout.branching.initial_rollouts=2", "data.max_val_samples=8", "rollout.val.n=2",
    "tools.code_interpreter.workers=2", "learner.critic.warmup_steps=1",
    # After so little fine-tuning most groups are all wrong.
    "algorithm.dynamic_sampling.enable=false",
)  # fmt: skip
_QUICK_STEPS = 2
_WAIT_SECONDS = 10.0


def main(experiment: Experiment, arguments: Sequence[str] | None = None) -> int:
    """The command line of an experiment."""
    parser = argparse.ArgumentParser(description=f"{experiment.title}; see docs/mismatch.md")
    parser.add_argument("--quick", action="store_true", help="a few minutes: does everything run?")
    default = " ".join(map(str, experiment.seeds))
    parser.add_argument("--seeds", type=int, nargs="+", help=f"runs of each arm (default {default})")
    parser.add_argument("--steps", type=int, help=f"RL steps of each run (default {experiment.steps})")
    parser.add_argument("--arms", nargs="+", help="only these: " + ", ".join(arm.name for arm in experiment.arms))
    parser.add_argument("--output", type=Path, default=Path("runs/mismatch"))
    parser.add_argument("--base", type=Path, help=f"take the fine-tuned model of this run of {experiment.config.name}")
    parser.add_argument("overrides", nargs="*", help="dotted.key=value for every run; before the options")
    options = parser.parse_intermixed_args(arguments)
    console = Console(soft_wrap=not sys.stdout.isatty(), emoji=False)

    def command() -> int:
        try:
            with interrupts(how_to_go_on=lambda: "the same command continues from here"):
                run_experiment(
                    experiment,
                    output=options.output / "quick" if options.quick else options.output,
                    quick=options.quick,
                    base=options.base,
                    seeds=options.seeds,
                    steps=options.steps,
                    arms=options.arms,
                    overrides=options.overrides,
                    console=console,
                )
        except (ConfigError, RuntimeError) as error:
            console.print("[bold red]error:[/]", escape(str(error)), highlight=False)
            return 1
        return 0

    end_when_interrupted()
    return run_interruptible(command)


def run_experiment(
    experiment: Experiment,
    *,
    output: Path,
    quick: bool,
    console: Console,
    base: Path | None = None,
    seeds: Sequence[int] | None = None,
    steps: int | None = None,
    arms: Sequence[str] | None = None,
    overrides: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run what is missing, then write the results of all runs that are there; the rows of results.jsonl.

    Raises:
        ConfigError: an unknown arm, settings that do not fit, or ``base`` has no fine-tuned model or another demo's.
        RuntimeError: runs failed; the others were made.
    """
    directory = output.absolute() / experiment.name
    steps = steps or (_QUICK_STEPS if quick else experiment.steps)
    chosen = chosen_arms(experiment, arms, quick, steps)
    seeds = seeds or (experiment.seeds[:1] if quick else experiment.seeds)
    last = QUICK if quick else ()
    common = [*experiment.common, *overrides]
    for arm in chosen:
        load_config(experiment.config, [*common, *arm.overrides, *last])
    model = find_base(base, experiment) if base is not None else make_base(output, experiment, quick, console)
    # All arms of a seed first: a search that is cut short still compares something.
    runs = [Run(directory, arm, seed, steps) for seed in seeds for arm in chosen]
    failures = _make_runs(runs, experiment, model, common, last, console)
    done = complete_runs(directory, experiment, steps)
    rows: list[dict[str, Any]] = []
    if done:
        with lock(directory, "results", wait=True):
            rows = write_results(directory, experiment, done)
            for run in {run.arm.name: run for run in reversed(done)}.values():
                write_mismatch_report(run.path)
        console.print(results_table(experiment, rows))
        console.print(f"results {directory}/results.md and .jsonl\nplots {directory}/curves.png, {directory}/*/report/")
    if failures:
        raise RuntimeError("\n".join(failures))
    return rows


def chosen_arms(experiment: Experiment, names: Sequence[str] | None, quick: bool, steps: int) -> list[Arm]:
    """The arms to run, in the experiment's order, in which one that starts from another comes after it.

    Raises:
        ConfigError: a name is unknown, or there are too few steps for an arm that starts halfway.
    """
    known = [arm.name for arm in experiment.arms]
    if unknown := [name for name in names or () if name not in known]:
        raise ConfigError(f"unknown arm {unknown[0]!r}; known are {', '.join(known)}")
    chosen = [arm for arm in experiment.arms if (arm.name in names if names else arm.quick or not quick)]
    if steps < 2 and (late := [arm.name for arm in chosen if arm.starts_from is not None]):
        raise ConfigError(f"--steps {steps}: {late[0]} starts halfway and needs at least 2")
    return chosen


def _make_runs(
    runs: Sequence[Run],
    experiment: Experiment,
    model: DemoBase,
    common: Sequence[str],
    last: Sequence[str],
    console: Console,
) -> list[str]:
    """Make every run that no other process makes; what went wrong."""
    pending, failures = list(runs), list[str]()
    seconds: list[float] = []
    while pending:
        elsewhere, made = list[Run](), False
        for run in list(pending):
            with lock(run.directory, run.name) as is_ours:
                if not is_ours:
                    elsewhere.append(run)
                    continue
                if run.arm.starts_from in {other.arm.name for other in elsewhere if other.seed == run.seed}:
                    continue
                pending.remove(run)
                if is_complete(run, experiment):
                    console.print(f"[dim]{run.name}: done[/]")
                    continue
                console.rule(f"[bold]{run.name}[/] ({_progress(len(runs), len(pending), seconds)})", align="left")
                began, made = time.monotonic(), True
                try:
                    make_run(run, experiment, model, common, last, console)
                except RuntimeError as error:
                    console.print("[bold red]error:[/]", escape(str(error)), highlight=False)
                    failures.append(str(error))
                else:
                    seconds.append(time.monotonic() - began)
        if elsewhere and len(elsewhere) == len(pending):
            names = ", ".join(run.name for run in elsewhere)
            console.print(f"another command makes {names}: it will write the results with these")
            break
        if pending and not made:
            time.sleep(_WAIT_SECONDS)  # until another command has made what ours start from
    return failures


def _progress(total: int, pending: int, seconds: Sequence[float]) -> str:
    """Such as "3 of 39, about 95 min left", where ``seconds`` are those of the runs that were made."""
    place = f"{total - pending} of {total}"
    return f"{place}, about {sum(seconds) / len(seconds) * (pending + 1) / 60:.0f} min left" if seconds else place
