"""The learner's side of a weight sync: one connection that lasts from push to push."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_retool.config import Config
from sglang_rollout.engine.base import SyncReport, WeightSync
from sglang_rollout.engine.configured import make_engine
from sglang_rollout.engine.weight_sync.base import Bucket

_CONNECTION: WeightSync | None = None


def push_weights(buckets: Iterable[Bucket], engines: Sequence[str], version: int, config: Config) -> SyncReport:
    """``WeightSync.push`` with a connection that lasts: it is made again only when the engines changed or it failed."""
    global _CONNECTION
    if _CONNECTION is None or _CONNECTION.engines != list(engines):
        disconnect()
        _CONNECTION = make_weight_sync(config, engines)
    try:
        return _CONNECTION.push(buckets, version)
    except BaseException:
        disconnect()
        raise


def disconnect() -> None:
    """Give up the connection that ``push_weights`` keeps."""
    global _CONNECTION
    if _CONNECTION is not None:
        _CONNECTION.close()
        _CONNECTION = None


def make_weight_sync(config: Config, engines: Sequence[str]) -> WeightSync:
    """The configured engine's own way to ``engines`` (base URLs)."""
    return make_engine(config).weight_sync(engines)
