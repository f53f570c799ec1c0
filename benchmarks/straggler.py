"""What one long response costs a rollout, and what refilling, partial rollout, over-sampling and staleness win back.

    python benchmarks/straggler.py [--config FILE] [--gpus H200x8] [--over-sampling 1.25] [--steps 40] [--json]
    python benchmarks/straggler.py --kept-groups 0.5  # dynamic sampling discards half of the groups

Simulates steps with the length distribution of a published run of the recipe (mean 2707 tokens, 0.85 % of the responses
at the limit of 16384, 2.9 tool calls each) and prints the seconds of a step with and without. Needs no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402

from megatron_retool.config import load_config  # noqa: E402
from megatron_retool.planning.hardware import parse_machines  # noqa: E402
from megatron_retool.planning.models import resolve_architecture  # noqa: E402
from megatron_retool.planning.report import outcome_table, straggler_sentence  # noqa: E402
from megatron_retool.planning.scenarios import scenario_of  # noqa: E402
from megatron_retool.planning.strategies import Scenario, Strategy, StrategyOutcome, run_strategy  # noqa: E402
from megatron_retool.planning.workload import workload_of  # noqa: E402


def strategies(over_sampling: float, max_age: int, refills: bool) -> tuple[Strategy, ...]:
    """The first one is what the others are held against."""
    if not refills:
        return (
            Strategy("wait for all"),
            Strategy("over-sampling, rest dropped", "drop", over_sampling),
            Strategy("partial rollout", "pause", over_sampling, max_age),
            Strategy("1 step off", asynchronous=True),
            Strategy("partial rollout, asynchronous", "stream", over_sampling, max_age, asynchronous=True),
        )
    return (
        Strategy("refill in rounds", "rounds"),
        Strategy("continuous refill"),
        Strategy("partial rollout", "pause", 1.0, max_age),
        Strategy("partial rollout, over-sampling", "pause", over_sampling, max_age),
        Strategy("continuous, 1 step off", asynchronous=True),
        Strategy("partial rollout, asynchronous", "stream", over_sampling, max_age, asynchronous=True),
    )


def simulate(
    config_file: str, gpus: str, over_sampling: float, max_age: int, kept_groups: float, steps: int, seed: int
) -> tuple[Scenario, list[StrategyOutcome]]:
    config = load_config(config_file)
    _, architecture = resolve_architecture(config.model, config.demo)
    machines = parse_machines(gpus)
    layout = config.learner.layout(architecture)
    scenario = scenario_of(
        config, architecture, layout, machines, workload_of(config, kept_groups=kept_groups), machines.count
    )
    return scenario, [
        run_strategy(scenario, strategy, steps=steps, seed=seed)
        for strategy in strategies(over_sampling, max_age, kept_groups < 1)
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "configs" / "retool_qwen2.5_32b_8xh200.yaml"))
    parser.add_argument("--gpus", default="H200x8")
    parser.add_argument("--over-sampling", type=float, default=1.25, help="groups in flight for each that is needed")
    parser.add_argument("--max-age", type=int, default=2, help="steps that a paused group may wait")
    parser.add_argument("--kept-groups", type=float, default=1.0, help="share of groups that dynamic sampling keeps")
    parser.add_argument("--steps", type=int, default=40, help="simulated steps, after two of warm-up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(arguments)
    scenario, outcomes = simulate(
        *(options.config, options.gpus, options.over_sampling, options.max_age, options.kept_groups),
        *(options.steps, options.seed),
    )
    waiting = outcomes[0]
    if options.json:
        print(json.dumps({outcome.strategy.name: dataclasses.asdict(outcome) for outcome in outcomes}))
        return 0
    console = Console()
    console.print(outcome_table(scenario, outcomes))
    console.print(straggler_sentence(scenario, waiting))
    for outcome in outcomes[1:]:
        console.print(
            f"{outcome.strategy.name}: generation {waiting.generation_seconds:.0f} s -> "
            f"{outcome.generation_seconds:.0f} s ({waiting.generation_seconds / outcome.generation_seconds:.2f} x), "
            f"step {waiting.step_seconds:.0f} s -> {outcome.step_seconds:.0f} s "
            f"({waiting.step_seconds / outcome.step_seconds:.2f} x), trained tokens a second "
            f"{outcome.tokens_per_second_per_gpu / waiting.tokens_per_second_per_gpu:.2f} x",
            highlight=False,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
