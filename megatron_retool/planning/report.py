"""A plan as tables for people."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from conversion.model.architecture import Architecture
from conversion.model.layout import ParallelLayout
from megatron_retool.config import ClusterConfig, LearnerConfig, RolloutConfig
from megatron_retool.planning.hardware import GIB, Machines
from megatron_retool.planning.memory import adapters_of, checkpoint_bytes, parameter_count, weight_sync_bytes
from megatron_retool.planning.memory_plan import MemoryPlan
from megatron_retool.planning.strategies import Scenario, StrategyOutcome
from megatron_retool.planning.suggest import Candidate, overrides_of
from megatron_retool.planning.timing import RunTime, StepTime
from megatron_retool.planning.workload import Workload
from run_files.phases import Phase

_NAMES = {
    "parameters": "parameters",
    "gradients": "gradients (fp32)",
    "optimizer": "optimizer states",
    "reference": "reference policy",
    "critic": "critic",
    "fp8_copies": "FP8 weight copies",
    "activations": "activations",
    "logits": "logits and head",
    "runtime": "CUDA, NCCL, fragmentation (allowance)",
}


_UNITS = {"MiB": 2**20, "GiB": GIB}

_HEADING_WIDTH = 9
"""Of a strategy's column, so that all of them fit into 80 columns."""

PUBLISHED_FACTORS = (1.3, 1.7)
"""Seconds of published RL systems, divided by what this model predicts for them: docs/planning.md."""


def _scale(value: float) -> tuple[float, str]:
    unit = "GiB" if value >= 2 * GIB else "MiB"
    return value / _UNITS[unit], unit


def describe_layout(layout: ParallelLayout, is_moe: bool) -> str:
    """TP 4 (SP), PP 1, CP 2, DP 1, and for a mixture of experts EP and ETP."""
    text = f"TP {layout.tensor}{' (SP)' if layout.sequence_parallel else ''}, PP {layout.pipeline}"
    if layout.virtual_pipeline:
        text += f" (VPP {layout.virtual_pipeline})"
    text += f", CP {layout.context}, DP {layout.data}"
    return text + (f", EP {layout.expert}, ETP {layout.expert_tensor}" if is_moe else "")


def print_header(
    console: Console,
    name: str,
    architecture: Architecture,
    rollout: RolloutConfig,
    learner: LearnerConfig,
    cluster: ClusterConfig,
    layout: ParallelLayout,
    machines: Machines,
    workload: Workload,
) -> None:
    """Print what is planned: model, machines, layout, engines and workload."""
    engine = rollout.engine
    lengths = workload.lengths
    checkpoint, unit = _scale(
        checkpoint_bytes(
            architecture,
            learner.dtype,
            optimizer=learner.optimizer.name,
            adapters=adapters_of(learner),
        )
    )
    sent, sent_unit = _scale(weight_sync_bytes(architecture, learner))
    console.print(
        f"[bold]{name}[/]: {parameter_count(architecture) / 1e9:.3g} B parameters; {machines}; {cluster.placement}",
        highlight=False,
    )
    console.print(
        f"learner: {layout.world_size} ranks, {describe_layout(layout, architecture.is_moe)}; "
        f"engines: {engine.count} x TP {engine.tensor_parallel_size}",
        highlight=False,
    )
    console.print(
        f"a step: {workload.groups} prompts x {workload.group_size} = {workload.responses} responses of "
        f"{lengths.mean:.0f} tokens on average, {lengths.clip_ratio:.2%} of them at the limit of {lengths.limit}, "
        f"{workload.tool_calls:.1f} tool calls each; "
        f"checkpoint {checkpoint:,.1f} {unit}; a weight sync sends {sent:,.2f} {sent_unit}",
        highlight=False,
    )


