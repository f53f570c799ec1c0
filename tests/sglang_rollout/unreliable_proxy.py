"""A TCP proxy in front of a real engine that cuts a share of the connections: before the request, or in the answer."""

from __future__ import annotations

import asyncio
import random
from urllib.parse import urlsplit


class UnreliableProxy:
    def __init__(self, target: str, drop_rate: float, seed: int = 0) -> None:
        self.target = urlsplit(target)
        self.drop_rate = drop_rate
        self.dropped = 0
        self._random = random.Random(seed)
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *exception: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection(self.target.hostname, self.target.port)
        except OSError:
            writer.transport.abort()
            return
        pumps = [
            asyncio.create_task(self._pump(reader, up_writer, writer)),
            asyncio.create_task(self._pump(up_reader, writer, writer)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        up_writer.transport.abort()
        writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, to: asyncio.StreamWriter, client: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            # Half of the drops lose the request, the other half lose the answer after the work was done.
            if self._random.random() < self.drop_rate / 2:
                self.dropped += 1
                client.transport.abort()
                return
            to.write(data)
            await to.drain()
