"""Groups between engines and learner in asynchronous training: when one may start, and when a step may take its batch.

An entry's life:

    start ──▶ GENERATING ──complete──▶ COMPLETE ──take──▶ trained
                   │
                   └──complete, without a signal──▶ dropped

A slot is one entry. It is freed when the group is trained or dropped, and by nothing else: no group is generated to be
thrown away because of its age.

**The bound.** Step s changes weights of version s - 1. A token of version v is then s - 1 - v versions old, and that
must not exceed ``max_age``. All tokens of a group are of the version v of its start or of later ones, so the group has
to be trained in step v + 1 + max_age at the latest: its deadline. Groups that start later have later deadlines.

**Starting.** A step trains B groups. Where step t is the last one that took its batch, the steps t + 1 to d train
B (d - t) groups. A group with deadline d may start where that is more than the number of entries: then all of them can
be trained in time, whatever becomes of the others.

**Taking.** A step takes complete groups, oldest first. It waits while there are fewer than B of them, and while a group
is unfinished that would then come too late: after the step, for every deadline d, at most B (d - s) entries may be due
by then. Both rules keep that true, so the bound holds for any order in which groups end.

Example, B = 2, max_age = 1, engines at version 0: groups 0 to 3 may start (deadline 2, steps 1 and 2). Groups 1 and 3
end first: step 1 takes them. Engines are still at version 0 and no group may start, since 0 and 2 fill step 2. With
version 1 deadlines are 3, and groups 4 and 5 start. Step 2 has to wait for 0 and 2, even where 4 and 5 end before them.

Everything here is a decision on numbers; ``asynchronous.py`` does what they say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum


class GroupState(Enum):
    """Where an entry of the buffer stands."""

    GENERATING = "generating"
    COMPLETE = "complete"


@dataclass
class _Entry:
    version: int
    state: GroupState = GroupState.GENERATING


class GroupBuffer:
    """The groups that have started and are neither trained nor dropped.

    Args:
        batch_groups: B, groups of a step (data.train_batch_size).
        max_age: trainer.max_age, at least 1.
        step: the last step that took its batch; 0 at the start of a run.
    """

    def __init__(self, batch_groups: int, max_age: int, step: int = 0) -> None:
        self.batch_groups = batch_groups
        self.max_age = max_age
        self.step = step
        self._entries: dict[int, _Entry] = {}

    def __len__(self) -> int:
        """Slots in use."""
        return len(self._entries)

    @property
    def generating(self) -> list[int]:
        """Ids of groups that are not complete, oldest first."""
        return [group_id for group_id, entry in self._entries.items() if entry.state is GroupState.GENERATING]

    @property
    def complete(self) -> list[int]:
        """Ids of complete groups that wait to be trained, oldest first."""
        return [group_id for group_id, entry in self._entries.items() if entry.state is GroupState.COMPLETE]

    @property
    def versions(self) -> dict[int, int]:
        """Version of the engines' weights at each entry's start, by group id."""
        return {group_id: entry.version for group_id, entry in self._entries.items()}

    def deadline(self, version: int) -> int:
        """The last step that may train a group which started with weights of ``version``."""
        return version + 1 + self.max_age

    def room(self, version: int) -> int:
        """Groups that may start now, with engines at ``version``."""
        return max(0, self.batch_groups * (self.deadline(version) - self.step) - len(self._entries))

    def start(self, group_ids: Iterable[int], version: int) -> None:
        """These groups are under way, with engines at ``version``.

        Raises:
            ValueError: one of them has started before, there is no room, or versions run backwards.
        """
        for group_id in group_ids:
            if group_id in self._entries:
                raise ValueError(f"group {group_id} has started before")
            if not self.room(version):
                raise ValueError(f"group {group_id} could not be trained in time: all slots are in use")
            if self._entries and version < max(entry.version for entry in self._entries.values()):
                raise ValueError(f"group {group_id} starts with version {version} after one of a later version")
            self._entries[group_id] = _Entry(version)

    def finish(self, group_id: int, *, has_signal: bool) -> None:
        """The group is complete; without a signal it leaves at once.

        Raises:
            ValueError: it is not under way.
        """
        entry = self._entries.get(group_id)
        if entry is None or entry.state is not GroupState.GENERATING:
            raise ValueError(f"group {group_id} is not under way")
        entry.state = GroupState.COMPLETE
        if not has_signal:
            del self._entries[group_id]

    def restore(self, versions: Mapping[int, int]) -> list[int]:
        """Put complete groups back that a checkpoint has kept.

        Args:
            versions: of the engines' weights at each group's start.

        Returns:
            Groups that cannot all be trained in time, where the run now has a smaller batch or bound than the one that
            kept them: they are left out.
        """
        left_out = []
        for group_id, version in sorted(versions.items(), key=lambda item: item[1]):
            if self.room(version):
                self._entries[group_id] = _Entry(version, GroupState.COMPLETE)
            else:
                left_out.append(group_id)
        return left_out

    def batch(self, *, full: bool = True) -> list[int] | None:
        """What the next step would take, oldest first; None while it has to wait.

        Args:
            full: wait for a whole batch. False: take fewer where that keeps every deadline.
        """
        chosen = self.complete[: self.batch_groups]
        if full and len(chosen) < self.batch_groups:
            return None
        taken, left = set(chosen), 0
        for group_id, entry in self._entries.items():
            if group_id in taken:
                continue
            left += 1
            if left > self.batch_groups * (self.deadline(entry.version) - self.step - 1):
                return None
        return chosen

    def take(self, *, full: bool = True) -> list[int] | None:
        """``batch``, which the next step trains: these groups leave, and the step is counted."""
        chosen = self.batch(full=full)
        if chosen is None:
            return None
        self.step += 1
        for group_id in chosen:
            del self._entries[group_id]
        return chosen
