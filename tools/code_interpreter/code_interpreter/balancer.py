"""Which sandbox server a request goes to: the least busy one of those that answer.

Pure bookkeeping; the client sends requests and pings, and tells here what came of them. All methods belong to one
event loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field


@dataclass
class LoadCounts:
    """Since they were last taken. An attempt is one sending of a request to one server."""

    requests: int = 0
    """Attempts."""
    failures: int = 0
    """Attempts that brought no result: refused, dropped, silent, or the server was busy."""
    retries: int = 0
    """Attempts of requests that had failed before, here or at another server."""


@dataclass(eq=False)
class Server:
    """A server and its load."""

    url: str
    counts: LoadCounts
    up: bool = True
    """False from a failure of the connection until the next answer to a ping."""
    outstanding: int = 0
    """Requests that wait for its answer."""
    turn: int = field(default=0, repr=False)
    """When it was last chosen, in requests of the balancer."""


class Balancer:
    """The servers of a run, each under an index that stays its own when it is restarted at another address."""

    def __init__(self, urls: Iterable[str] = ()) -> None:
        self._servers: dict[int, Server] = {}
        self._counts: dict[int, LoadCounts] = {}
        self._turn = 0
        for index, url in enumerate(urls):
            self.put(index, url)

    @property
    def servers(self) -> list[Server]:
        """In order of their indices."""
        return [server for _, server in sorted(self._servers.items())]

    def put(self, index: int, url: str) -> Server:
        """Take a server in, in place of the one that had this index before."""
        self._servers[index] = Server(url, self._counts.setdefault(index, LoadCounts()))
        return self._servers[index]

    def drop(self, index: int) -> Server | None:
        """Forget a server that will not come back; it, where there was one."""
        return self._servers.pop(index, None)

    def choose(self, failed: Collection[Server] = ()) -> Server | None:
        """The server that the next attempt of a request goes to.

        Those that answer come before those that do not, those where the request has not ``failed`` yet before the
        others, then the one with the fewest outstanding requests, and of equals the one that was chosen longest ago.
        None where there is no server at all.
        """
        if not self._servers:
            return None
        chosen = min(self._servers.values(), key=lambda s: (not s.up, s in failed, s.outstanding, s.turn))
        self._turn += 1
        chosen.turn = self._turn
        return chosen

    def has_another(self, failed: Collection[Server]) -> bool:
        """Whether a server that answers has not failed the request."""
        return any(server.up and server not in failed for server in self._servers.values())

    def take_metrics(self) -> dict[str, float]:
        """tool/sandbox_<index>/<count> since the last call, and tool/sandboxes_up now."""
        metrics = {"tool/sandboxes_up": float(sum(server.up for server in self._servers.values()))}
        for index, counts in sorted(self._counts.items()):
            for name, value in vars(counts).items():
                metrics[f"tool/sandbox_{index}/{name}"] = float(value)
                setattr(counts, name, 0)
        return metrics