def memory_table(plan: MemoryPlan, accelerator: str) -> Table:
    """What a GPU's memory holds at the learner's peak and while engines generate."""
    _, unit = _scale(plan.learner_needed)
    table = Table(title=f"memory of one {accelerator} of {plan.capacity / GIB:.1f} GiB")
    table.add_column("part")
    table.add_column(unit, justify="right")
    table.add_column("share", justify="right")

    def row(name: str, value: float, style: str | None = None) -> None:
        table.add_row(name, f"{value / _UNITS[unit]:,.2f}", f"{value / plan.capacity:.0%}", style=style)

    table.add_row("[bold]learner, at the peak of an update[/]")
    for name, value in plan.learner.components().items():
        if value:
            row("  " + _NAMES[name], value)
    sleeping = plan.learner_needed - plan.learner.total
    if sleeping:
        row("  sleeping engine and its CUDA graphs", sleeping)
    row("  together", plan.learner_needed, "bold red" if plan.learner_needed > plan.capacity else "bold")
    table.add_section()
    table.add_row("[bold]engine, during the rollout[/]")
    row("  weights", plan.engine_weights)
    row(f"  key-value cache ({plan.cache_tokens:,.0f} tokens an engine)", plan.engine_cache)
    if plan.engine_graphs:
        row("  CUDA graphs (they stay while it sleeps)", plan.engine_graphs)
    table.add_row("  trajectories at one time on an engine", str(plan.concurrent), "")
    if plan.host_bytes_per_node:
        table.add_section()
        table.add_row("host memory of a node for the sleeping learner", f"{plan.host_bytes_per_node / GIB:.0f}", "")
    if plan.experts_host_bytes_per_node:
        table.add_row(
            "host memory of a node for routed experts (pinned)", f"{plan.experts_host_bytes_per_node / GIB:.1f}", ""
        )
    return table


def print_problems(console: Console, plan: MemoryPlan, cures: Sequence[Candidate]) -> None:
    """What does not fit and the knobs that help."""
    if plan.fits:
        console.print("[green]everything fits[/]")
        return
    for problem in plan.problems:
        console.print(f"[bold red]does not fit:[/] {problem}", highlight=False)
    if not cures:
        console.print("no single knob is enough; see the suggested layouts")
    for cure in cures[:5]:
        console.print(
            f"  would fit with [bold]{' '.join(overrides_of(cure.changes))}[/]: "
            f"{cure.memory.learner_needed / GIB:.0f} GiB, {cure.seconds:.0f} s a step",
            highlight=False,
        )


def time_table(time: StepTime, measured: dict[str, float] | None = None) -> Table:
    """Predicted seconds by phase; with ``measured``, those of a run beside them."""
    table = Table(title="a step, predicted")
    for column in ("phase", "seconds", "share", "what it is made of", *(("measured", "error") if measured else ())):
        text = column in ("phase", "what it is made of")
        table.add_column(column, justify="left" if text else "right", no_wrap=column != "what it is made of")
    parts = {
        Phase.GENERATION: f"mean batch {time.generation.mean_batch:.0f} an engine; the last tenth of responses takes "
        f"{time.generation.tail_seconds:.0f} s" + _staleness(time),
        Phase.OLD_LOG_PROB: _parts(vars(time.log_probs)),
        Phase.UPDATE_ACTOR: _parts(vars(time.update)),
    }
    for phase, seconds in time.phases().items():
        row = [phase, f"{seconds:.4g}", f"{seconds / time.total:.0%}", parts.get(phase, "")]
        table.add_row(*row, *_against(measured, phase, seconds))
    table.add_section()
    note = "generation and training overlap" if time.overlapped else ""
    table.add_row(Phase.STEP, f"{time.total:.4g}", "", note, *_against(measured, Phase.STEP, time.total), style="bold")
    return table


def _staleness(time: StepTime) -> str:
    return f"; {time.stale_share:.0%} of the response tokens are of older weights" if time.stale_share else ""


def _parts(parts: dict[str, float]) -> str:
    result = [f"{name.replace('_', ' ')} {value:.3g}" for name, value in parts.items() if value >= 0.005]
    return ", ".join(result)


def _against(measured: dict[str, float] | None, name: str, predicted: float) -> list[str]:
    if not measured:
        return []
    value = measured.get(name)
    return ["", ""] if not value else [f"{value:.4g}", f"{predicted / value - 1:+.0%}"]


