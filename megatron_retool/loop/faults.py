"""What a run does about its faults, apart from restarting engines and tools: see docs/failures.md."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from rich.console import Console

from megatron_retool.cluster.learner_failures import LearnerDied
from megatron_retool.cluster.learner_group import LearnerGroup
from megatron_retool.config import Config
from megatron_retool.errors import OperationError
from megatron_retool.rollout_rows import AGENT_KEY, AgentOutcome, rollouts_of
from megatron_retool.runs.checkpointer import Checkpointer
from megatron_retool.trajectory import FinishReason, Trajectory

if TYPE_CHECKING:
    from megatron_retool.cluster.deployment import Deployment


class LearnerRecovery:
    """Rebuilds a learner that lost a rank, up to ``trainer.max_learner_restarts`` times for one checkpoint."""

    def __init__(self, run: Deployment, checkpointer: Checkpointer) -> None:
        self._run = run
        self._checkpointer = checkpointer
        self._first_prompts = run.prompts.state_dict()
        self._restarts = 0
        self._checkpoint = checkpointer.newest

    async def after(self, error: LearnerDied) -> None:
        """Learner and prompts as at the start, so that the loop may resume from the newest checkpoint.

        Raises:
            RuntimeError: it died too often, or a node is gone.
        """
        run = self._run
        limit = run.config.trainer.max_learner_restarts
        while True:
            newest = self._checkpointer.newest
            if newest != self._checkpoint:
                self._checkpoint, self._restarts = newest, 0
            place = f"checkpoint {newest.path}" if newest is not None else "the initial weights"
            if self._restarts >= limit:
                raise OperationError(
                    f"the learner died {limit + 1} times since {place} (trainer.max_learner_restarts={limit}); at "
                    f"last: {error}. A rank that dies at the same place again and again mostly runs out of memory: see "
                    "that log and the kernel's (dmesg), lower learner.max_tokens_per_micro_batch; or its GPU is bad "
                    "(nvidia-smi -q -d ECC, dmesg | grep Xid): exclude the node. Starting the run again resumes it"
                ) from error
            self._restarts += 1
            run.console.print(str(error), style="yellow", markup=False, highlight=False)
            run.console.print(
                f"building the learner again ({self._restarts} of {limit}): the run resumes from {place}",
                style="yellow",
                markup=False,
                highlight=False,
            )
            try:
                await run.restart_learner()
                break
            except LearnerDied as again:
                error = again
        run.rollout.drop_paused()
        run.prompts.load_state_dict(self._first_prompts)


class StragglerWatch:
    """Finds ranks that are slower than the others in their own part of the updates, step after step.

    Attributes:
        seconds: by role, each rank's own seconds in the updates of the step that was recorded last.
    """

    minimum_excess_seconds = 1.0
    """Less is noise, whatever the ratio."""

    def __init__(self, config: Config, console: Console) -> None:
        self._factor = config.trainer.straggler_factor
        self._steps = config.trainer.straggler_steps
        self._console = console
        self._slow: Counter[tuple[str, int]] = Counter()
        self.seconds: dict[str, list[float]] = {}

    def record(self, *groups: LearnerGroup | None) -> dict[str, float]:
        """perf/slowest_rank_ratio (for a critic with /critic behind it): the slowest rank's seconds to the others'
        median. Ranks that a warning is due for are printed with their nodes."""
        metrics = {}
        self.seconds = {}
        for group in groups:
            seconds = group.take_rank_seconds() if group is not None else []
            if group is not None:
                self.seconds[group.role] = list(seconds)
            if group is None or len(seconds) < 2 or min(seconds) <= 0:
                continue
            ratios = []
            for rank, own in enumerate(seconds):
                others = statistics.median(seconds[:rank] + seconds[rank + 1 :])
                ratios.append(own / others)
                slow = own > self._factor * others and own - others > self.minimum_excess_seconds
                self._count(group, rank, own, others, slow and self._factor > 0)
            metrics[f"perf/slowest_rank_ratio{'' if group.role == 'learner' else '/' + group.role}"] = max(ratios)
        return metrics

    def _count(self, group: LearnerGroup, rank: int, own: float, others: float, slow: bool) -> None:
        key = group.role, rank
        self._slow[key] = self._slow[key] + 1 if slow else 0
        if self._slow[key] and self._slow[key] % self._steps == 0:
            self._console.print(
                f"[yellow]straggler: {group.role} rank {rank} on {group.nodes[rank]} needed {own:.1f} s for its part "
                f"of the updates, the median of the others is {others:.1f} s, {self._slow[key]} steps in a row: look "
                "at its clocks and temperature (nvidia-smi -q -d CLOCK,PERFORMANCE) and at other processes there[/]",
                highlight=False,
            )


class RewardFailures:
    """Says on the console how many rewards of a step failed, and why the first of them did.

    A step is mentioned where a kind of failure is new, or where at least ``share`` of its rewards failed.
    """

    share = 0.1

    def __init__(self, console: Console) -> None:
        self._console = console
        self._known: set[str] = set()

    def record(self, step: int, rows: Sequence[Trajectory]) -> None:
        """``rows``: the step's scored trajectories."""
        rollouts = [rollout[0] for rollout in rollouts_of(rows)]
        failed = [result for result in map(reward_failure, rollouts) if result is not None]
        kinds = Counter(kind for kind, _ in failed)
        if not failed or (set(kinds) <= self._known and len(failed) < self.share * len(rollouts)):
            return
        self._known |= set(kinds)
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        self._console.print(
            f"step {step}: {len(failed)} of {len(rollouts)} rewards failed ({counts}) and count as "
            f"reward.failure_score; the first: {failed[0][1] or failed[0][0]}",
            style="yellow",
            markup=False,
            highlight=False,
        )


