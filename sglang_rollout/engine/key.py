"""The key that a run's engines demand with every request.

It lives in memory: the driver makes it, and gives it to the processes that start engines or speak to them. It stands
in no environment, whose variables agents' own programs inherit, in no setting and on no command line.
"""

from __future__ import annotations

import secrets

_key: str | None = None


def engine_key() -> str:
    """The key of the engines that this process starts or speaks to: the one it was given, or else a new one."""
    global _key
    if _key is None:
        # Hexadecimal: a value that begins with a dash would be read as an argument of the server.
        _key = secrets.token_hex(32)
    return _key


def use_engine_key(key: str) -> None:
    """Start and address engines with ``key`` in this process from now on."""
    global _key
    _key = key


def authorization() -> dict[str, str]:
    """The header that shows the key."""
    return {"Authorization": f"Bearer {engine_key()}"}
