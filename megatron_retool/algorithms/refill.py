"""Continuous dynamic sampling: which groups a step starts, takes into its batch, and gives up.

DAPO, arXiv:2503.14476, section 3.2, without rounds: as soon as a group turns out to carry no signal, so many others are
started as it takes to fill the batch. Only order decides the batch: it is the first ``wanted`` informative
groups in the order in which they were started, and a later group counts only once every earlier one is decided. So
nothing depends on who finished first, and short responses have no advantage; what was started in vain changes nothing.

Everything here is a decision on numbers; the training loop does the generating.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MEMORY = 0.8
"""Weight of all earlier steps beside the present one in the keep rate: it looks back about five steps."""
ASSUMED = 4
"""Groups with a signal that the keep rate begins with: the first ones of a run are not all that decides it."""
MAX_AHEAD = 8
"""Batches of groups that are under way at most, however few are kept."""


@dataclass(frozen=True)
class KeepRate:
    """How many groups carry a signal, over the last steps.

    Attributes:
        kept, seen: groups with a signal, and all; older steps count for less.
    """

    kept: float = 0.0
    seen: float = 0.0

    @property
    def share(self) -> float:
        """In (0, 1]; 1 where nothing is known yet."""
        return (self.kept + ASSUMED) / (self.seen + ASSUMED)

    def with_groups(self, kept: int, seen: int) -> KeepRate:
        """What it is with further groups of the present step."""
        return KeepRate(self.kept + kept, self.seen + seen)

    def faded(self) -> KeepRate:
        """What the next step begins with."""
        return KeepRate(MEMORY * self.kept, MEMORY * self.seen)

    def state_dict(self) -> dict[str, float]:
        """As JSON types."""
        return {"kept": self.kept, "seen": self.seen}

    @classmethod
    def from_state(cls, state: Mapping[str, float]) -> KeepRate:
        """What ``state_dict`` returned; that of no step from an empty one."""
        return cls(float(state.get("kept", 0.0)), float(state.get("seen", 0.0)))


def groups_for(missing: int, keep_share: float, certainty: float) -> int:
    """Groups under way for ``missing`` to be kept: the smallest n with n p - c sqrt(n p (1 - p)) >= missing.

    Args:
        keep_share: p, in (0, 1].
        certainty: c, standard deviations by which they are expected to be enough.
    """
    spread = certainty * math.sqrt(keep_share * (1 - keep_share))
    root = (spread + math.sqrt(spread * spread + 4 * keep_share * missing)) / (2 * keep_share)
    return math.ceil(root * root - 1e-9)


class Refill:
    """The groups of one step. Each one that is started is decided or given up, once.

    Args:
        wanted: groups of a batch (data.train_batch_size).
        max_groups: groups that the step decides at most; None: no limit.
        keep_rate: the estimate before this step; None: every group is kept.
        certainty: of ``groups_for``.
        over_sampling: groups under way for each that is expected to be needed.
        in_order: a group counts once all before it are decided. False: at once, which is for groups that are not lost
            when the step leaves them unfinished (partial rollout).
    """

    def __init__(
        self,
        wanted: int,
        *,
        max_groups: int | None = None,
        keep_rate: KeepRate | None = None,
        certainty: float = 1.0,
        over_sampling: float = 1.0,
        in_order: bool = True,
    ) -> None:
        self.wanted = wanted
        self._max_groups = max_groups
        self._keep_rate = keep_rate
        self._certainty = certainty
        self._over_sampling = over_sampling
        self._in_order = in_order
        self._order: list[int] = []
        self._informative: dict[int, bool] = {}
        self._given_up: set[int] = set()

    def start(self, group_ids: Iterable[int]) -> None:
        """These groups are under way now, behind all others.

        Raises:
            ValueError: one of them was started before.
        """
        for group_id in group_ids:
            if group_id in self._order:
                raise ValueError(f"group {group_id} was started before")
            self._order.append(group_id)

    def decide(self, group_id: int, informative: bool) -> None:
        """The group is complete, and has a signal or none.

        Raises:
            ValueError: it is not under way.
        """
        if group_id not in self.under_way:
            raise ValueError(f"group {group_id} is not under way")
        self._informative[group_id] = informative

    def give_up(self) -> list[int]:
        """Groups under way that cannot be in the batch any more, whatever becomes of those before them; once."""
        last = self._last_possible()
        if last is None:
            return []
        needless = [group_id for group_id in self._order[last + 1 :] if self._is_under_way(group_id)]
        self._given_up.update(needless)
        return needless

    @property
    def under_way(self) -> list[int]:
        """Groups that are neither decided nor given up, in order."""
        return [group_id for group_id in self._order if self._is_under_way(group_id)]

    @property
    def to_start(self) -> int:
        """Groups to start now."""
        if self.certain or self._last_possible() is not None:
            return 0
        kept, decided = sum(self._informative.values()), len(self._informative)
        share = 1.0 if self._keep_rate is None else self._keep_rate.with_groups(kept, decided).share
        needed = min(groups_for(self.wanted - kept, share, self._certainty), MAX_AHEAD * self.wanted)
        if self._max_groups is not None:
            needed = min(needed, self._max_groups - decided)
        return max(0, math.ceil(needed * self._over_sampling) - len(self.under_way))

    @property
    def certain(self) -> bool:
        """The batch is known: it is full, or ``max_groups`` are decided."""
        return len(self.batch) == self.wanted or len(self._informative) == self._max_groups

    @property
    def examined(self) -> list[int]:
        """Decided groups up to the batch's last one, in order: what the batch was taken from.

        All decided ones where a group counts at once.
        """
        if not self._in_order:
            return [group_id for group_id in self._order if group_id in self._informative]
        result, kept = [], 0
        for group_id in self._order:
            if kept == self.wanted or group_id not in self._informative:
                break
            result.append(group_id)
            kept += self._informative[group_id]
        return result

    @property
    def batch(self) -> list[int]:
        """The groups to train on, in order: ``wanted`` of them once it is certain, or as many as had a signal."""
        # Where a group counts at once, several that are complete together may be more than are wanted.
        return [group_id for group_id in self.examined if self._informative[group_id]][: self.wanted]

    @property
    def surplus(self) -> list[int]:
        """Decided groups beyond ``examined``, in order."""
        examined = set(self.examined)
        return [group_id for group_id in self._order if group_id in self._informative and group_id not in examined]

    @property
    def given_up(self) -> list[int]:
        """Groups that ``give_up`` named, in order."""
        return [group_id for group_id in self._order if group_id in self._given_up]

    def keep_rate_after(self) -> KeepRate:
        """The estimate for the next step. What lies beyond the batch does not count: it depends on who was fast."""
        kept = sum(self._informative[group_id] for group_id in self.examined)
        return (self._keep_rate or KeepRate()).with_groups(kept, len(self.examined)).faded()

    def _is_under_way(self, group_id: int) -> bool:
        return group_id not in self._informative and group_id not in self._given_up

    def _last_possible(self) -> int | None:
        """Place of the last group that can still be in the batch: so many before it are known to be informative."""
        if not self._in_order:
            return None
        kept = 0
        for place, group_id in enumerate(self._order):
            kept += self._informative.get(group_id, False)
            if kept == self.wanted:
                return place
        return None
