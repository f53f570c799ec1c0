"""Learner and engines of a server of the Tinker protocol, started together and stopped together.

    async with TinkerDeployment(config, say) as processes:
        processes.learner, processes.sampler

Whatever happens, leaving the block stops every process that was started.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack

from megatron_retool.cluster.checks import check_model
from megatron_retool.cluster.deployment import gather_or_cancel
from megatron_retool.cluster.engine_group import EngineGroup
from megatron_retool.cluster.learner_failures import LearnerDied
from megatron_retool.cluster.learner_group import LearnerGroup
from megatron_retool.cluster.placement import plan_placement
from megatron_retool.cluster.runtime import node_ids, ray_runtime
from megatron_retool.config import Config, save_config
from megatron_retool.data.tokenizer import load_tokenizer
from megatron_retool.tinker.engine_sampler import EngineSampler
from megatron_retool.tinker.settings import finds_texts
from sglang_rollout.engine.pool import EnginePool
from sglang_rollout.engine.rollout_statistics import RolloutStatistics

FATAL = (LearnerDied,)
"""After these the learner cannot be asked again."""


class TinkerDeployment:
    """
    Args:
        config: of ``settings.server_config``.
        context: tokens of a prompt with its sample.
        say: prints a line for people.

    Attributes:
        learner: a ``trainer.Trainer``.
        sampler: a ``sampler.Sampler``.
    """

    learner: LearnerGroup
    sampler: EngineSampler

    def __init__(self, config: Config, context: int, say: Callable[[str], None]) -> None:
        self.config = config
        self._context, self._say = context, say
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> TinkerDeployment:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        config = self.config
        check_model(config, learns=True)
        tokenizer = load_tokenizer(config.model)
        placement = plan_placement(config)
        config.trainer.run_dir.mkdir(parents=True, exist_ok=True)
        save_config(config, config.trainer.run_dir / "config.yaml")
        engines, ranks = config.rollout.engine.count, config.learner.world_size
        self._say(
            f"starting {engines} engine{'s' if engines > 1 else ''} and the learner "
            f"({ranks} rank{'s' if ranks > 1 else ''}); logs: {config.trainer.run_dir / 'logs'}"
        )
        self._stack.enter_context(ray_runtime(config.cluster))
        placement = placement.on_nodes(node_ids(config.cluster))
        self._engines = EngineGroup(config, placement, tokenizer=finds_texts(config.model))
        self._stack.push_async_callback(self._engines.stop)
        self.learner = LearnerGroup(config, placement)
        self._stack.callback(self.learner.kill)
        # A step's learning rate is its caller's: the schedule's length means nothing.
        await gather_or_cancel([self._engines.start(config.model.path), self.learner.setup(1)])
        pool = EnginePool(
            self._engines.engine, self._engines.urls, config.rollout, RolloutStatistics(), self._restarted
        )
        self._stack.push_async_callback(pool.close)
        ends = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.sampler = EngineSampler(pool, ends, self._context)

    async def _restarted(self, url: str) -> str:
        """The engine at ``url``, which died, restarted; its new URL. Adapters are loaded again when they are used."""
        number = self._engines.number(url)
        assert number is not None  # no engine of this server is ever removed
        self._say(f"engine {number} ended: starting it again")
        self.sampler.forget_engine(url)
        result = await self._engines.restart(number, self.config.model.path)
        self.sampler.forget_engine(result)
        return result
