"""Starting a private Ray on a host that may be busy."""

from __future__ import annotations

import os
from typing import Any

import ray

_ATTEMPTS = 3
"""On a busy host Ray's raylet ends itself where an agent of its own takes more than 15 s, and ray.init has no
argument for that. The driver waits for it all the same, so that several attempts serve better than a long limit."""
_LIMIT = "RAY_raylet_start_wait_time_s"


def start_local_ray(**options: Any) -> None:
    """``ray.init(address="local", …)``, tried again where it does not come up in time.

    Raises:
        RuntimeError: it did not come up again; the message says what to do.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            ray.init(address="local", **options)
            return
        except Exception as error:  # of no class of its own: Ray raises Exception where its start times out
            ray.shutdown()
            if attempt == _ATTEMPTS:
                raise RuntimeError(
                    f"Ray did not start, {attempt} times: {_first_sentence(error)}. This host's load is "
                    f"{os.getloadavg()[0]:.0f} on {os.cpu_count()} cores and {_free_memory_gib():.1f} GiB of its "
                    "memory are free: end what else runs here, or give Ray longer than "
                    f"{_LIMIT}={os.environ[_LIMIT]} seconds. Otherwise: free memory, and space in /tmp and /dev/shm"
                ) from error


def _free_memory_gib() -> float:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def _first_sentence(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].split(". ")[0].rstrip(".")
