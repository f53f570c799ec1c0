"""From prompts to trajectories to train on: rollout, reward, dynamic and adaptive sampling."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_retool.algorithms.dynamic_sampling import GroupFilter, filter_groups
from megatron_retool.algorithms.refill import KeepRate, Refill
from megatron_retool.config import AlgorithmConfig
from megatron_retool.data.prompts import PromptRow, PromptSource
from megatron_retool.errors import InputError
from megatron_retool.loop.state import TrainerState
from megatron_retool.rollout_rows import AGENT_KEY, rollouts_of
from megatron_retool.runs.progress import progress_line
from megatron_retool.runs.step_timer import StepTimer
from megatron_retool.trajectory import Trajectory, read_trajectories
from run_files.phases import Phase
from run_files.steps import step_path
from sglang_rollout.agent.paused_groups import PausedGroup
from sglang_rollout.groups import Changes

if TYPE_CHECKING:
    from megatron_retool.cluster.deployment import Deployment


@dataclass(frozen=True)
class Leftover:
    """What a step's generation leaves to the next one.

    Attributes:
        keep_rate: how many groups carried a signal.
        groups: complete ones beyond the batch that the next step may train on, by id and in order
            (algorithm.dynamic_sampling.surplus).
        before_last: prompts given back that were drawn before the last of those.
        aborted: groups that were started and are not complete.
    """

    keep_rate: KeepRate
    groups: dict[int, list[Trajectory]] = field(default_factory=dict)
    before_last: int = 0
    aborted: Collection[int] = ()


@dataclass
class Collected:
    """A step's trajectories: ``kept`` are trained on (whole groups, in order of group), ``generated`` is what they were
    taken from: every group up to the last of those. What was complete beyond is none of them."""

    kept: list[Trajectory]
    generated: list[Trajectory]
    prompt_state: dict[str, Any]
    """Where the prompts stand after this step; a later step may already have drawn more of them."""
    paused: list[PausedGroup] = field(default_factory=list)
    """What partial rollout left unfinished after this step, before a later one continues it."""
    buffered: list[Trajectory] = field(default_factory=list)
    """Complete groups that an asynchronous run holds at a checkpoint: those that wait, and those without a signal that
    no step has stored yet."""
    buffered_versions: dict[int, int] = field(default_factory=dict)
    """Of those that wait, the version of the engines' weights at their start, by group id, oldest first."""
    metrics: dict[str, float] = field(default_factory=dict)
    accuracies: list[tuple[str, float]] = field(default_factory=list)
    """The prompt's uid and the mean accuracy of each generated group."""
    leftover: Leftover = field(default_factory=lambda: Leftover(KeepRate()))


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
        self._leftover: Leftover | None = None

    async def take(self, step: int) -> Collected:
        """The trajectories of ``step``; from here on the following steps may be generated."""
        collected = await self._started(step)
        del self._tasks[step]
        # Here and not where groups are generated: a checkpoint must not know of steps that it has not trained.
        for uid, mean_accuracy in collected.accuracies:
            self._state.record_accuracy(uid, mean_accuracy)
        self._state.keep_rate = collected.leftover.keep_rate
        self._leftover = collected.leftover
        for ahead in range(step + 1, min(step + self._run.config.rollout.staleness, self._run.total_steps) + 1):
            self._started(ahead)
        return collected

    def weights_arrived(self) -> None:
        """Nothing: what is generated ahead does not depend on it."""

    def at_checkpoint(self, collected: Collected) -> Collected:
        """``collected``, which knows already all that a checkpoint keeps."""
        return collected

    def _started(self, step: int) -> asyncio.Task[Collected]:
        if step not in self._tasks:
            collecting = collect_groups(self._run, self._state, step, self._tasks.get(step - 1), self._leftover)
            self._tasks[step] = asyncio.create_task(collecting)
        return self._tasks[step]

    async def __aenter__(self) -> Experience:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


