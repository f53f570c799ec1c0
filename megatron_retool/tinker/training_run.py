"""One training run: what is known of it, the order of its calls, and whether its state can be relied on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from megatron_retool.target_sequences import RequestRefused
from megatron_retool.tinker.run_queue import Job
from megatron_retool.tinker.run_store import RunRecord, RunStore, now
from megatron_retool.tinker.sequence_gate import SequenceGate
from sglang_rollout.gateway.errors import ApiError

GAP_SECONDS = 900.0
"""How long calls wait for one before them that has not come: clients try to send it for five minutes."""
GAP_AFTER_START_SECONDS = 60.0
"""The same where the server was started meanwhile: what its predecessor had accepted never comes again."""


class TrainingRun:
    """
    Args:
        restored: the server was started since its last call.

    Attributes:
        is_built: the trainer knows it.
        gathered: it has gradients that no optimizer step has used.
        lost: why its state is not what its client takes it to be; None: it is. Only load_weights cures it.
        latest: path of the weights that samplers follow which take the newest.
    """

    def __init__(self, record: RunRecord, store: RunStore, *, restored: bool = False) -> None:
        self.record = record
        self.gate: SequenceGate[Job] = SequenceGate(record.next_call)
        self.gap_seconds = GAP_AFTER_START_SECONDS if restored else GAP_SECONDS
        self.is_built = False
        self.gathered = False
        self.lost: str | None = None
        self._store = store
        self._writing = asyncio.Lock()
        if restored and record.unsaved_calls:
            saved = record.saved
            self.lost = (
                f"the server was restarted, and what this run learned since "
                f"{f'its last save, {saved},' if saved else 'it was created'} is lost: "
                + (
                    f"call create_training_client_from_state_with_optimizer({saved!r})"
                    if saved
                    else "create a new training client"
                )
            )

    @property
    def id(self) -> str:
        """The run's id."""
        return self.record.id

    def check_open(self) -> None:
        """
        Raises:
            ApiError: 410, it was ended.
        """
        if self.record.ended:
            raise ApiError(410, "model_id: the run's session has ended: make a new client", code="gone")

    def check_state(self) -> None:
        """
        Raises:
            RequestRefused: its state is lost.
        """
        if self.lost is not None:
            raise RequestRefused(self.lost)

    async def note(self, **changes: Any) -> None:
        """Change the record, here and on disk."""
        self.record = dataclasses.replace(self.record, **changes)
        async with self._writing:
            await asyncio.to_thread(self._store.write_run, self.record)

    @contextlib.asynccontextmanager
    async def call(self, number: int, *, changes: bool) -> AsyncIterator[None]:
        """Note that a call is done in the block. What ``changes`` weights, optimizer or gradients counts as lost from
        now on, should the server end before the next save; a call that is refused has changed nothing."""
        before = self.record.unsaved_calls
        await self.note(
            next_call=max(self.record.next_call, number + 1), unsaved_calls=before + changes, last_request=now()
        )
        try:
            yield
        except RequestRefused:
            await self.note(unsaved_calls=before)
            raise

    def skip_missing(self) -> list[Job]:
        """Jobs that have waited too long for a call before them, which never came."""
        result = self.gate.skip(self.gap_seconds)
        if result is None:
            return []
        jobs, missing = result
        self.gap_seconds = GAP_SECONDS
        calls = f"call {missing[0]}" if len(missing) == 1 else f"calls {missing[0]} to {missing[-1]}"
        if self.lost is None:
            self.lost = (
                f"{calls} of this run did not reach the server, so its state is not what its client takes it to be: "
                + (
                    f"call create_training_client_from_state_with_optimizer({self.record.saved!r})"
                    if self.record.saved
                    else "create a new training client"
                )
            )
        return jobs
