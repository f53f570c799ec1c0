"""Which errors are for the person at the command line, and which are faults of the program."""

from __future__ import annotations

from megatron_retool.untrusted import clipped

FAULT = (
    "This is a fault of megatron-retool, not of what it was given: please report it with the lines above as a bug in "
    "the repository's issues"
)
"""What follows the traceback of an error that no one expected."""


class UserError(Exception):
    """What the person who runs a command can mend. The message says what is wrong and what to do.

    Commands print the message as one line. Of any other exception but OSError they print the traceback, and ``FAULT``.
    """


class InputError(UserError, ValueError):
    """What a command was given is wrong: a setting, a file, an option, an object of the user's own.

    The message may quote what others wrote, and stays readable however long that is.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(clipped(message))


class OperationError(UserError, RuntimeError):
    """What a command needs failed: a process, an engine, a sandbox, a disk, a service."""
