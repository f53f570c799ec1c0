"""What the loop's own tests put in the place of engines, learner and prompts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rich.console import Console

from megatron_retool.config import Config
from megatron_retool.loop.experience import Collected
from megatron_retool.runs.progress import Activities
from megatron_retool.runs.write_errors import WriteErrors


class Experience:
    """Collects without engines; a test says what in ``take``."""

    def __init__(self, *_: Any) -> None: ...

    async def __aenter__(self) -> Experience:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def take(self, step: int) -> Collected:
        raise NotImplementedError

    def weights_arrived(self) -> None: ...

    def at_checkpoint(self, collected: Collected) -> Collected:
        return collected


def run_of(config: Config, console: Console, total_steps: int) -> Any:
    """A deployment's part that the loop itself touches."""

    async def before_update() -> None:
        return None

    async def sync_weights(step: int) -> dict[str, float]:
        return {}

    return SimpleNamespace(
        config=config,
        console=console,
        write_errors=WriteErrors(console),
        activities=Activities(console),
        prompts=SimpleNamespace(epoch=0),
        watchdog=SimpleNamespace(watch=lambda timer: timer),
        weights=SimpleNamespace(before_update=before_update, sync=sync_weights),
        decode=lambda t: ("prompt", "response"),
        learner=None,
        critic=None,
        total_steps=total_steps,
    )
