"""Asynchronous training: engines and learner have clocks of their own, with a buffer of groups between them.

Engines generate without a pause. New weights reach them while requests are in flight: an engine holds its requests,
takes the weights, and continues them, so that the tokens of one response may come from several versions; each token
carries its own. A step takes groups that are complete, and no token that is trained on is more than
``trainer.max_age`` updates old (``algorithms/group_buffer.py`` has the rules). A group starts when engines have places
for it: one that waited for a place would only be older. What each step took lies in rollouts/, from where a later run
can train on the same groups in the same order (``rollout.replay_dir``).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from megatron_retool.algorithms.group_buffer import GroupBuffer
from megatron_retool.algorithms.refill import groups_for
from megatron_retool.errors import InputError
from megatron_retool.loop.experience import (
    Collected,
    Experience,
    check_stored_prompt,
    generation_metrics,
    informative,
    mean_accuracy,
    stored_groups,
)
from megatron_retool.loop.state import TrainerState
from megatron_retool.runs.checkpoints import Checkpoint
from megatron_retool.runs.step_timer import StepTimer
from megatron_retool.trajectory import Trajectory, read_trajectories
from run_files.phases import Phase
from sglang_rollout.groups import Changes
from sglang_rollout.rollout_manager import Inbox

if TYPE_CHECKING:
    from megatron_retool.cluster.deployment import Deployment
    from megatron_retool.data.prompts import PromptRow


MAX_OPEN_PROMPTS = 100_000
"""Prompts that a recorded order may leave for later steps: many times what a buffer holds."""


class StepSource(Protocol):
    """Where the loop gets each step's trajectories from. An asynchronous context manager."""

    async def __aenter__(self) -> StepSource: ...
    async def __aexit__(self, *_: object) -> None: ...

    async def take(self, step: int) -> Collected:
        """The trajectories of ``step``; steps are taken in order."""
        ...

    def weights_arrived(self) -> None:
        """The engines have the weights of the step that was taken last."""

    def at_checkpoint(self, collected: Collected) -> Collected:
        """``collected`` of the present step, with all that a checkpoint has to keep now."""
        ...


def step_source(run: Deployment, state: TrainerState, resumed: Checkpoint | None) -> StepSource:
    """What ``trainer.mode`` asks for.

    Args:
        resumed: the checkpoint that ``state`` was read from.
    """
    if run.config.trainer.mode == "sync":
        return Experience(run, state)
    if run.config.rollout.replay_dir is not None:
        return RecordedExperience(run, state)
    return AsyncExperience(run, state, resumed)