async def collect_groups(
    run: Deployment,
    state: TrainerState,
    step: int,
    after: asyncio.Task[Collected] | None = None,
    leftover: Leftover | None = None,
) -> Collected:
    """Generate until the first train_batch_size informative groups, in order, are known, or max_generation_batches are
    spent (DAPO, 3.2).

    Nothing is kept where not one group is informative. It begins when ``after`` has ended, with what that left, or with
    ``leftover``. Prompts of groups that were started in vain are given back: the next step draws them first.
    """
    if after is not None:
        leftover = (await after).leftover
    leftover = leftover or Leftover(state.keep_rate)
    config = run.config
    dynamic, partial = config.algorithm.dynamic_sampling, config.rollout.partial
    wanted = config.data.train_batch_size
    refill = Refill(
        wanted,
        max_groups=(dynamic.max_generation_batches * wanted or None) if dynamic.enable else wanted,
        keep_rate=leftover.keep_rate if dynamic.enable else None,
        certainty=dynamic.certainty,
        over_sampling=partial.over_sampling_factor if partial.enable else 1.0,
        in_order=not partial.enable,
    )
    timer = StepTimer()
    before = asdict(run.rollout.statistics)
    if config.rollout.replay_dir is None:
        complete = await generate_groups(run, refill, leftover, state, step, timer)
    else:
        complete = replay_groups(Path(config.rollout.replay_dir), run.prompts, step)
        refill.start(complete)
        for group_id, group in complete.items():
            refill.decide(group_id, informative(group, config.algorithm))
    groups = [complete[group_id] for group_id in refill.examined]
    chosen = set(refill.batch)
    for group in groups:
        for trajectory in group:
            trajectory.reward_info["trained"] = trajectory.group_id in chosen
    generated = [trajectory for group in groups for trajectory in group]
    paused = run.rollout.finish_step()
    left = leave(run, refill, leftover, complete)
    return Collected(
        kept=[trajectory for trajectory in generated if trajectory.reward_info["trained"]],
        generated=generated,
        metrics={
            **generation_metrics(run, groups, before, timer),
            "dynamic_sampling/keep_rate": left.keep_rate.share,
            "dynamic_sampling/surplus_groups": float(len(refill.surplus)),
            "dynamic_sampling/aborted_groups": float(len(left.aborted)),
        },
        prompt_state=run.prompts.state_dict([*(group.group_id for group in paused), *left.groups]),
        paused=paused,
        accuracies=[(str(g[0].extra_info.get("uid")), mean_accuracy(g)) for g in groups],
        leftover=left,
    )


def leave(run: Deployment, refill: Refill, leftover: Leftover, complete: dict[int, list[Trajectory]]) -> Leftover:
    """What the next step continues; prompts of the rest are given back.

    Args:
        leftover: what this step continued; what it left over again is too old.
    """
    config = run.config
    keep_rate = refill.keep_rate_after()
    if config.rollout.replay_dir is not None:
        return Leftover(keep_rate)
    surplus = refill.surplus
    carries = config.algorithm.dynamic_sampling.surplus == "next_step"
    carried = [group_id for group_id in surplus if carries and group_id not in leftover.groups]
    aborted = [] if config.rollout.partial.enable else refill.given_up + refill.under_way
    again = {*aborted, *surplus}.difference(carried)
    run.prompts.give_back(sorted(again))
    before_last = sum(group_id < carried[-1] for group_id in again) if carried else 0
    return Leftover(keep_rate, {group_id: complete[group_id] for group_id in carried}, before_last, aborted)


def generation_metrics(
    run: Deployment, groups: list[list[Trajectory]], before: dict[str, int], timer: StepTimer
) -> dict[str, float]:
    """What a step's groups were and cost.

    Args:
        groups: all that were examined for the step.
        before: the rollout's statistics when the step's generation began.
        timer: of rewards.
    """
    rollouts = sum(len(rollouts_of(group)) for group in groups)
    return {
        **filter_step(groups, run.config.algorithm.dynamic_sampling.metric).metrics(),
        "dynamic_sampling/responses_per_group": rollouts / max(1, len(groups)),
        **statistics_since(before, asdict(run.rollout.statistics)),
        "rollout/engines": float(len(run.rollout.engines.serving)),
        **run.rewards.take_metrics(),
        **run.tools.take_metrics(),
        **timer.metrics(),
    }


