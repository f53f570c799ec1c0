"""What an experiment is: arms, each a set of overrides, run with several seeds from the same fine-tuned model.

Every run is `python -m megatron_retool train` with the arm's overrides, in a directory of its own under
runs/mismatch/<experiment>/<arm>_seed<n>, so whatever the project can do with a run it can do with these. A command that
is given again continues: finished runs are skipped, the one that was cut off resumes from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_retool.config import ConfigError, load_config
from megatron_retool.pipeline import Stages, fine_tune
from megatron_retool.reports.mismatch import write_mismatch_report
from megatron_retool.runs.checkpoints import complete_checkpoints
from megatron_retool.runs.demo_base import DemoBase, base_settings
from megatron_retool.runs.files import atomic_write
from megatron_retool.runs.metrics_file import read_metrics

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "demo_cpu.yaml"
TWO_TOOLS_CONFIG = ROOT / "configs" / "demo_two_tools_cpu.yaml"

REAL_MISMATCH = ("rollout.engine.dtype=bfloat16", "weight_sync.round_to=fp8")
"""The engine computes in bfloat16 with weights rounded to block-wise FP8 at every sync; the learner stays float32."""

NO_CORRECTION = (
    "algorithm.rollout_correction.mode=none",
    "algorithm.rollout_correction.rejection=[]",
    "algorithm.rollout_correction.veto_threshold=null",
)

CURVES = (
    ("rollout/acc/mean", "accuracy of generated responses", False),
    ("actor/grad_norm", "gradient norm", True),
    ("rollout_corr/k3_kl", "k3 KL", True),
    # Not the perplexity itself: a single response that the model all but excludes would outweigh all others.
    ("rollout_corr/training_log_ppl", "log-perplexity under the learner (nats)", False),
    ("actor/entropy", "entropy (nats)", False),
    ("rollout_corr/masked_fraction", "rejected tokens", False),
)

_QUICK_BASE = (
    "demo.pretrain_rows=1600", "demo.sft_rows=640", "demo.train_rows=64", "demo.val_rows=12", "demo.sft_val_rows=16",
)  # fmt: skip
_QUICK_SFT_STEPS = 80
_QUICK = (
    "data.train_batch_size=4", "rollout.train.n=4", "learner.mini_batch_size=8", "learner.world_size=1",
    "rollout.branching.initial_rollouts=2", "data.max_val_samples=8", "rollout.val.n=2",
    "tools.code_interpreter.workers=2", "learner.critic.warmup_steps=1",
    # After so little fine-tuning most groups are all wrong.
    "algorithm.dynamic_sampling.enable=false",
)  # fmt: skip
_QUICK_STEPS = 2


@dataclass(frozen=True)
class Arm:
    """One line of a plot. ``quick``: also part of the --quick form."""

    name: str
    overrides: tuple[str, ...]
    quick: bool = False


@dataclass(frozen=True)
class Experiment:
    """
    Attributes:
        name: directory under the output and name in results.jsonl.
        title: of the plots.
        arms: what is compared.
        common: overrides of every arm.
        config: the demo whose fine-tuned model every run starts from.
        steps: RL steps of each run.
        seeds: runs of each arm.
    """

    name: str
    title: str
    arms: tuple[Arm, ...]
    common: tuple[str, ...] = ()
    config: Path = CONFIG
    steps: int = 60
    seeds: int = 3


def main(experiment: Experiment, arguments: Sequence[str] | None = None) -> int:
    """The command line of an experiment."""
    parser = argparse.ArgumentParser(description=f"{experiment.title}; see docs/mismatch.md")
    parser.add_argument("--quick", action="store_true", help="a few minutes: does everything run?")
    parser.add_argument("--seeds", type=int, help=f"runs of each arm (default {experiment.seeds})")
    parser.add_argument("--steps", type=int, help=f"RL steps of each run (default {experiment.steps})")
    parser.add_argument("--arms", nargs="*", help="only these: " + ", ".join(arm.name for arm in experiment.arms))
    parser.add_argument("--output", type=Path, default=Path("runs/mismatch"))
    parser.add_argument("--base", type=Path, help=f"take the fine-tuned model of this run of {experiment.config.name}")
    parser.add_argument("overrides", nargs="*", help="dotted.key=value for every run")
    options = parser.parse_intermixed_args(arguments)
    console = Console(soft_wrap=not sys.stdout.isatty(), emoji=False)
    try:
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
    except KeyboardInterrupt:
        console.print("[yellow]stopped; the same command goes on from here[/]")
        return 130
    except (ConfigError, RuntimeError) as error:
        console.print("[bold red]error:[/]", escape(str(error)), highlight=False)
        return 1
    return 0


def run_experiment(
    experiment: Experiment,
    *,
    output: Path,
    quick: bool,
    console: Console,
    base: Path | None = None,
    seeds: int | None = None,
    steps: int | None = None,
    arms: Sequence[str] | None = None,
    overrides: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run what is missing, then write results.jsonl and the plots; the rows of results.jsonl.

    Raises:
        ConfigError: an unknown arm, or ``base`` has no fine-tuned model, or one for other tools.
        RuntimeError: a run failed.
    """
    known = {arm.name: arm for arm in experiment.arms}
    if unknown := [name for name in arms or () if name not in known]:
        raise ConfigError(f"unknown arm {unknown[0]!r}; known are {', '.join(known)}")
    chosen = [known[name] for name in arms] if arms else [arm for arm in experiment.arms if arm.quick or not quick]
    seeds = seeds or (1 if quick else experiment.seeds)
    steps = steps or (_QUICK_STEPS if quick else experiment.steps)
    variant = load_config(experiment.config).demo.variant
    model = find_base(base, variant) if base is not None else make_base(output, experiment.config, quick, console)
    directory = output.absolute() / experiment.name
    common = [*experiment.common, *overrides]
    for seed in range(seeds):  # all arms of a seed first: a run that is cut short still compares something
        for arm in chosen:
            settings = [*common, *arm.overrides, *(_QUICK if quick else ())]
            run_arm(directory / run_name(arm.name, seed), experiment.config, seed, steps, model, settings, console)
    rows = [summary(directory, experiment.name, arm.name, seed) for arm in chosen for seed in range(seeds)]
    with atomic_write(directory / "results.jsonl") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    draw_curves(directory, experiment, [arm.name for arm in chosen], seeds)
    for arm in chosen:
        write_mismatch_report(directory / run_name(arm.name, 0))
    console.print(results_table(experiment, rows))
    console.print(f"results {directory / 'results.jsonl'}\nplots {directory / 'curves.png'}, {directory}/*/report/")
    return rows


