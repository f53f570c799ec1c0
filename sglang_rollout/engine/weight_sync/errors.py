"""What goes wrong between learner and engines."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_retool.errors import OperationError


class WeightSyncError(OperationError):
    """Engines could not be given new weights. ``engines`` names those at fault; their weights are undefined now."""

    def __init__(self, message: str, engines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.engines = tuple(engines)