class AsyncExperience:
    """Generates all the time and hands out what is complete.

    Args:
        resumed: its buffered groups are trained first.

    Raises:
        UnreadableFile, DataError: the checkpoint's buffered groups are damaged, or are not those of its data position.
    """

    def __init__(self, run: Deployment, state: TrainerState, resumed: Checkpoint | None = None) -> None:
        config = run.config
        self._run = run
        self._state = state
        self._buffer = GroupBuffer(config.data.train_batch_size, config.trainer.max_age, state.step)
        self._complete: dict[int, list[Trajectory]] = {}
        """Groups that wait in the buffer, by id."""
        self._dropped: list[list[Trajectory]] = []
        """Groups without a signal that ended since the last step was taken."""
        self._kept = 0
        """Groups with a signal that ended since then."""
        self._inbox: Inbox = asyncio.Queue()
        self._changed = asyncio.Event()
        self._filling: asyncio.Task[None] | None = None
        self._before = asdict(run.rollout.statistics)
        self._timer = StepTimer()
        if resumed is not None and resumed.buffered_groups.exists():
            self._restore(resumed)

    def _restore(self, resumed: Checkpoint) -> None:
        groups: dict[int, list[Trajectory]] = {}
        for trajectory in read_trajectories(resumed.buffered_groups):
            groups.setdefault(trajectory.group_id, []).append(trajectory)
        stored = resumed.read("trainer_state.json").get("buffered_versions", {})
        versions = {int(group_id): int(version) for group_id, version in stored.items()}
        if not versions.keys() <= groups.keys():
            raise InputError(f"{resumed.buffered_groups} lacks groups that trainer_state.json names: it is damaged")
        left_out = set(self._buffer.restore(versions))  # their prompts are drawn again
        self._complete = {group_id: groups[group_id] for group_id in versions if group_id not in left_out}
        self._dropped = [group for group_id, group in groups.items() if group_id not in versions]
        self._kept = len(self._complete)
        self._run.prompts.take_unfinished([group_id for group_id in groups if group_id not in left_out])

    async def __aenter__(self) -> AsyncExperience:
        self._filling = asyncio.create_task(self._fill())
        self._start_groups()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)

    async def take(self, step: int) -> Collected:
        """The groups that have waited longest, once there is a batch of them and none that is under way would come too
        late."""
        waited = StepTimer()
        with waited.phase(Phase.STEP):
            while True:
                self._start_groups()
                chosen = self._buffer.take(full=not self._examined_enough)
                if chosen is not None:
                    break
                await self._next_change()
        self._start_groups()
        return self._collected(step, chosen, waited.seconds[Phase.STEP])

    def weights_arrived(self) -> None:
        """Start groups in the slots that newer weights allow."""
        self._start_groups()

    def at_checkpoint(self, collected: Collected) -> Collected:
        """``collected`` with the buffer as it is now: complete groups, and all open prompts."""
        held = [*self._dropped, *self._complete.values()]
        ids = [*self._buffer.generating, *(group[0].group_id for group in held)]
        versions = self._buffer.versions
        return dataclasses.replace(
            collected,
            prompt_state=self._run.prompts.state_dict(ids),
            buffered=[trajectory for group in held for trajectory in group],
            buffered_versions={group_id: versions[group_id] for group_id in versions if group_id in self._complete},
        )

    async def _fill(self) -> None:
        run = self._run
        stream = run.rollout.stream([], run.config.rollout.train, inbox=self._inbox, on_end=self._start_groups)
        async with contextlib.aclosing(stream):
            async for group in stream:
                with self._timer.phase(Phase.REWARD):
                    await asyncio.to_thread(run.rewards.score, group)
                group_id, has_signal = group[0].group_id, informative(group, run.config.algorithm)
                self._buffer.finish(group_id, has_signal=has_signal)
                if has_signal:
                    self._complete[group_id] = group
                    self._kept += 1
                else:
                    self._dropped.append(group)
                self._start_groups()
                self._changed.set()
                run.watchdog.progress(Phase.GENERATION)

    def _start_groups(self) -> None:
        run, version = self._run, self._run.weights.version
        count = min(self._buffer.room(version), self._needed(), self._idle_groups())
        if count <= 0:
            return
        prompts = run.prompts.next_batch(count)
        self._buffer.start([prompt.group_id for prompt in prompts], version)
        sizes = self._state.group_sizes(prompts, self._buffer.step + 1)
        self._inbox.put_nowait(Changes(prompts, sizes))

    def _idle_groups(self) -> int:
        """Groups that engines have places for, the last one perhaps not for all of its trajectories; at least one where
        none is under way, since an engine that is restarted will have places."""
        generating, size = self._buffer.generating, self._run.config.rollout.train.n
        places = self._run.rollout.idle_places(generating, size)
        return max(math.ceil(places / size), 0 if generating else 1)

    def _needed(self) -> int:
        """Groups that have to start for the rest of the run to be full, as far as the keep rate tells."""
        config, buffer = self._run.config, self._buffer
        dynamic = config.algorithm.dynamic_sampling
        missing = buffer.batch_groups * (self._run.total_steps - buffer.step) - len(buffer.complete)
        if missing <= 0:
            return 0
        share = self._keep_rate.share if dynamic.enable else 1.0
        return groups_for(missing, share, dynamic.certainty) - len(buffer.generating)

    @property
    def _keep_rate(self) -> Any:
        return self._state.keep_rate.with_groups(self._kept, self._kept + len(self._dropped))

    @property
    def _examined_enough(self) -> bool:
        """As many groups ended since the last step as algorithm.dynamic_sampling.max_generation_batches allows."""
        dynamic = self._run.config.algorithm.dynamic_sampling
        limit = dynamic.max_generation_batches * self._buffer.batch_groups if dynamic.enable else 0
        return bool(limit) and self._kept + len(self._dropped) >= limit

    async def _next_change(self) -> None:
        assert self._filling is not None
        self._changed.clear()
        waiting = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({waiting, self._filling}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._filling.done():
            self._filling.result()  # raises what ended it
            raise RuntimeError("the stream of groups ended by itself")

    def _collected(self, step: int, chosen: list[int], waited: float) -> Collected:
        run, state = self._run, self._state
        taken = [self._complete.pop(group_id) for group_id in chosen]
        groups = sorted([*taken, *self._dropped], key=lambda group: group[0].group_id)
        picked = set(chosen)
        for group in groups:
            for trajectory in group:
                trajectory.reward_info["trained"] = trajectory.group_id in picked
        for group in groups:
            state.record_accuracy(str(group[0].extra_info.get("uid")), mean_accuracy(group))
        state.keep_rate = self._keep_rate.faded()
        self._dropped, self._kept = [], 0
        before, self._before = self._before, asdict(run.rollout.statistics)
        timer, self._timer = self._timer, StepTimer()
        generated = [trajectory for group in groups for trajectory in group]
        kept = [trajectory for trajectory in generated if trajectory.reward_info["trained"]]
        return Collected(
            kept=kept,
            generated=generated,
            metrics={
                **generation_metrics(run, groups, before, timer),
                **age_metrics(kept, step, run.config.trainer.max_age),
                "dynamic_sampling/keep_rate": state.keep_rate.share,
                "async/waited_seconds": waited,
                "async/slots": float(len(self._buffer)),
                "async/buffered_groups": float(len(self._complete)),
            },
            prompt_state={},
        )


def age_metrics(kept: list[Trajectory], step: int, max_age: int) -> dict[str, float]:
    """async/age_mean and async/age_max: updates by which the tokens that ``step`` trains on are behind its weights.

    Raises:
        RuntimeError: one is more than ``max_age`` behind, which is a fault of the program.
    """
    versions = [trajectory.weight_versions[trajectory.loss_mask] for trajectory in kept]
    ages = step - 1 - np.concatenate(versions) if versions else np.zeros(0, np.int64)
    if not len(ages):
        return {"async/age_mean": 0.0, "async/age_max": 0.0}
    if ages.max() > max_age:
        raise RuntimeError(
            f"step {step} would train on a token {ages.max()} updates old, above trainer.max_age={max_age}"
        )
    return {"async/age_mean": float(ages.mean()), "async/age_max": float(ages.max())}


class RecordedExperience:
    """Hands out the groups that each step of an asynchronous run took and stored, in place of generating.

    Raises:
        InputError: from ``take``: the stored prompts are not those of this run's data.
    """

    def __init__(self, run: Deployment, state: TrainerState) -> None:
        self._run = run
        self._state = state
        self._open: dict[int, PromptRow] = {}
        """Prompts that are drawn and that no step has taken yet, by group id."""

    async def __aenter__(self) -> RecordedExperience:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def take(self, step: int) -> Collected:
        """What the recorded run took at ``step``."""
        run, state = self._run, self._state
        file, stored = stored_groups(Path(run.config.rollout.replay_dir or ""), step)
        for group_id, group in stored.items():
            check_stored_prompt(file, self._prompt(file, group_id), group, step)
        groups = list(stored.values())
        for group in groups:
            state.record_accuracy(str(group[0].extra_info.get("uid")), mean_accuracy(group))
        generated = [trajectory for group in groups for trajectory in group]
        kept = [trajectory for trajectory in generated if trajectory.reward_info.get("trained")]
        return Collected(
            kept=kept,
            generated=generated,
            metrics={
                **generation_metrics(run, groups, asdict(run.rollout.statistics), StepTimer()),
                **age_metrics(kept, step, run.config.trainer.max_age),
            },
            prompt_state=run.prompts.state_dict(list(self._open)),
        )

    def _prompt(self, file: Path, group_id: int) -> PromptRow:
        # Steps take groups out of order, within the buffer: prompts in between belong to later steps.
        while group_id not in self._open:
            if len(self._open) > MAX_OPEN_PROMPTS:
                raise InputError(f"{file}: group {group_id} is not one that the data of this run give")
            row = self._run.prompts.next_batch(1)[0]
            self._open[row.group_id] = row
        return self._open.pop(group_id)

    def weights_arrived(self) -> None:
        """Nothing: no group is generated."""

    def at_checkpoint(self, collected: Collected) -> Collected:
        """``collected``, which knows the prompts that are open."""
        return collected
