"""From prompts to trajectories to train on: rollout, reward, dynamic and adaptive sampling."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_retool.algorithms.dynamic_sampling import GroupFilter, RefillDecision, decide_refill, filter_groups
from megatron_retool.monitor.metrics import StepTimer
from megatron_retool.monitor.progress import ProgressLine, progress_line
from megatron_retool.trainer_state import TrainerState
from megatron_retool.trajectory import Trajectory, read_trajectories

if TYPE_CHECKING:
    from megatron_retool.cluster.deployment import Deployment


@dataclass
class Collected:
    """A step's trajectories: ``kept`` are trained on (whole groups, in order of group), ``generated`` is everything."""

    kept: list[Trajectory]
    generated: list[Trajectory]
    metrics: dict[str, float] = field(default_factory=dict)


async def collect_groups(run: Deployment, state: TrainerState, timer: StepTimer) -> Collected:
    """Generate until train_batch_size informative groups are there, or max_generation_rounds are spent (DAPO, 3.2).

    Raises:
        RuntimeError: no group at all is informative.
    """
    config, step = run.config, state.step
    wanted, dynamic = config.data.train_batch_size, config.algorithm.dynamic_sampling
    groups: list[list[Trajectory]] = []
    decision = RefillDecision("generate", wanted, False)
    rounds = 0
    before = asdict(run.rollout.statistics)
    with progress_line(run.console, f"step {step} rollout", 0) as progress:
        while decision.action == "generate":
            rounds += 1
            progress.note(f"round {rounds}, {len(groups)} groups so far")
            groups += await generate_round(run, decision.groups, state, timer, progress)
            found = filter_step(groups, dynamic.metric)
            kept = found.kept_groups if dynamic.enable else [group[0].group_id for group in groups]
            decision = decide_refill(
                len(kept), len(groups), wanted, rounds, dynamic.max_generation_rounds if dynamic.enable else 1
            )
    if decision.action == "skip":
        raise RuntimeError(
            f"step {step}: all {len(groups)} groups of {rounds} rounds have equal rewards, so there is nothing to "
            "learn from; raise algorithm.dynamic_sampling.max_generation_rounds or choose prompts of another difficulty"
        )
    chosen = set(kept[: decision.groups])
    for group in groups:
        for trajectory in group:
            trajectory.reward_info["trained"] = trajectory.group_id in chosen
        state.record_accuracy(str(group[0].extra_info.get("uid")), sum(map(accuracy, group)) / len(group))
    generated = [trajectory for group in groups for trajectory in group]
    return Collected(
        kept=[trajectory for trajectory in generated if trajectory.reward_info["trained"]],
        generated=generated,
        metrics={
            **found.metrics(),
            "dynamic_sampling/rounds": float(rounds),
            "dynamic_sampling/responses_per_group": len(generated) / len(groups),
            **statistics_since(before, asdict(run.rollout.statistics)),
            **run.rewards.take_metrics(),
        },
    )


def statistics_since(before: dict[str, int], after: dict[str, int]) -> dict[str, float]:
    """What engines and router did in one step: rollout/* counts, and the share of prompt tokens found in a cache."""
    counts = {f"rollout/{name}": float(after[name] - before[name]) for name in after}
    prompt_tokens = counts["rollout/prompt_tokens"]
    if prompt_tokens:
        counts["rollout/cache_hit_rate"] = counts["rollout/cached_tokens"] / prompt_tokens
    return counts


async def generate_round(
    run: Deployment, count: int, state: TrainerState, timer: StepTimer, progress: ProgressLine
) -> list[list[Trajectory]]:
    """``count`` new prompts, sampled and scored; groups in order of group id. Scoring overlaps generation."""
    config = run.config
    if config.rollout.replay_dir is not None:
        return replay_groups(run, count, state.step)
    prompts = run.prompts.next_batch(count)
    sizes = state.group_sizes(prompts)
    progress.extend(sum(sizes.values()))
    groups = []
    async for group in run.rollout.stream(prompts, config.rollout.train, group_sizes=sizes):
        with timer.phase("reward"):
            await asyncio.to_thread(run.rewards.score, group)
        groups.append(group)
        progress.advance(len(group))
    return sorted(groups, key=lambda group: group[0].group_id)


def replay_groups(run: Deployment, count: int, step: int) -> list[list[Trajectory]]:
    """The groups that an earlier run stored for this step, instead of generating (rollout.replay_dir).

    The data position moves on as if they had been generated.

    Raises:
        ValueError: the stored prompts are not those that this step would have drawn.
    """
    file = Path(run.config.rollout.replay_dir or "") / f"step_{step:06d}.parquet"
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in read_trajectories(file):
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    prompts = run.prompts.next_batch(len(groups))
    for prompt, group in zip(prompts, groups.values(), strict=True):
        if list(prompt.prompt_ids) != group[0].prompt_ids.tolist():
            raise ValueError(f"{file}: group {group[0].group_id} has another prompt than the data give at step {step}")
    return list(groups.values())


def filter_step(groups: list[list[Trajectory]], metric: str) -> GroupFilter:
    rows = [trajectory for group in groups for trajectory in group]
    accuracies = [accuracy(t) for t in rows]
    values = accuracies if metric == "acc" else [t.reward for t in rows]
    return filter_groups([t.group_id for t in rows], values, accuracies)


def accuracy(trajectory: Trajectory) -> float:
    """The reward function's acc in [0, 1]; without one, whether the reward is positive."""
    return float(trajectory.reward_info.get("acc", trajectory.reward > 0))
