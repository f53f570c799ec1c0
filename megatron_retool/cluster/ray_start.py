"""Starting a private Ray: on a host that may be busy, only on loopback, with a token of its own."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray._raylet import Config as RayConfig  # type: ignore[attr-defined]

from megatron_retool.errors import OperationError

_ATTEMPTS = 3
"""On a busy host Ray's raylet ends itself where an agent of its own takes more than 15 s, and ray.init has no
argument for that. The driver waits for it all the same, so that several attempts serve better than a long limit."""
_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_LIMIT = "RAY_raylet_start_wait_time_s"


def start_local_ray(**options: Any) -> None:
    """``ray.init(address="local", …)``, tried again where it does not come up in time. Its servers and those of its
    actors listen only on loopback.

    Raises:
        RuntimeError: it did not come up again; the message says what to do.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        clusters = ray_constants.ENABLE_RAY_CLUSTER
        try:
            # As on macOS and Windows, where it knows no clusters, Ray takes loopback in place of the host's address.
            ray_constants.ENABLE_RAY_CLUSTER = False
            ray.init(address="local", **options)
            return
        except Exception as error:  # of no class of its own: Ray raises Exception where its start times out
            ray.shutdown()
            if attempt == _ATTEMPTS:
                raise OperationError(
                    f"Ray did not start, {attempt} times: {_first_sentence(error)}. This host's load is "
                    f"{os.getloadavg()[0]:.0f} on {os.cpu_count()} cores and {_free_memory_gib():.1f} GiB of its "
                    "memory are free: end what else runs here, or give Ray longer than "
                    f"{_LIMIT}={os.environ[_LIMIT]} seconds. Otherwise: free memory, and space in /tmp and /dev/shm"
                ) from error
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = clusters


@contextmanager
def private_token() -> Iterator[None]:
    """For the length of the block, a Ray that is started here answers those who show the token that is made for it.

    The token, 256 random bits, stands in a file of mode 600 among the command's temporary files; the environment has
    that file's path. A token, or a mode other than "token", that the environment names already is left as it is.
    """
    named = _TOKEN in os.environ or _TOKEN_PATH in os.environ
    if named or os.environ.get(_MODE, "token") != "token":
        yield
        return
    descriptor, path = tempfile.mkstemp(prefix="ray_token_")  # mkstemp: mode 600
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))
    os.environ[_TOKEN_PATH] = path
    mode = os.environ.get(_MODE)
    AuthenticationTokenLoader.instance().reset_cache()  # an earlier Ray of this process had another
    try:
        yield
    finally:
        del os.environ[_TOKEN_PATH]
        if mode is None:
            # Ray's start sets it, and a Ray that is started here later would look for a token that is gone.
            os.environ.pop(_MODE, None)
            RayConfig.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
        Path(path).unlink(missing_ok=True)


def _free_memory_gib() -> float:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def _first_sentence(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].split(". ")[0].rstrip(".")