def run_name(arm: str, seed: int) -> str:
    return f"{arm}_seed{seed}"


def run_arm(
    run_dir: Path, config: Path, seed: int, steps: int, model: DemoBase, overrides: Sequence[str], console: Console
) -> None:
    """One run, or the rest of it.

    Raises:
        RuntimeError: it failed.
    """
    checkpoints = complete_checkpoints(run_dir)
    if checkpoints and checkpoints[-1].step >= steps:
        console.print(f"[dim]{run_dir.name}: done[/]")
        return
    console.rule(f"[bold]{run_dir.name}", align="left")
    every = max(steps // 4, 1)
    settings = [
        f"trainer.runs_dir={run_dir.parent}", f"trainer.experiment_name={run_dir.name}", f"trainer.seed={seed}",
        f"trainer.total_steps={steps}", f"trainer.test_freq={every}", f"trainer.save_freq={every}",
        "trainer.keep_checkpoints=1", "trainer.log_val_generations=0", "demo.enable=false",
        "trainer.at_end=[]", *model.data_overrides, *model.model_overrides, *overrides,
    ]  # fmt: skip
    code = _call(["train", "--config", str(config), *settings])
    if code:
        raise RuntimeError(f"{run_dir.name} ended with exit code {code}; its logs are in {run_dir / 'logs'}")


def _call(arguments: list[str]) -> int:
    process = subprocess.Popen([sys.executable, "-m", "megatron_retool", *arguments], cwd=ROOT)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()  # it got the signal too and cleans up
        raise
    if code == 130:
        raise KeyboardInterrupt
    return code


def find_base(run_dir: Path, variant: str) -> DemoBase:
    """The fine-tuned model of a demo run, which every run of an experiment starts from, and its data.

    Raises:
        ConfigError: the run has none, or is of another demo.variant.
    """
    base = DemoBase(run_dir.absolute())
    if base.missing is not None:
        raise ConfigError(f"--base {run_dir}: {base.missing} does not exist; give a demo run whose fine-tuning is done")
    made = json.loads((base.data / "manifest.json").read_text(encoding="utf-8"))["demo"].get("variant", "one_tool")
    if made != variant:
        raise ConfigError(f"--base {run_dir} was made with demo.variant={made}; this experiment needs {variant}")
    return base


def make_base(output: Path, config_file: Path, quick: bool, console: Console) -> DemoBase:
    """The demo's data and fine-tuned model under ``output``, unless they are there; each variant has its own."""
    name = "base" if config_file == CONFIG else "base_two_tools"
    overrides = [f"trainer.runs_dir={output.absolute()}", f"trainer.experiment_name={name}"]
    config = load_config(config_file, overrides)
    if quick:
        quick_stages = [asdict(replace(stage, steps=_QUICK_SFT_STEPS)) for stage in config.sft.stages]
        overrides += [*_QUICK_BASE, f"sft.stages={json.dumps(quick_stages)}"]
        config = load_config(config_file, overrides)
    arguments = ["--config", str(config_file), *overrides]
    stages = Stages(config.run_dir, console)
    stages.claim(base_settings(config))
    stages.run(
        "make-demo", [sys.executable, "-m", "megatron_retool", "make-demo", *arguments], done=Path(config.model.path)
    )
    fine_tune(config, stages, arguments)
    return find_base(config.run_dir, config.demo.variant)


def summary(directory: Path, experiment: str, arm: str, seed: int) -> dict[str, Any]:
    """One row of results.jsonl.

    final_accuracy and best_accuracy are means over 10 steps of the accuracy of all generated responses (over what there
    is of a shorter run); "degraded" says that the end lies below nine tenths of the best.
    """
    rows = [row for row in read_metrics(directory / run_name(arm, seed) / "metrics.jsonl") if row["step"] > 0]
    accuracy = _column(rows, "rollout/acc/mean")
    window = min(10, len(accuracy))
    means = np.convolve(accuracy, np.ones(window) / window, mode="valid")
    validated = [row for row in rows if any(key.startswith("val-core/all/acc/mean@") for key in row)]

    def largest(name: str) -> float | None:
        values = _column(rows, name)
        return float(values.max()) if len(values) else None

    return {
        "experiment": experiment,
        "arm": arm,
        "seed": seed,
        "steps": len(rows),
        "final_accuracy": float(means[-1]),
        "best_accuracy": float(means.max()),
        "degraded": bool(means[-1] < 0.9 * means.max()),
        "held_out_accuracy": next(
            (value for key, value in validated[-1].items() if key.startswith("val-core/all/acc/mean@")), None
        )
        if validated
        else None,
        "max_grad_norm": largest("actor/grad_norm"),
        "max_k3_kl": largest("rollout_corr/k3_kl"),
        "max_training_ppl": largest("rollout_corr/training_ppl"),
        "mean_rejected": _mean(rows, "rollout_corr/masked_fraction"),
        "final_entropy": _mean(rows[-window:], "actor/entropy"),
        "seconds": float(_column(rows, "timing_s/step").sum()),
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _column(rows: Sequence[dict[str, Any]], name: str) -> Any:
    return np.array([row[name] for row in rows if row.get(name) is not None], dtype=np.float64)


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    values = _column(rows, name)
    return float(values.mean()) if len(values) else None


def draw_curves(directory: Path, experiment: Experiment, arms: Sequence[str], seeds: int) -> Path:
    """curves.png: for every arm the mean over seeds, with the range of the seeds as a band, averaged over 5 steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    canvas, panels = plt.subplots(2, 3, figsize=(15, 8))
    for axes, (name, title, log_scale) in zip(panels.flat, CURVES, strict=True):
        positive = True
        for arm in arms:
            runs = []
            for seed in range(seeds):
                rows = read_metrics(directory / run_name(arm, seed) / "metrics.jsonl")
                runs.append({row["step"]: row[name] for row in rows if row["step"] > 0 and row.get(name) is not None})
            steps = sorted(set.intersection(*(set(run) for run in runs)))
            if not steps:
                continue
            window = min(5, len(steps))
            smooth = np.ones(window) / window
            values = np.array([np.convolve([run[step] for step in steps], smooth, mode="valid") for run in runs])
            steps = steps[window - 1 :]
            positive &= bool((values > 0).all())
            (line,) = axes.plot(steps, values.mean(0), label=arm)
            axes.fill_between(steps, values.min(0), values.max(0), alpha=0.15, color=line.get_color())
        if log_scale and positive and axes.has_data():
            axes.set_yscale("log")
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
    panels[0, 0].legend(fontsize=8)
    canvas.suptitle(f"{experiment.title} ({seeds} seed{'s' if seeds > 1 else ''}, running means of 5 steps)")
    canvas.tight_layout()
    target = directory / "curves.png"
    with atomic_write(target) as file:
        canvas.savefig(file, format="png", dpi=110)
    plt.close(canvas)
    return target


def results_table(experiment: Experiment, rows: Sequence[dict[str, Any]]) -> Table:
    """Means over the seeds of each arm."""
    columns = {
        "final_accuracy": "final", "held_out_accuracy": "held-out", "max_k3_kl": "k3 KL",
        "mean_rejected": "rejected",
    }  # fmt: skip
    table = Table(title=experiment.title, box=box.SIMPLE, pad_edge=False)
    table.add_column("arm", no_wrap=True)
    for heading in (*columns.values(), "degraded"):
        table.add_column(heading, justify="right", no_wrap=True)
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        means = [_mean(own, column) for column in columns]
        table.add_row(
            arm,
            *("–" if mean is None else f"{mean:.2g}" for mean in means),
            f"{sum(row['degraded'] for row in own)}/{len(own)}",
        )
    return table
