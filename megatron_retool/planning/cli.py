"""The plan command: configuration and options in, tables out. commands/plan.py has its arguments."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from megatron_retool.config import ClusterConfig, Config, ConfigError, LearnerConfig, RolloutConfig, load_config
from megatron_retool.planning import report
from megatron_retool.planning.hardware import Machines, parse_machines
from megatron_retool.planning.memory_plan import plan_memory
from megatron_retool.planning.models import resolve_architecture
from megatron_retool.planning.scenarios import MAX_RESPONSES, SIZES, compare, scenario_of
from megatron_retool.planning.strategies import Strategy, standard_strategies
from megatron_retool.planning.suggest import Planner, overrides_of
from megatron_retool.planning.timing import RunTime, predict_run, predict_step
from megatron_retool.planning.workload import Workload, workload_of
from run_files.metrics import read_metrics_and_problems
from run_files.phases import TIMING_PREFIX, Phase
from sglang_rollout.engine.served_models import check_served_model

DEFAULT_STEPS = 100


def run(options: argparse.Namespace, console: Console) -> int:
    """Plan what ``options`` (commands/plan.py) ask for.

    Returns:
        0 where the configuration fits, 1 where it does not.

    Raises:
        ConfigError: the configuration, an option or a measured run is unusable; the message says why.
    """
    config, measured = _configuration(options)
    if options.model is None:
        check_served_model(config)
    machines = parse_machines(options.gpus or _machines_of(config.cluster, config.learner), options.gpus_per_node)
    name, architecture = resolve_architecture(config.model, config.demo, options.model)
    layout = config.learner.layout(architecture)
    workload = _workload(options, config, measured)

    report.print_header(
        console, name, architecture, config.rollout, config.learner, config.cluster, layout, machines, workload
    )
    memory = plan_memory(config, architecture, layout, machines, workload)
    console.print(report.memory_table(memory, machines.accelerator.name))
    planner = Planner(config, architecture, machines, workload)
    report.print_problems(console, memory, [] if memory.fits else planner.cures())

    step = predict_step(config, architecture, layout, machines, workload)
    console.print(report.time_table(step, measured))
    run = _run_time(options, config, architecture, machines, workload, step.total)
    report.print_time(console, step, run, calibrated=measured is not None or machines.accelerator.is_cpu)
    if options.suggestions and not machines.accelerator.is_cpu:
        candidates = planner.suggestions(options.suggestions)
        if candidates:
            console.print(report.suggestion_table(candidates, architecture.is_moe))
            console.print(" ".join(overrides_of(candidates[0].changes)), highlight=False, soft_wrap=True)
        else:
            console.print(f"[bold red]no layout of {name} fits on {machines}[/]")
    if options.simulate:
        for gpus in [machines.count] if machines.accelerator.is_cpu else options.sizes or SIZES:
            started = time.perf_counter()
            scenario = scenario_of(
                config,
                architecture,
                layout,
                machines,
                workload,
                gpus,
                max_responses=options.max_responses or MAX_RESPONSES,
            )
            outcomes = compare(scenario, _strategies(config.rollout), seed=options.seed)
            console.print(report.outcome_table(scenario, outcomes))
            console.print(report.straggler_sentence(scenario, outcomes[0]), highlight=False)
            console.print(f"[dim]simulated in {time.perf_counter() - started:.1f} s[/]")
    return 0 if memory.fits else 1


def _strategies(rollout: RolloutConfig) -> tuple[Strategy, ...]:
    """With the configuration's over-sampling and patience, where partial rollout is on."""
    partial = rollout.partial
    return (
        standard_strategies(partial.over_sampling_factor, partial.max_age) if partial.enable else standard_strategies()
    )


def _configuration(options: argparse.Namespace) -> tuple[Config, dict[str, float] | None]:
    path = options.config
    measured = None
    if options.run:
        directory = Path(options.run)
        measured = read_measurements(directory / "metrics.jsonl")
        if path is None:
            path = directory / "config.yaml"
    return load_config(path, options.overrides), measured


def _machines_of(cluster: ClusterConfig, learner: LearnerConfig) -> str:
    if cluster.gpus_per_node == 0:
        return f"CPUx{learner.world_size}"
    return f"H100x{cluster.nodes * cluster.gpus_per_node}"


def _workload(options: argparse.Namespace, config: Config, measured: dict[str, float] | None) -> Workload:
    figures: dict[str, float | None] = {
        "response_mean": options.response_mean,
        "clip_ratio": options.clip_ratio,
        "prompt_tokens": options.prompt_mean,
        "tool_calls": options.tool_calls,
        "tool_seconds": options.tool_seconds,
        "kept_groups": options.kept_groups,
    }
    if measured:
        responses = config.data.train_batch_size * config.rollout.train.n
        logged = {
            "response_mean": measured.get("response_length/mean"),
            # No response at the limit is less than half a response.
            "clip_ratio": max(measured.get("response_length/clip_ratio", 0.0), 0.5 / responses),
            "prompt_tokens": measured.get("prompt_length/mean"),
            "tool_calls": measured.get("tool/calls"),
            "tool_seconds": measured.get("tool/seconds_mean") or None,
        }
        generated, kept = (measured.get(f"dynamic_sampling/{name}_groups") for name in ("generated", "kept"))
        if generated and kept:
            logged["kept_groups"] = min(1.0, kept / generated)
        figures = {key: value if value is not None else logged.get(key) for key, value in figures.items()}
    workload = workload_of(config, **figures)
    if measured and options.tool_seconds is None:
        # What a run logs of a call contains its wait for a worker: it must not wait again.
        workload = replace(workload, sandbox_workers=max(workload.sandbox_workers, workload.responses))
    return workload


def read_measurements(path: Path) -> dict[str, float]:
    """Medians over the steps of a run's metrics.jsonl, the first step left out; timings under their phase's name.

    Raises:
        ConfigError: the file is missing, malformed or has no step.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: --run takes the directory of a run, runs/<experiment_name>")
    rows, problems = read_metrics_and_problems(path)
    if problems and not rows:
        raise ConfigError(f"{path} is not a file of JSON lines: {problems[0]}")
    steps = [row for row in rows if Phase.GENERATION.metric in row]
    if not steps:
        raise ConfigError(f"{path} has no training step")
    # The first step compiles, connects and warms caches.
    steps = steps[1:] or steps
    measured: dict[str, float] = {}
    for name in sorted({name for row in steps for name in row}):
        values = [row[name] for row in steps if isinstance(row.get(name), (int, float))]
        if values:
            measured[name.removeprefix(TIMING_PREFIX)] = float(median(values))
    return measured


def _run_time(
    options: argparse.Namespace,
    config: Config,
    architecture: Any,
    machines: Machines,
    workload: Workload,
    step_seconds: float,
) -> RunTime:
    steps = options.steps or config.trainer.total_steps or DEFAULT_STEPS
    return predict_run(config, architecture, machines, workload, step_seconds, steps, options.val_prompts)
