"""Entropy-guided branching (ARPO, arXiv:2507.19849, section 3.1): more samples where a tool's answer unsettles it.

A group of M = rollout.train.n trajectories starts with N = initial_rollouts. The entropies of the first k tokens of a
turn after a tool result, H_t, are compared with those of the trajectory's first k tokens, H_initial:

    P_t = alpha + beta * dH_t

with alpha = branch_probability and beta = entropy_weight; ``entropy_change`` has two forms of dH_t. Two timings:

* ``after_tool_result``, the paper's: H_t is measured on the k tokens that follow the result; the node just before
  them is forked into Z = beam_size - 1 further trajectories where P_t > threshold (equation 3).
* ``before_tool_result``, that of the authors' code: H_t is the entropy of the turn that made the call, known when the
  result arrives, and each of the Z forks is made with probability P_t, clamped to [0, 1].

When every trajectory has ended and forks have not used up the budget M - N, fresh trajectories top the group up. Forks
share their parent's ids up to the fork, which the engine's prefix cache holds once; ``shared_token_ids`` gives those
tokens one identity for the hard advantage estimate.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron_retool.config import BranchingConfig
from megatron_retool.trajectory import Trajectory
from run_files.steps import RowKey
from sglang_rollout.agent.trajectory_state import TrajectoryState, joined
from sglang_rollout.engine.base import GenerateResult

TOP_LOG_PROBS = 10
"""Most likely tokens that the entropy is summed over, as in the authors' code."""
BRANCH_KEY = "branch"
"""In Trajectory.reward_info of a fork: {"parent": index in the group, "shared_tokens": response tokens in common}."""


class BranchSample(Protocol):
    """A request for what follows the state's ids and what was sampled ``after`` them."""

    def __call__(
        self,
        state: TrajectoryState,
        max_new_tokens: int,
        deadline: float,
        after: GenerateResult | None = None,
        top_log_probs: int = 0,
    ) -> Awaitable[GenerateResult]:
        """Sample; see ``Session.generate``, which has the same arguments."""


Start = Callable[[TrajectoryState], None]


def entropies(top_log_probs: Sequence[Sequence[float]]) -> list[float]:
    """-sum p log p over each position's most likely tokens, in nats."""
    return [-sum(math.exp(value) * value for value in position if value > -math.inf) for position in top_log_probs]


def entropy_change(now: Sequence[float], initial: Sequence[float], vocabulary_size: int, form: str) -> float:
    """dH_t of the entropies H_t = ``now`` and H_initial = ``initial``, of up to k tokens each, in nats.

    * ``paper``: sum_j (H_t[j] - H_initial[j]) / V over the tokens that both have. V being 1e5 and a token's entropy at
      most 2.3 nats (``TOP_LOG_PROBS`` tokens), it says hardly more than whether the entropy rose.
    * ``authors_code``: (sum_j H_t[j] - sum_j H_initial[j]) / log V, each over all tokens that it has, so a turn that
      ends after a few tokens counts as a certain one.
    """
    if form == "paper":
        return sum(a - b for a, b in zip(now, initial, strict=False)) / vocabulary_size
    return (sum(now) - sum(initial)) / math.log(vocabulary_size)


