"""Long texts, which are rendered and tokenised in threads: the event loop serves all other rollouts meanwhile."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

LARGE = 1 << 15
"""Characters; a longer text is worth a thread."""
THREADS = 2
"""For the long texts of all rollouts and sessions."""
_POOL = ThreadPoolExecutor(THREADS, thread_name_prefix="render")


async def in_thread[**P, T](function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What ``function`` returns, called in a thread."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_POOL, functools.partial(function, *args, **kwargs))


async def by_size[**P, T](size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What ``function`` returns, called in a thread where it has a text of many characters (``size``) to work on."""
    if size <= LARGE:
        return function(*args, **kwargs)
    return await in_thread(function, *args, **kwargs)
