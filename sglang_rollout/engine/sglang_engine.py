"""SGLang servers as engines."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from conversion.files.directory import local_directory
from conversion.model.architecture import Architecture
from conversion.model.model_operators import OPERATORS
from megatron_retool.config import Config, EngineConfig
from sglang_rollout.engine.base import EngineClientError, EnginePart, WeightSync
from sglang_rollout.engine.client import SGLangClient
from sglang_rollout.engine.policy_adapter import PolicyAdapter, adapter_name
from sglang_rollout.engine.process import SGLangServer
from sglang_rollout.engine.routed_experts import RoutingShape

logger = logging.getLogger(__name__)


class SGLangEngine:
    """``Engine`` for production: a server process each, asked over HTTP."""

    spans = steers = True

    def __init__(self, config: Config) -> None:
        self.config = config
        self._policy = PolicyAdapter() if config.learner.lora.sends_adapter else None
        self._routed_experts = config.learner.routing_replay == "rollout"

    def server(
        self,
        index: int,
        *,
        model_path: str,
        host: str,
        log_file: Path,
        tokenizer: bool,
        weights_from_sync: bool,
        gpu_ids: Sequence[str] | None,
        part: EnginePart | None = None,
    ) -> SGLangServer:
        """The server's process of engine ``index``, not started."""
        # Without a learner the model has everything in it.
        of_adapters = weights_from_sync and self._policy is not None
        return SGLangServer(
            self._engine_of_adapters() if of_adapters else self.config.rollout.engine,
            model_path=model_path,
            host=host,
            log_file=log_file,
            tokenizer=tokenizer,
            weights_from_sync=weights_from_sync,
            colocated=self.config.cluster.placement == "colocated",
            gpu_ids=gpu_ids,
            part=part,
            families=self.config.model.families,
            routed_experts=self._routed_experts,
            weights_stay=of_adapters,
            exact_operators=OPERATORS if self.config.learner.match_engine == "exact" else (),
        )

    def _engine_of_adapters(self) -> EngineConfig:
        """rollout.engine with room for the policy's adapter beside those that it has room for."""
        engine, lora = self.config.rollout.engine, self.config.learner.lora
        own = engine.adapters.targets if engine.adapters.max_rank else []
        targets = [target for target in lora.targets if target != "experts"]
        adapters = replace(
            engine.adapters,
            max_rank=max(engine.adapters.max_rank, lora.rank),
            targets=list(dict.fromkeys([*targets, *own])),
        )
        return replace(engine, adapters=adapters)

    def client(self, base_url: str) -> SGLangClient:
        """A client of the server at ``base_url``."""
        rollout = self.config.rollout
        return SGLangClient(
            base_url,
            retries=rollout.request_retries,
            timeout_seconds=rollout.request_timeout_seconds,
            routing=(lambda: self._routing_shape) if self._routed_experts else None,
            policy=self._policy,
        )

    async def serve(self, version: int, urls: Sequence[str]) -> None:
        """``AdapterEngine.serve``"""
        if self._policy is None:
            return
        self._policy.serve(version, urls)
        await asyncio.gather(*(self._unload_unused(url, self._policy.take_unused(url)) for url in urls))

    def restarted(self, url: str) -> None:
        """``AdapterEngine.restarted``"""
        if self._policy is not None:
            self._policy.restarted(url)

    async def _unload_unused(self, url: str, versions: Sequence[int]) -> None:
        async with self.client(url) as client:
            for version in versions:
                try:
                    await client.unload_adapter(adapter_name(version))
                except EngineClientError as error:
                    # What becomes of the engine is for those to say who sample from it.
                    logger.warning("version %d of the policy's adapter stays loaded: %s", version, error)

    @functools.cached_property
    def _routing_shape(self) -> RoutingShape:
        # A demo's model is made after its engine was checked.
        model = self.config.model
        return RoutingShape.of(Architecture.from_pretrained(local_directory(model.path), model.families))

    def weight_sync(self, base_urls: Sequence[str]) -> WeightSync:
        """The way that weight_sync.method names."""
        # The driver needs none of this, and importing it takes a while.
        from sglang_rollout.engine.weight_sync.adapter import AdapterWeightSync
        from sglang_rollout.engine.weight_sync.delta import DeltaEncoder
        from sglang_rollout.engine.weight_sync.disk import DiskWeightSync
        from sglang_rollout.engine.weight_sync.distributed import DistributedWeightSync
        from sglang_rollout.engine.weight_sync.quantization import weight_conversion
        from sglang_rollout.engine.weight_sync.sharded import ShardedWeightSync
        from sglang_rollout.engine.weight_sync.tensor import TensorWeightSync

        config, settings = self.config, self.config.weight_sync
        common: dict[str, Any] = {
            "timeout_seconds": settings.timeout_seconds,
            "verify": settings.verify,
            "convert": weight_conversion(config.weight_sync, config.model, config.rollout),
        }
        directory = config.trainer.run_dir / "weight_sync"
        if config.learner.lora.sends_adapter:
            lora, method = config.learner.lora, settings.method
            del common["convert"]
            return AdapterWeightSync(base_urls, settings=lora, method=method, directory=directory, **common)
        if settings.method == "disk":
            return DiskWeightSync(base_urls, directory=directory, model_path=config.model.path, **common)
        if settings.method == "sharded":
            return ShardedWeightSync(base_urls, **common)
        if settings.delta:
            # What an engine makes of a change is compared each time: an error would stay in all later weights.
            common |= {"delta": DeltaEncoder(settings.delta_whole_every), "verify": True}
        common["draft"] = config.trains_draft
        if settings.method == "tensor":
            return TensorWeightSync(base_urls, **common)
        return DistributedWeightSync(base_urls, **common)