class EntropyBranching:
    """Decides for the trajectories of one group when to fork.

    Args:
        config: rollout.branching.
        budget: M, the trajectories that the group will have.
        vocabulary_size: V.
        seed: of the draws that ``before_tool_result`` makes.
    """

    def __init__(self, config: BranchingConfig, budget: int, vocabulary_size: int, seed: int) -> None:
        self.config = config
        self.budget = budget
        self.started = min(config.initial_rollouts, budget)
        self._vocabulary_size = vocabulary_size
        self._random = random.Random(seed)
        self._initial: dict[int, list[float]] = {}
        self._latest: dict[int, list[float]] = {}
        """Entropies of the tokens of a trajectory's first measured turn, and of its latest."""
        self._forked_in: dict[int, int] = {}
        """Turn at which a fork was made: its node has been decided on already."""

    async def generate(
        self, sample: BranchSample, start: Start, state: TrajectoryState, max_new_tokens: int, deadline: float
    ) -> GenerateResult:
        """Sample a turn for ``state``; at its beginning, measure entropy and fork where the rule says so.

        ``start`` is called with each fork, which is to be run like any other trajectory.
        """
        begins = len(state.response_ids) == state.turn_start
        if not begins or self.started >= self.budget:
            return await sample(state, max_new_tokens, deadline)
        new_node = state.turn > 0 and self._forked_in.get(state.index) != state.turn
        if new_node and self.config.timing == "before_tool_result":
            self._fork_by_chance(state, start)
        measured = min(self.config.entropy_tokens, max_new_tokens)
        head = await sample(state, measured, deadline, top_log_probs=TOP_LOG_PROBS)
        if head.finish_reason != "abort":
            measured_now = entropies(head.top_log_probs or [])
            if state.turn == 0 or self.config.entropy_change == "authors_code":
                self._initial.setdefault(state.index, measured_now)
            self._latest[state.index] = measured_now
            if new_node and self.config.timing == "after_tool_result":
                self._fork_above_threshold(state, measured_now, start)
        if head.finish_reason != "length" or measured == max_new_tokens:
            return head
        tail = await sample(state, max_new_tokens - measured, deadline, after=head)
        return joined(head, tail)

    def top_up(self) -> int:
        """Trajectories to start from the prompt now that all others have ended; they count as started."""
        missing, self.started = self.budget - self.started, self.budget
        return missing

    def state_dict(self) -> dict[str, Any]:
        """What decisions to come depend on, as JSON types."""
        measured = {
            name: list(values.items())
            for name, values in (("initial", self._initial), ("latest", self._latest), ("forked_in", self._forked_in))
        }
        return {"started": self.started, "random": self._random.getstate(), **measured}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        self.started = state["started"]
        version, internal, gauss = state["random"]
        self._random.setstate((version, tuple(internal), gauss))
        self._initial, self._latest = dict(state["initial"]), dict(state["latest"])
        self._forked_in = dict(state["forked_in"])

    def _fork_above_threshold(self, state: TrajectoryState, now: Sequence[float], start: Start) -> None:
        if self._probability(state, now) > self.config.threshold:
            for _ in range(self.config.beam_size - 1):
                self._fork(state, start)

    def _fork_by_chance(self, state: TrajectoryState, start: Start) -> None:
        now = self._latest.get(state.index)
        if now is None:
            return
        probability = self._probability(state, now)
        for _ in range(self.config.beam_size - 1):
            if self._random.random() < probability:
                self._fork(state, start)

    def _probability(self, state: TrajectoryState, now: Sequence[float]) -> float:
        initial = self._initial.get(state.index, now)
        change = entropy_change(now, initial, self._vocabulary_size, self.config.entropy_change)
        return self.config.branch_probability + self.config.entropy_weight * change

    def _fork(self, state: TrajectoryState, start: Start) -> None:
        if self.started >= self.budget:
            return
        index, self.started = self.started, self.started + 1
        fork = state.fork(index, seed=None if state.seed is None else state.seed + index)
        fork.reward_info[BRANCH_KEY] = {"parent": state.index, "shared_tokens": len(state.response_ids)}
        # In the authors' code a fork has no past: what it samples first is what it is compared with.
        if self.config.entropy_change == "paper":
            for known in (self._initial, self._latest):
                if state.index in known:
                    known[index] = known[state.index]
        self._forked_in[index] = state.turn
        start(fork)


def shared_token_ids(trajectories: Sequence[Trajectory]) -> npt.NDArray[np.int64]:
    """int64 [T], T = all response tokens end to end: copies of a token that forks share carry the same id.

    Every other token has an id of its own. ``algorithms.advantages.share_branch_advantages`` takes the result.
    A fork whose parent is not among ``trajectories`` counts as unrelated.
    """
    ids: dict[RowKey, npt.NDArray[np.int64]] = {}
    following = 0
    # A fork's index is larger than its parent's: parents come first.
    for trajectory in sorted(trajectories, key=lambda t: t.key):
        own = np.arange(following, following + len(trajectory.response_ids), dtype=np.int64)
        following += len(own)
        branch = trajectory.reward_info.get(BRANCH_KEY)
        parent = ids.get((trajectory.group_id, branch["parent"], 0)) if branch else None
        if branch and parent is not None:
            shared = min(int(branch["shared_tokens"]), len(own), len(parent))
            own[:shared] = parent[:shared]
        ids[trajectory.key] = own
    parts = [ids[trajectory.key] for trajectory in trajectories]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
