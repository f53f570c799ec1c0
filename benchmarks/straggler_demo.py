"""The answers to a long tail side by side on the demo, some of whose responses are made long.

    bash scripts/train_dapo_megatron.sh  # the base: its data and fine-tuned model
    python benchmarks/straggler_demo.py --base runs/demo                  # groups with no signal are trained on too
    python benchmarks/straggler_demo.py --base runs/demo --refill         # and where they are replaced

A response that is drawn to be long, by its prompt and its place in the group and hence the same one in every mode, is
told to continue whenever it would end, until it has --tail-tokens. Every mode is a run of --steps steps from the same
model and prompts; figures are means over all steps but the first two. Ratios are against the plain mode of the same
invocation: every group is waited for (with --refill: continuous refill in the order of the data), and training and
generation take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_retool.runs.demo_base import DemoBase
from megatron_retool.runs.metrics_file import read_metrics
from megatron_retool.trajectory import FinishReason
from sglang_rollout.agent.loop import AgentLoop, AgentSetup, Generate
from sglang_rollout.agent.trajectory_state import TrajectoryState

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 2
"""Steps: what partial rollout carries over, and what staleness generates ahead, is there from then on."""
GO_ON = "Go on."


class LongTail(AgentLoop):
    """The agent of tool calls, which tells some responses to continue when they would end.

    Args:
        share: of the responses that are long.
        tokens: that a long one has at least, unless the length limit ends it before.
        seed: of the draw.
    """

    def __init__(self, setup: AgentSetup, *, share: float, tokens: int, seed: int = 0) -> None:
        super().__init__(setup)
        self._share, self._tokens, self._seed = share, tokens, seed
        self._go_on = self.glue.render([GO_ON]).ids

    def is_long(self, group_id: int, index: int) -> bool:
        return bool(np.random.default_rng([self._seed, group_id, index]).random() < self._share)

    async def sample_turn(self, state: TrajectoryState, generate: Generate, deadline: float) -> bool:
        rests = await super().sample_turn(state, generate, deadline)
        self._lengthen(state)
        return rests

    def _lengthen(self, state: TrajectoryState) -> None:
        would_end = state.finish_reason in (FinishReason.STOP, FinishReason.TOOL_LIMIT)
        if not would_end or len(state.response_ids) >= self._tokens or not self.is_long(state.group_id, state.index):
            return
        room = self.remaining(state)
        state.append_unsampled(self._go_on[: max(room, 0)])
        if len(self._go_on) >= room:
            state.finish_reason = FinishReason.LENGTH
            return
        state.finish_reason = None
        state.turn += 1
        state.turn_start = len(state.response_ids)


def modes(over_sampling: float, max_age: int, refill: bool) -> dict[str, tuple[str, ...]]:
    """Settings by name; the first is what the others are held against."""
    partial = ("rollout.partial.enable=true", f"rollout.partial.max_age={max_age}")
    factor, off = "rollout.partial.over_sampling_factor", "rollout.staleness=1"
    more = f"{factor}={over_sampling}"
    result = {
        "plain": (),
        "partial rollout": (*partial, f"{factor}=1"),
        "partial rollout, over-sampling": (*partial, more),
        "1 step off": (off,),
        "partial rollout, over-sampling, 1 step off": (*partial, more, off),
    }
    if not refill:  # as many groups are started as are needed: there is none to pause
        del result["partial rollout"]
    return result


def settings_of(options: argparse.Namespace, directory: Path, name: str, mode: Sequence[str]) -> list[str]:
    """Overrides of a run of one mode, its base left out."""
    tail = {"share": options.share, "tokens": options.tail_tokens}
    return [
        f"trainer.runs_dir={directory}", f"trainer.experiment_name={name}", f"trainer.total_steps={options.steps}",
        "trainer.val_before_train=false", "trainer.test_freq=0", "trainer.save_freq=0", "trainer.at_end=[]",
        "data.max_val_samples=4", "demo.enable=false", f"data.max_response_length={options.tail_tokens + 32}",
        f"rollout.engine.context_length={options.tail_tokens + 160}",
        f"rollout.agent={Path(__file__).resolve()}:{LongTail.__name__}", f"rollout.agent_kwargs={json.dumps(tail)}",
        f"algorithm.dynamic_sampling.enable={str(options.refill).lower()}", *mode,
    ]  # fmt: skip


def run(base: DemoBase, config: Path, settings: Sequence[str]) -> None:
    command = [sys.executable, "-m", "megatron_retool", "train", "--config", str(config), *settings]
    command += [*base.data_overrides, *base.model_overrides]
    subprocess.run(command, cwd=ROOT, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


FIGURES: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "step": lambda row: row["timing_s/step"],
    "generation": lambda row: row["timing_s/gen"],
    "tokens": lambda row: row["perf/total_num_tokens"],
    "length": lambda row: row["response_length/mean"],
    "steps old": lambda row: row.get("rollout_corr/staleness/mean", 0.0),
    "dropped": lambda row: row["rollout/dropped_trajectories"],
}


def figures_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over the steps after ``WARM_UP``; of metrics.jsonl's rows."""
    counted = [row for row in rows if row["step"] > WARM_UP]
    return {name: statistics.fmean(figure(row) for row in counted) for name, figure in FIGURES.items()}


def table(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Lines of a table in Markdown; the first of ``found`` is the plain mode."""
    plain = next(iter(found.values()))
    lines = [
        "| mode | generation | step | against plain | trained tokens/s | mean length trained | steps old | dropped |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, each in found.items():
        tokens = each["tokens"] / each["step"] / (plain["tokens"] / plain["step"])
        lines.append(
            f"| {name} | {each['generation']:.1f} s | {each['step']:.1f} s | {plain['step'] / each['step']:.2f} x | "
            f"{tokens:.2f} x | {each['length']:.0f} | {each['steps old']:.2f} | {each['dropped']:.1f} |"
        )
    return lines


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="a demo run whose fine-tuning is done")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "demo_cpu.yaml", help="that it was made with")
    parser.add_argument("--refill", action="store_true", help="dynamic sampling: replace groups without a signal")
    parser.add_argument("--share", type=float, default=0.02, help="of the responses that are made long")
    parser.add_argument("--tail-tokens", type=int, default=480, help="of a long response; the others have about 70")
    parser.add_argument("--over-sampling", type=float, default=1.25, help="groups in flight for each that is needed")
    parser.add_argument("--max-age", type=int, default=2, help="steps that a paused group may wait")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args(arguments)
    if options.steps <= WARM_UP:
        parser.error(f"--steps {options.steps}: the first {WARM_UP} do not count")
    return options


def main() -> None:
    options = parse()
    base = DemoBase(options.base.absolute())
    if base.missing is not None:
        sys.exit(f"--base {options.base}: {base.missing} does not exist; give a demo run whose fine-tuning is done")
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, mode) in enumerate(modes(options.over_sampling, options.max_age, options.refill).items()):
            settings = settings_of(options, Path(folder), f"mode_{number}", mode)
            run(base, options.config.absolute(), settings)
            result[name] = figures_of(list(read_metrics(Path(folder) / f"mode_{number}" / "metrics.jsonl")))
            print(f"{name}: a step of {result[name]['step']:.1f} s", file=sys.stderr, flush=True)
    print("\n".join(table(result)))


if __name__ == "__main__":
    main()
