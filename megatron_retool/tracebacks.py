"""Tracebacks of errors that were dealt with, whose frames keep what they were called with."""

from __future__ import annotations


def drop_tracebacks(error: BaseException | None) -> None:
    """Take the tracebacks off an error, and off those that led to it.

    A frame that holds the error and is in its traceback is a cycle. What these frames refer to, a request's body or a
    step's batch, would stay until the next full collection.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
