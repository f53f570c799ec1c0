"""SGLang servers as engines."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conversion.files.directory import local_directory
from conversion.model.architecture import Architecture
from megatron_retool.config import Config
from sglang_rollout.engine.base import WeightSync
from sglang_rollout.engine.client import SGLangClient
from sglang_rollout.engine.process import SGLangServer
from sglang_rollout.engine.routed_experts import RoutingShape


class SGLangEngine:
    """``Engine`` for production: a server process each, asked over HTTP."""

    steers = True

    def __init__(self, config: Config) -> None:
        self.config = config
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
    ) -> SGLangServer:
        return SGLangServer(
            self.config.rollout.engine,
            model_path=model_path,
            host=host,
            log_file=log_file,
            tokenizer=tokenizer,
            weights_from_sync=weights_from_sync,
            colocated=self.config.cluster.placement == "colocated",
            gpu_ids=gpu_ids,
            families=self.config.model.families,
            routed_experts=self._routed_experts,
        )

    def client(self, base_url: str) -> SGLangClient:
        rollout = self.config.rollout
        return SGLangClient(
            base_url,
            retries=rollout.request_retries,
            timeout_seconds=rollout.request_timeout_seconds,
            routing=(lambda: self._routing_shape) if self._routed_experts else None,
        )

    @functools.cached_property
    def _routing_shape(self) -> RoutingShape:
        # A demo's model is made after its engine was checked.
        model = self.config.model
        return RoutingShape.of(Architecture.from_pretrained(local_directory(model.path), model.families))

    def weight_sync(self, base_urls: Sequence[str]) -> WeightSync:
        """The way that weight_sync.method names."""
        # The driver needs none of this, and importing it takes a while.
        from sglang_rollout.weight_sync.disk import DiskWeightSync
        from sglang_rollout.weight_sync.distributed import DistributedWeightSync
        from sglang_rollout.weight_sync.quantization import weight_conversion
        from sglang_rollout.weight_sync.tensor import TensorWeightSync

        config, settings = self.config, self.config.weight_sync
        common: dict[str, Any] = {
            "timeout_seconds": settings.timeout_seconds,
            "verify": settings.verify,
            "convert": weight_conversion(config),
        }
        if settings.method == "disk":
            directory = config.run_dir / "weight_sync"
            return DiskWeightSync(base_urls, directory=directory, model_path=config.model.path, **common)
        if settings.method == "tensor":
            return TensorWeightSync(base_urls, **common)
        return DistributedWeightSync(base_urls, **common)
