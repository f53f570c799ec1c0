"""From prompts to trajectories to train on: rollout, reward, dynamic and adaptive sampling."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_retool.algorithms.dynamic_sampling import GroupFilter, RefillDecision, decide_refill, filter_groups
from megatron_retool.loop.rollout_files import step_path
from megatron_retool.loop.state import TrainerState
from megatron_retool.monitor.metrics import StepTimer
from megatron_retool.monitor.phases import Phase
from megatron_retool.monitor.progress import ProgressLine, progress_line
from megatron_retool.rollout_rows import AGENT_KEY, rollouts_of
from megatron_retool.trajectory import Trajectory, read_trajectories
from sglang_rollout.agent.paused_groups import PausedGroup

if TYPE_CHECKING:
    from megatron_retool.cluster.deployment import Deployment


@dataclass
class Collected:
    """A step's trajectories: ``kept`` are trained on (whole groups, in order of group), ``generated`` is everything."""

    kept: list[Trajectory]
    generated: list[Trajectory]
    prompt_state: dict[str, Any]
    """Where the prompts stand after this step; a later step may already have drawn more of them."""
    paused: list[PausedGroup] = field(default_factory=list)
    """What partial rollout left unfinished after this step, before a later one goes on with it."""
    metrics: dict[str, float] = field(default_factory=dict)
    accuracies: list[tuple[str, float]] = field(default_factory=list)
    """The prompt's uid and the mean accuracy of each generated group."""


class Experience:
    """Hands out each step's trajectories, and generates up to ``rollout.staleness`` steps ahead of training.

    Steps are generated strictly one after another, so the prompts of a step do not depend on timing. With staleness s
    the tokens of step k come from weight versions k-1-s to k-1; each token carries its version, and the rollout
    correction weighs the difference. With staleness 0 nothing runs ahead: training is strictly on-policy.
    """

    def __init__(self, run: Deployment, state: TrainerState) -> None:
        self._run = run
        self._state = state
        self._tasks: dict[int, asyncio.Task[Collected]] = {}

    async def take(self, step: int) -> Collected:
        """The trajectories of ``step``; from here on the following steps may be generated."""
        collected = await self._started(step)
        del self._tasks[step]
        # Here and not where groups are generated: a checkpoint must not know of steps that it has not trained.
        for uid, mean_accuracy in collected.accuracies:
            self._state.record_accuracy(uid, mean_accuracy)
        for ahead in range(step + 1, min(step + self._run.config.rollout.staleness, self._run.total_steps) + 1):
            self._started(ahead)
        return collected

    def _started(self, step: int) -> asyncio.Task[Collected]:
        if step not in self._tasks:
            collecting = collect_groups(self._run, self._state, step, after=self._tasks.get(step - 1))
            self._tasks[step] = asyncio.create_task(collecting)
        return self._tasks[step]

    async def __aenter__(self) -> Experience:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


async def collect_groups(
    run: Deployment, state: TrainerState, step: int, after: asyncio.Task[Collected] | None = None
) -> Collected:
    """Generate until train_batch_size informative groups are there, or max_generation_rounds are spent (DAPO, 3.2).

    Nothing is kept where not one group is informative. It begins when ``after`` has ended.
    """
    if after is not None:
        await after
    config = run.config
    wanted, dynamic = config.data.train_batch_size, config.algorithm.dynamic_sampling
    groups: list[list[Trajectory]] = []
    decision = RefillDecision("generate", wanted, False)
    rounds = 0
    timer = StepTimer()
    before = asdict(run.rollout.statistics)
    with progress_line(run.console, f"step {step} rollout", 0) as progress:
        while decision.action == "generate":
            rounds += 1
            progress.note(f"round {rounds}, {len(groups)} groups so far")
            groups += await generate_round(run, decision.groups, state, step, timer, progress)
            found = filter_step(groups, dynamic.metric)
            kept = found.kept_groups if dynamic.enable else [group[0].group_id for group in groups]
            decision = decide_refill(
                len(kept), len(groups), wanted, rounds, dynamic.max_generation_rounds if dynamic.enable else 1
            )
    chosen = set(kept[: decision.groups])
    for group in groups:
        for trajectory in group:
            trajectory.reward_info["trained"] = trajectory.group_id in chosen
    generated = [trajectory for group in groups for trajectory in group]
    paused = run.rollout.finish_step()
    return Collected(
        kept=[trajectory for trajectory in generated if trajectory.reward_info["trained"]],
        generated=generated,
        metrics={
            **found.metrics(),
            "dynamic_sampling/rounds": float(rounds),
            "dynamic_sampling/responses_per_group": len(rollouts_of(generated)) / len(groups),
            **statistics_since(before, asdict(run.rollout.statistics)),
            **run.rewards.take_metrics(),
            **run.tools.take_metrics(),
            **timer.metrics(),
        },
        prompt_state=run.prompts.state_dict([group.group_id for group in paused]),
        paused=paused,
        accuracies=[(str(g[0].extra_info.get("uid")), mean_accuracy(g)) for g in groups],
    )