def statistics_since(before: dict[str, int], after: dict[str, int]) -> dict[str, float]:
    """What engines and router did in one step: rollout/* counts, and the share of prompt tokens found in a cache."""
    counts = {f"rollout/{name}": float(after[name] - before[name]) for name in after}
    prompt_tokens = counts["rollout/prompt_tokens"]
    if prompt_tokens:
        counts["rollout/cache_hit_rate"] = counts["rollout/cached_tokens"] / prompt_tokens
    return counts


async def generate_groups(
    run: Deployment, refill: Refill, leftover: Leftover, state: TrainerState, step: int, timer: StepTimer
) -> dict[int, list[Trajectory]]:
    """Complete groups by id, sampled and scored, until ``refill`` is certain of the batch. Scoring overlaps generation.

    A group without a signal is replaced at once, and one that cannot be in the batch any more is aborted. With
    rollout.partial.enable what an earlier step left unfinished continues first, and what this one leaves is paused: one
    long response does not hold the step.
    """
    config = run.config
    # What lies between carried groups is started again, so that all are in the order that they were drawn in.
    first = run.prompts.next_batch(leftover.before_last)
    refill.start(sorted([*run.rollout.paused_group_ids, *leftover.groups, *(prompt.group_id for prompt in first)]))
    complete = dict(leftover.groups)
    for group_id, group in complete.items():
        refill.decide(group_id, informative(group, config.algorithm))
    with progress_line(run.console, f"step {step} rollout", 0) as progress:

        def changes(prompts: list[PromptRow]) -> Changes:
            more = run.prompts.next_batch(refill.to_start)
            refill.start(prompt.group_id for prompt in more)
            sizes = state.group_sizes([*prompts, *more], step)
            progress.extend(sum(sizes.values()))
            progress.note(f"{len(refill.batch)} of {refill.wanted} groups with a signal")
            return Changes([*prompts, *more], sizes, refill.give_up())

        start = changes(first)
        # Carried groups may make some of those needless before they begin.
        needed = [prompt for prompt in start.prompts if prompt.group_id not in start.abort]
        stream = run.rollout.stream(needed, config.rollout.train, group_sizes=start.group_sizes)
        async with contextlib.aclosing(stream):
            further = None
            while not refill.certain:
                group = await stream.asend(further)
                with timer.phase(Phase.REWARD):
                    await asyncio.to_thread(run.rewards.score, group)
                group_id = group[0].group_id
                complete[group_id] = group
                refill.decide(group_id, informative(group, config.algorithm))
                further = changes([])
                progress.advance(len(rollouts_of(group)))
                run.watchdog.progress(Phase.GENERATION)
    return complete


def replay_groups(folder: Path, prompts: PromptSource, step: int) -> dict[int, list[Trajectory]]:
    """The groups that an earlier run stored in ``folder`` (rollout.replay_dir) for this step, by id and in their order.

    The data position moves on as if they had been generated.

    Raises:
        InputError: the stored prompts are not those that this step would have drawn.
    """
    file, groups = stored_groups(folder, step)
    for prompt, group in zip(prompts.next_batch(len(groups)), groups.values(), strict=True):
        check_stored_prompt(file, prompt, group, step)
    return groups


def stored_groups(folder: Path, step: int) -> tuple[Path, dict[int, list[Trajectory]]]:
    """The file of a step in a folder of rollouts, and its groups by id, in their order."""
    file = step_path(folder, step)
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in read_trajectories(file):
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    return file, groups


def check_stored_prompt(file: Path, prompt: PromptRow, group: list[Trajectory], step: int) -> None:
    """Raise InputError where a stored group has another prompt than the data give."""
    stored = group[0]
    # An agent of one's own writes prompts itself: its rows name the data's row.
    if AGENT_KEY in stored.reward_info:
        same = stored.extra_info.get("uid") == prompt.uid
    else:
        same = list(prompt.prompt_ids) == stored.prompt_ids.tolist()
    if not same:
        raise InputError(
            f"{file}: group {stored.group_id} has another prompt than the data give at step {step}: rollout.replay_dir "
            "needs the data, tokenizer, trainer.seed and trainer.mode of the run that it belongs to"
        )


def informative(group: list[Trajectory], algorithm: AlgorithmConfig) -> bool:
    """Whether the group may be trained on: it has a signal, or dynamic sampling is off."""
    dynamic = algorithm.dynamic_sampling
    return not dynamic.enable or bool(filter_step([group], dynamic.metric).kept_groups)


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
