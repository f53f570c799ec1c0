"""Which errors are for the person at the command line, and which are faults of the program."""

from __future__ import annotations

from untrusted.errors import InputError, OperationError, UserError

__all__ = ["FAULT", "InputError", "OperationError", "UserError"]

FAULT = (
    "This is a fault of megatron-retool, not of what it was given: please report it with the lines above as a bug in "
    "the repository's issues"
)
"""What follows the traceback of an error that is neither a ``UserError`` nor an OSError."""
