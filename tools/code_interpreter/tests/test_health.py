"""The server knows whether it can run code, says so, and mends itself where it can."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable

import pytest
from aiohttp.test_utils import make_mocked_request
from sandboxes import as_ordinary_user, start

from code_interpreter import pool as pool_module
from code_interpreter.pool import WorkerPool
from code_interpreter.protocol import Outcome
from code_interpreter.server import SandboxApplication
from code_interpreter.settings import SandboxSettings


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.2)


@pytest.mark.parametrize("isolation", ["rlimits", "bubblewrap"])
def test_server_whose_scratch_directory_was_deleted_starts_again(isolation: str) -> None:
    sandbox = start(isolation, workers=1, wrapper=as_ordinary_user())
    try:
        sandbox.check_alive()
        (scratch,) = sandbox.scratch_directories()
        shutil.rmtree(scratch)
        assert sandbox.run("print(1)").outcome is Outcome.SANDBOX_ERROR
        until(lambda: sandbox.run("print(1)").ok)
        until(lambda: json.loads(sandbox.get("/health"))["status"] in ("ok", "degraded"))
        assert json.loads(sandbox.get("/health"))["broken"] is None
        assert scratch not in sandbox.scratch_directories()
        assert json.loads(sandbox.get("/v1/ping")) == "pong"
    finally:
        sandbox.process.stop()


class Unmendable(WorkerPool):
    """Runs nothing as long as ``reason`` is set, however often it is started."""

    reason: str | None = "no room on the disk"
    starts = 0

    @property
    def is_up(self) -> bool:
        return True

    async def start(self) -> None:
        self.starts += 1

    async def _trial(self) -> str | None:
        return self.reason


def test_server_that_cannot_mend_itself_says_so_until_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(pool_module, "_RECHECK_SECONDS", 0.01)

    async def scenario() -> None:
        pool = Unmendable(SandboxSettings(workers=1))
        application = SandboxApplication(pool)

        async def says(status: str, ping: int) -> bool:
            health = await application.health(make_mocked_request("GET", "/health"))
            pong = await application.ping(make_mocked_request("GET", "/v1/ping"))
            assert health.text is not None
            body = json.loads(health.text)
            return (body["status"], body["broken"], pong.status) == (status, pool.reason, ping)

        watch = asyncio.create_task(pool._check_itself())
        async with asyncio.timeout(20):
            while not await says("broken", 503):
                await asyncio.sleep(0.01)
            while pool.starts < 2:
                await asyncio.sleep(0.01)
            pool.reason = None
            while not await says("ok", 200):
                await asyncio.sleep(0.01)
        watch.cancel()

    asyncio.run(scenario())
