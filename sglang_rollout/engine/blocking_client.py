"""``SGLangClient`` for code without an event loop: the engine's owner, weight sync."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from sglang_rollout.engine.client import CLOSE_SECONDS, SGLangClient


class BlockingClient:
    """``SGLangClient.request`` to several servers from threads: an event loop in a thread of its own.

    Args:
        base_urls: the servers.
    """

    def __init__(self, base_urls: Sequence[str]) -> None:
        self._clients = {url: SGLangClient(url) for url in base_urls}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, base_url: str, path: str, body: dict[str, Any] | None, timeout_seconds: float) -> Future[Any]:
        """Begin a request; its answer, or what ``SGLangClient.request`` raises."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="engine-requests", daemon=True)
            self._thread.start()
        call = self._clients[base_url].request(path, body, timeout_seconds)
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def close(self) -> None:
        """End the thread; requests that are still under way are cancelled."""
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._end(), loop).result(CLOSE_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(CLOSE_SECONDS)
        if not loop.is_running():
            loop.close()

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for client in self._clients.values():
            await client.close()
