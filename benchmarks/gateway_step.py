"""What the gateway costs a step: the demo's steps through an agent on the plain ``openai`` client and through the
built-in loop, alternating in one run.

    bash scripts/train_dapo_megatron.sh  # the base: its data and fine-tuned model
    python benchmarks/gateway_step.py --base runs/demo
    python benchmarks/gateway_step.py --base runs/demo --agent benchmarks/plain_openai_agent.py:run

One learner, one engine, one sandbox: training steps of odd numbers take their rollouts from the agent, those of even
numbers from the built-in loop. Dynamic sampling is off, so that a step has one round of rollouts; the first pair is
left out. Printed are the median seconds of a step and of its generation, and the median over pairs of neighbours of the
ratio, of seconds for each sampled token as well, for responses differ.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_retool.cluster import deployment
from megatron_retool.commands.running import train
from megatron_retool.config import load_config
from megatron_retool.runs.demo_base import DemoBase
from megatron_retool.runs.leave import LeaveRequest
from megatron_retool.runs.metrics_file import read_metrics
from megatron_retool.trajectory import Trajectory
from sglang_rollout.groups import Changes
from sglang_rollout.rollout_manager import RolloutManager

ROOT = Path(__file__).resolve().parents[1]


class AlternatingManager(RolloutManager):
    """Takes the agent in every other stream."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._task_agents, self._streams = self.task_agents, 0
        assert self._task_agents is not None

    async def stream(self, *arguments: Any, **keywords: Any) -> AsyncGenerator[list[Trajectory], Changes | None]:
        self.task_agents = None if self._streams % 2 else self._task_agents
        self._streams += 1
        async with contextlib.aclosing(super().stream(*arguments, **keywords)) as groups:
            changes = None
            with contextlib.suppress(StopAsyncIteration):
                while True:
                    changes = yield await groups.asend(changes)


def pairs(run_dir: Path) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Metrics of (the agent's step, the built-in loop's after it), without the first pair."""
    rows = {row["step"]: row for row in read_metrics(run_dir / "metrics.jsonl") if row["step"] > 2}
    result = [(rows[step], rows[step + 1]) for step in sorted(rows) if step % 2 and step + 1 in rows]
    for agent, built_in in result:
        assert "agent/outcome/finished" in agent and "agent/outcome/finished" not in built_in
    return result


def report(run_dir: Path) -> None:
    result = pairs(run_dir)
    for name, metric in (("step", "timing_s/step"), ("generation", "timing_s/gen")):
        agent, built_in = np.array([[each[metric] for each in pair] for pair in result]).T
        tokens = np.array([[each["rollout/sampled_tokens"] for each in pair] for pair in result]).T
        print(
            f"{name}: {np.median(agent):.2f} s through the gateway, {np.median(built_in):.2f} s built-in: "
            f"{np.median(agent / built_in):.3f} times, "
            f"{np.median(agent / tokens[0] / (built_in / tokens[1])):.3f} for each sampled token"
        )
    print(f"{len(result)} pairs; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="a demo run whose fine-tuning is done")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument(
        "--agent",
        default="examples/run_tools_agent.py:run",
        help="file below the repository's root and function (default: %(default)s)",
    )
    options = parser.parse_args()
    base = DemoBase(options.base.absolute())
    if base.missing is not None:
        sys.exit(f"--base {options.base}: {base.missing} does not exist; give a demo run whose fine-tuning is done")
    with tempfile.TemporaryDirectory() as directory:
        settings = [
            f"trainer.runs_dir={directory}", "trainer.experiment_name=alternating", "trainer.val_before_train=false",
            f"trainer.total_steps={2 * options.pairs + 2}", "trainer.test_freq=0", "trainer.save_freq=0",
            "trainer.at_end=[]", "data.max_val_samples=4",
            "demo.enable=false", "algorithm.dynamic_sampling.enable=false",
            f"rollout.agent={ROOT}/{options.agent}", *base.data_overrides, *base.model_overrides,
        ]  # fmt: skip
        config = load_config(ROOT / "configs" / "demo_cpu.yaml", settings)
        setattr(deployment, "RolloutManager", AlternatingManager)  # noqa: B010
        with LeaveRequest() as leave:
            train(config, Console(stderr=True), leave)
        report(config.trainer.run_dir)


if __name__ == "__main__":
    main()