def statistics_since(before: dict[str, int], after: dict[str, int]) -> dict[str, float]:
    """What engines and router did in one step: rollout/* counts, and the share of prompt tokens found in a cache."""
    counts = {f"rollout/{name}": float(after[name] - before[name]) for name in after}
    prompt_tokens = counts["rollout/prompt_tokens"]
    if prompt_tokens:
        counts["rollout/cache_hit_rate"] = counts["rollout/cached_tokens"] / prompt_tokens
    return counts


async def generate_round(
    run: Deployment, count: int, state: TrainerState, step: int, timer: StepTimer, progress: ProgressLine
) -> list[list[Trajectory]]:
    """``count`` groups, sampled and scored, in order of group id. Scoring overlaps generation.

    With rollout.partial.enable more groups are started than needed (those that an earlier step left unfinished first)
    and the slowest are paused once ``count`` are complete: one long response does not hold the step.
    """
    config = run.config
    if config.rollout.replay_dir is not None:
        return replay_groups(run, count, step)
    partial = config.rollout.partial
    start = math.ceil(count * partial.over_sampling_factor) - run.rollout.paused_groups if partial.enable else count
    prompts = run.prompts.next_batch(max(start, 0))
    sizes = state.group_sizes(prompts, step)
    progress.extend(sum(sizes.values()))
    groups: list[list[Trajectory]] = []
    async with contextlib.aclosing(run.rollout.stream(prompts, config.rollout.train, group_sizes=sizes)) as stream:
        async for group in stream:
            with timer.phase(Phase.REWARD):
                await asyncio.to_thread(run.rewards.score, group)
            groups.append(group)
            progress.advance(len(rollouts_of(group)))
            run.watchdog.progress(Phase.GENERATION)
            if partial.enable and len(groups) == count:
                break
    return sorted(groups, key=lambda group: group[0].group_id)


def replay_groups(run: Deployment, count: int, step: int) -> list[list[Trajectory]]:
    """The groups that an earlier run stored for this step, instead of generating (rollout.replay_dir).

    The data position moves on as if they had been generated.

    Raises:
        ValueError: the stored prompts are not those that this step would have drawn.
    """
    file = step_path(Path(run.config.rollout.replay_dir or ""), step)
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in read_trajectories(file):
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    prompts = run.prompts.next_batch(len(groups))
    for prompt, group in zip(prompts, groups.values(), strict=True):
        # An agent of one's own writes prompts itself: its rows name the data's row.
        stored = group[0]
        if AGENT_KEY in stored.reward_info:
            same = stored.extra_info.get("uid") == prompt.uid
        else:
            same = list(prompt.prompt_ids) == stored.prompt_ids.tolist()
        if not same:
            raise ValueError(
                f"{file}: group {group[0].group_id} has another prompt than the data give at step {step}: "
                "rollout.replay_dir needs the data, tokenizer and trainer.seed of the run that it belongs to"
            )
    return list(groups.values())


def mean_accuracy(group: list[Trajectory]) -> float:
    """Over the rollouts of a group."""
    accuracies = [rollout[0].accuracy for rollout in rollouts_of(group)]
    return sum(accuracies) / len(accuracies)


def filter_step(groups: list[list[Trajectory]], metric: str) -> GroupFilter:
    """Which groups carry a signal; a rollout counts once, whatever its number of rows."""
    rows = [rollout[0] for group in groups for rollout in rollouts_of(group)]
    accuracies = [t.accuracy for t in rows]
    values = accuracies if metric == "acc" else [t.reward for t in rows]
    return filter_groups([t.group_id for t in rows], values, accuracies)
