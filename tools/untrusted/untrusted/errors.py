"""Errors that a person at a command line can mend."""

from __future__ import annotations

from untrusted import clipped


class UserError(Exception):
    """What the person who runs a command can mend. The message says what is wrong and what to do.

    A command prints the message as one line, and of another exception the traceback.
    """


class InputError(UserError, ValueError):
    """What a command was given is wrong: a setting, a file, an option, an object of the user's own.

    The message may quote what others wrote, and stays readable however long that is.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(clipped(message))


class OperationError(UserError, RuntimeError):
    """What a command needs failed: a process, an engine, a sandbox, a disk, a service."""
