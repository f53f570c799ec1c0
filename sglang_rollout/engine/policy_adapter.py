"""The policy as an adapter of the engines' model (learner.lora.sync=adapter): a name for each version.

An engine keeps a version as long as a request uses it. So a request ends on the weights that it began with, and nothing
waits for it; the next one takes the newest.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence


def adapter_name(version: int) -> str:
    """The name that engines know a version of the policy's adapter by."""
    return f"policy@{version}"


class PolicyAdapter:
    """Which version requests get, and which of the older ones can go. One for all clients of a run's engines, which
    belong to one event loop.

    Attributes:
        version: the newest; None: there is none yet, and requests get the engines' model.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self._loaded: defaultdict[str, set[int]] = defaultdict(set)
        self._users: Counter[tuple[str, int]] = Counter()

    @contextlib.contextmanager
    def used_at(self, url: str) -> Iterator[int | None]:
        """For the length of a request to the engine at ``url``: the version that it gets.

        None: the engine came back without it, since the learner was dead.
        """
        version = self.version
        if version is None or version not in self._loaded[url]:
            yield None
            return
        self._users[url, version] += 1
        try:
            yield version
        finally:
            self._users[url, version] -= 1

    def serve(self, version: int, urls: Sequence[str]) -> None:
        """The engines at ``urls`` have loaded ``version``, and requests are to get it from now on."""
        self.version = version
        for url in urls:
            self._loaded[url].add(version)

    def restarted(self, url: str) -> None:
        """The engine at ``url`` is a new one and has loaded nothing."""
        self._loaded.pop(url, None)

    def take_unused(self, url: str) -> list[int]:
        """Versions that the engine at ``url`` has, is not to serve and does not use: the caller unloads them."""
        unused = [
            version
            for version in sorted(self._loaded[url])
            if version != self.version and not self._users[url, version]
        ]
        self._loaded[url].difference_update(unused)
        return unused
