"""On one machine, a code interpreter server that does not start again is tried again."""

from __future__ import annotations

import asyncio
import io

import pytest
from rich.console import Console

from megatron_retool.cluster import deployment
from tools.code_interpreter.process import SandboxServerError


class Server:
    """Ended; refuses the first start."""

    def __init__(self) -> None:
        self.starts = 0

    def is_running(self) -> bool:
        return self.starts > 1

    def start(self) -> None:
        self.starts += 1
        if self.starts == 1:
            raise SandboxServerError("the sandbox server ended: no memory [Errno 12]")


def test_a_refused_start_is_said_and_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "SANDBOX_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(deployment, "RETRY_SECONDS", 0.0)
    run = object.__new__(deployment.Deployment)
    run.console = Console(file=io.StringIO(), width=200)
    server = Server()

    async def scenario() -> None:
        watch = asyncio.create_task(run._keep_running(server))  # type: ignore[arg-type]
        async with asyncio.timeout(10):
            while not server.is_running():
                await asyncio.sleep(0.01)
        assert not watch.done()
        watch.cancel()

    asyncio.run(scenario())
    said = run.console.file.getvalue()
    assert "does not start again: the sandbox server ended: no memory [Errno 12]" in said
    assert said.count("starting it again") == 2