def print_time(console: Console, time: StepTime, run: RunTime, calibrated: bool) -> None:
    """``calibrated``: the predictions stand beside measurements of the same run."""
    console.print(
        f"{time.trained_tokens:,.0f} tokens a step, {time.tokens_per_second_per_gpu:,.0f} tokens/s and GPU; "
        f"MFU of the update {time.mfu:.1%}",
        highlight=False,
    )
    quick = f"{run.quick_validations} quick ones of {run.quick_validation_seconds:.0f} s, "
    weights = f", {run.weights_checkpoints} of only weights of {run.weights_checkpoint_seconds:.0f} s"
    console.print(
        f"{run.steps} steps: {run.hours:,.1f} h ({run.validations} validations of {run.validation_seconds:.0f} s, "
        f"{quick if run.quick_validations else ''}{run.checkpoints} checkpoints of {run.checkpoint_seconds:.0f} s"
        f"{weights if run.weights_checkpoints else ''})",
        highlight=False,
    )
    if not calibrated:
        low, high = PUBLISHED_FACTORS
        console.print(
            f"[dim]a well-tuned system; published ones took {low} to {high} times what this model predicts for them[/]",
            highlight=False,
        )


def suggestion_table(candidates: Sequence[Candidate], is_moe: bool) -> Table:
    """The candidates as rows, with their layout, memory, seconds and throughput."""
    table = Table(title="suggested layouts, fastest first", caption="GiB of the learner; tokens/s and GPU")
    table.add_column("", no_wrap=True)
    table.add_column("learner; placement, recomputation, engines")  # what wraps where the terminal is narrow
    for column in ("GiB", "step s", "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for index, candidate in enumerate(candidates):
        changes = candidate.changes
        recompute = changes["learner__recompute__granularity"] or "no"
        if changes["learner__recompute__method"] == "block":
            recompute = f"{changes['learner__recompute__num_layers']}-layer"
        engines = f"{changes['rollout__engine__count']} x TP {changes['rollout__engine__tensor_parallel_size']}"
        table.add_row(
            str(index + 1),
            f"{candidate.layout.world_size}: {describe_layout(candidate.layout, is_moe)}\n"
            f"{changes['cluster__placement']}, {recompute} recomputation, {engines}",
            f"{candidate.memory.learner_needed / GIB:.0f}",
            f"{candidate.seconds:.0f}",
            f"{candidate.time.tokens_per_second_per_gpu:,.0f}",
        )
    return table


def outcome_table(scenario: Scenario, outcomes: Sequence[StrategyOutcome]) -> Table:
    """The strategies on one cluster; ``outcomes[0]`` is what the others are compared with."""
    table = Table(
        title=f"{scenario.gpus} GPUs: {scenario.engines} engines of TP {scenario.engine_gpus}, "
        f"{scenario.workload.responses} responses a step",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    table.add_column("", no_wrap=True)
    for outcome in outcomes:
        heading = outcome.strategy.name.replace("asynchronous", "asyn- chronous").replace("over-sample", "over- sample")
        table.add_column("\n".join(textwrap.wrap(heading, _HEADING_WIDTH)), justify="right", no_wrap=True)
    base = outcomes[0].step_seconds
    rows: dict[str, Callable[[StrategyOutcome], str]] = {
        "GPUs": lambda o: str(o.gpus),
        "generation s": lambda o: f"{o.generation_seconds:.0f}",
        "of it tail s": lambda o: f"{o.tail_seconds:.0f}",
        "training s": lambda o: f"{o.train_seconds:.0f}",
        "step s": lambda o: f"{o.step_seconds:.0f}",
        "speed-up": lambda o: f"{base / o.step_seconds:.2f}",
        "tokens/s/GPU": lambda o: f"{o.tokens_per_second_per_gpu:,.0f}",
        "idle engines": lambda o: f"{o.idle:.0%}",
        "stale tokens": lambda o: f"{o.stale_share:.0%}",
        "dropped": lambda o: f"{o.dropped_share:.0%}",
        "mean length": lambda o: f"{o.mean_length:.0f}",
        "at limit": lambda o: f"{o.clip_ratio:.2%}",
    }
    for name, cell in rows.items():
        table.add_row(name, *(cell(outcome) for outcome in outcomes))
    return table


def straggler_sentence(scenario: Scenario, waiting: StrategyOutcome) -> str:
    """What the longest response does to a step that waits for it."""
    limit = scenario.workload.lengths.limit
    return (
        f"A response of {limit} tokens takes {scenario.longest_alone_seconds:.0f} s even with an engine of its own. "
        f"Waiting for everybody, the last tenth of the responses takes {waiting.tail_seconds:.0f} of "
        f"{waiting.generation_seconds:.0f} s of generation ({waiting.tail_seconds / waiting.generation_seconds:.0%})."
    )
