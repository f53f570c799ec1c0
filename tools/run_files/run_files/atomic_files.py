"""Files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[Any]:
    """A binary file to fill under a temporary name; at the end of the block it is fsynced and renamed to ``path``.

    Where the block or the disk fails nothing is left behind, and an older file of that name stays.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """``atomic_write`` of a text, in UTF-8."""
    with atomic_write(path) as handle:
        handle.write(text.encode())
