"""On one machine, a code interpreter server that does not start again is tried again."""

from __future__ import annotations

import asyncio

import pytest

from code_interpreter import process
from code_interpreter.process import SandboxServerError


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
    monkeypatch.setattr(process, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(process, "RETRY_SECONDS", 0.0)
    server, said = Server(), []

    async def scenario() -> None:
        watch = asyncio.create_task(process.kept_running(server, said.append))  # type: ignore[arg-type]
        async with asyncio.timeout(10):
            while not server.is_running():
                await asyncio.sleep(0.01)
        assert not watch.done()
        watch.cancel()

    asyncio.run(scenario())
    assert "does not start again: the sandbox server ended: no memory [Errno 12]" in "\n".join(said)
    assert sum("starting it again" in line for line in said) == 2
