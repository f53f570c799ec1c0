"""Everything a run consists of, started together and stopped together.

    async with Deployment(config, console) as run:
        run.learner, run.engines, run.rollout, run.rewards, run.prompts, ...

Starting checks what can be checked without processes first (data, tokenizer, placement), then starts sandbox, engines
and learner side by side. Whatever happens, leaving the block stops every process that was started.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import TracebackType

from rich.console import Console
from sglang_rollout.rollout_manager import RolloutManager

from megatron_retool.cluster.engine_group import EngineGroup
from megatron_retool.cluster.learner_group import LearnerGroup
from megatron_retool.config import Config
from megatron_retool.data.prompts import PromptSource, ValidationSet
from megatron_retool.rewards.manager import RewardManager


class Deployment:
    """The run's processes and the objects that speak to them. ``with_learner=False``: engines and tools alone."""

    learner: LearnerGroup
    engines: EngineGroup
    rollout: RolloutManager
    rewards: RewardManager
    prompts: PromptSource
    validation_prompts: ValidationSet
    total_steps: int

    def __init__(self, config: Config, console: Console, *, with_learner: bool = True) -> None:
        self.config = config
        self.console = console
        self.with_learner = with_learner
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Deployment:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
