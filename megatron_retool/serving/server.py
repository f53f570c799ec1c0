"""`megatron-retool serve`: the gateway in front of a ``Service``, until it is cancelled."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from megatron_retool.serving.front import OpenDoor
from megatron_retool.serving.service import Service
from megatron_retool.serving.source import context_length
from sglang_rollout.gateway.server import Gateway

HEALTH = "/health"
_EVERYWHERE = ("0.0.0.0", "::", "")


@dataclass(frozen=True)
class Address:
    """Where the server listens, and what calls must show.

    Attributes:
        port: 0: a free one.
        api_key: None: nothing.
    """

    host: str
    port: int
    api_key: str | None

    def check_free(self) -> None:
        """Raise OSError where no server can listen there, before anything is started."""
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        except socket.gaierror as error:
            raise OSError(f"--host {self.host}: this machine has no such address ({error.strerror})") from error
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(place)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise OSError(
                        f"port {self.port} of {self.host} is taken: end what listens there, or choose another --port "
                        "(0: a free one)"
                    ) from error
                raise OSError(f"--host {self.host} --port {self.port}: {error.strerror}") from error

    def url(self, port: int) -> str:
        """As clients write it."""
        host = socket.gethostname() if self.host in _EVERYWHERE else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def serve(
    service: Service, name: str, address: Address, started: Callable[[str], None], system: str | None = None
) -> None:
    """Answer until the task is cancelled; ``started`` gets the server's URL.

    Args:
        service: entered. Its tools are run for clients, where it has some.
        name: of the model.
        system: the system message of calls that have none.

    Raises:
        OSError: the port was taken meanwhile.
        ConfigError: the length of a context is not known.
    """
    config = service.config
    door = OpenDoor(
        config,
        context_length=context_length(config.rollout, config.model),
        api_key=address.api_key,
        tools=service.tools,
        system=system,
    )
    began = time.time()

    async def health(request: web.Request) -> web.Response:
        engines = [
            {"number": engine.number, "alive": engine.alive, "requests": engine.trajectories}
            for engine in service.pool.router.engines
        ]
        alive = any(engine["alive"] for engine in engines)
        status = {
            "status": "ok" if alive else "no engine is alive",
            "model": name,
            "engines": engines,
            "tools": service.tools.names if service.tools is not None else [],
            "calls": gateway.statistics.calls,
            "errors": dict(gateway.statistics.errors),
            "seconds": round(time.time() - began, 1),
        }
        return web.json_response(status, status=200 if alive else 503)

    gateway = Gateway(
        service.sampler,
        service.tokenizer,
        config.rollout.multi_turn,
        model=name,
        host=address.host,
        port=address.port,
        stop_strings=service.stop_strings,
        steers=service.steers,
        door=door,
        pages={HEALTH: health},
    )
    async with gateway:
        started(address.url(gateway.port))
        await asyncio.Event().wait()