def reward_failure(trajectory: Trajectory) -> tuple[str, str] | None:
    """Kind and message of what went wrong with a reward; None: nothing did."""
    info = trajectory.reward_info
    if "failure" in info:
        return str(info["failure"]), str(info.get("failure_message", ""))[:300]
    agent = info.get(AGENT_KEY, {})
    if agent.get("outcome") == AgentOutcome.BAD_RESULT:
        return str(AgentOutcome.BAD_RESULT.value), str(agent.get("message", ""))[:300]
    return None


class NoSignal:
    """Says on the console why a step's groups teach nothing: at the first such step, and when the cause changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said: str | None = None

    def record(self, step: int, rows: Sequence[Trajectory]) -> None:
        """``rows``: the step's scored trajectories."""
        cause = no_signal_cause(rows)
        if cause is None or cause[0] == self._said:
            return
        self._said, sentence = cause
        self._console.print(
            f"step {step}: no group has different rewards: {sentence}",
            style="yellow",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def no_signal_cause(rows: Sequence[Trajectory]) -> tuple[str, str] | None:
    """Why no group of several responses has different rewards: a name of the cause and a sentence with the cure.

    None where a group has, and where no group has several responses.
    """
    groups: defaultdict[int, list[Trajectory]] = defaultdict(list)
    for rollout in rollouts_of(rows):
        groups[rollout[0].group_id].append(rollout[-1])
    several = [group for group in groups.values() if len(group) > 1]
    responses = [response for group in several for response in group]
    rewards = [{response.reward for response in group} for group in several]
    if not several or any(len(different) > 1 for different in rewards):
        return None
    counts = Counter(different.pop() for different in rewards)
    values = ", ".join(f"{value:g} in {count}" for value, count in counts.most_common(4))
    if all(reward_failure(response) is not None for response in responses):
        return "failures", "the reward of every response failed, and all count as reward.failure_score"
    if all(response.finish_reason is FinishReason.LENGTH for response in responses):
        return "length", (
            f"each of the {len(responses)} responses was cut off before its end: raise data.max_response_length "
            "(rollout.engine.context_length), or train the model to end sooner"
        )
    if all(len({response.response_ids.tobytes() for response in group}) == 1 for group in several):
        return "identical", (
            "the responses of each group are identical: rollout.train.temperature, top_p or top_k leaves no choice"
        )
    if len(counts) == 1:
        (value,) = counts
        if value <= 0 and all(response.reward_info.get("pred", "") is None for response in responses):
            return "no answer", (
                f"every reward is {value:g}, and no response has an answer that the reward function reads: compare the "
                "responses (megatron-retool view) with the form that reward.function expects"
            )
        return "one reward", (
            f"every reward is {value:g}: the prompts are too {'easy' if value > 0 else 'hard'} for this model, or "
            "reward.function gives everything the same score"
        )
    return "groups", f"groups by their only reward: {values}; the prompts are too easy or too hard for this model"


class SkipReason(Enum):
    """Why a step changed no weight, and where to look. The value is a sentence of the diagnosis."""

    NO_SIGNAL = (
        "no group has different rewards: see dynamic_sampling/all_correct and all_wrong, rollout/acc/mean and "
        "reward/failures; the prompts are too easy or too hard (choose others, or raise "
        "algorithm.dynamic_sampling.max_generation_batches), or the reward function gives everything the same score"
    )
    MISMATCH = (
        "the batch's mismatch of engine and learner exceeds algorithm.rollout_correction.batch_k3_limit: see "
        "rollout_corr/k3_kl and log_prob_abs_diff; a jump means that the engines serve other weights or precision than "
        "the learner has (weight_sync.verify=true checks), a slow rise that training is becoming unstable"
    )
    REJECTED = (
        "rollout correction and overlong filtering reject every token: see rollout_corr/masked_fraction and "
        "overlong_filtered; the bounds are too narrow for this mismatch, or all responses are cut off"
    )
    NONFINITE = (
        "every gradient is NaN or infinite: see actor/grad_norm, actor/entropy, actor/ppo_kl and rollout_corr/k3_kl "
        "before it began; the weights may be NaN already (go back to an older checkpoint with "
        "trainer.resume_mode=resume_path), or the step is too large (learner.optimizer.lr, clip_grad)"
    )
    LARGE_GRADIENT = (
        "every gradient's norm exceeds skip_grad_norm of learner.optimizer or learner.critic.optimizer: see "
        "actor/grad_norm and critic/grad_norm; where they are as large as ever, the bound is too low for this model"
    )


class SkippedSteps:
    """Ends a run whose steps change no weight any more.

    Args:
        limit: ``trainer.max_skipped_steps``; 0 never ends the run.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reasons: list[SkipReason] = []

    def record(self, step: int, reason: SkipReason | None) -> dict[str, float]:
        """actor/skipped_updates (0 or 1) and actor/skipped_in_a_row of a step; ``reason`` None: it changed weights."""
        self._reasons = [] if reason is None else [*self._reasons, reason]
        return {
            "actor/skipped_updates": float(reason is not None),
            "actor/skipped_in_a_row": float(len(self._reasons)),
        }

    def check(self, step: int) -> None:
        """
        Raises:
            RuntimeError: ``limit`` steps up to ``step`` were skipped without a break; the message tells why.
        """
        if not self._limit or len(self._reasons) < self._limit:
            return
        counts = Counter(self._reasons).most_common()
        raise OperationError(
            f"steps {step - len(self._reasons) + 1} to {step} changed no weight "
            f"(trainer.max_skipped_steps={self._limit}). "
            + ". ".join(f"In {count} of them {reason.value}" for reason, count in counts)
        )


def skipped_updates(rows: Sequence[Mapping[str, float]]) -> SkipReason | None:
    """Why actor or critic left out every update of a step; None: both applied one. ``rows``: metrics of each update."""
    for model in ("actor", "critic"):
        own = [row for row in rows if f"{model}/grad_norm" in row]
        nonfinite = [f"{model}/nonfinite_grad" in row for row in own]
        large = [row.get(f"{model}/skipped_by_grad_norm", 0.0) > 0 for row in own]
        if own and all(a or b for a, b in zip(nonfinite, large, strict=True)):
            return SkipReason.NONFINITE if any(nonfinite) else SkipReason.LARGE_GRADIENT
    return None
