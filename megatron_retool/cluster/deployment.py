"""Everything a run consists of, started together and stopped together.

    async with Deployment(config, console) as run:
        run.learner, run.engines, run.rollout, run.rewards, run.prompts, ...

Starting checks what can be checked without processes first (data, tokenizer, placement), then starts sandbox, engines
and learner side by side. Whatever happens, leaving the block stops every process that was started.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType

from rich.console import Console

from megatron_retool.cluster.engine_group import EngineGroup
from megatron_retool.cluster.learner_group import LearnerGroup
from megatron_retool.cluster.placement import plan_placement
from megatron_retool.cluster.runtime import ray_runtime
from megatron_retool.config import Config, save_config
from megatron_retool.data.prompts import PromptSource, ValidationSet
from megatron_retool.data.tokenizer import load_tokenizer
from megatron_retool.rewards.manager import RewardManager
from megatron_retool.trajectory import Trajectory
from sglang_rollout.rollout_manager import RolloutManager
from tools.registry import ToolRegistry


class Deployment:
    """The run's processes and the objects that speak to them. ``with_learner=False`` serves the model for evaluation."""

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
