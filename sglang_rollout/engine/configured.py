"""The engine that a configuration names, and its check against the protocols of ``base`` before any process starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron_retool.config import Config
from megatron_retool.registry import ExtensionError, Registry
from sglang_rollout.engine.base import (
    AdapterClient,
    Engine,
    EngineClient,
    EngineServer,
    ProfilingClient,
    RankingClient,
    ScoringClient,
    WeightSync,
)

ENGINES: Registry[Callable[..., Any]] = Registry(
    "rollout.engine.backend",
    takes=("config",),
    built_in={
        "sglang": "sglang_rollout.engine.sglang_engine:SGLangEngine",
        "transformers": "sglang_rollout.engine.transformers_engine:TransformersEngine",
    },
)


def make_engine(config: Config) -> Engine:
    """The configured engine.

    Raises:
        ExtensionError: rollout.engine.backend names nothing that makes an engine with rollout.engine.backend_kwargs.
    """
    settings = config.rollout.engine
    bound = ENGINES.bind(settings.backend, settings.backend_kwargs)
    try:
        engine = bound(config)
    except ValueError:
        raise
    except Exception as error:
        raise ExtensionError(f"{bound.label} raised {type(error).__name__} when it was made: {error}") from error
    _check_parts(bound.label, engine, Engine)
    result: Engine = engine
    return result


def check_engine(config: Config) -> None:
    """Refuse an engine that does not follow the protocols, before any process starts.

    Raises:
        ExtensionError: as ``make_engine``; or a part lacks a method, or one has other parameters than its protocol; or
            the engine would have GPUs of several nodes, and cannot.
    """
    engine, label = make_engine(config), f"rollout.engine.backend={config.rollout.engine.backend}"
    size, per_node = config.rollout.engine.tensor_parallel_size, config.cluster.gpus_per_node
    if 0 < per_node < size and not getattr(engine, "spans", False):
        raise ExtensionError(
            f"{label} has no engine on several nodes (spans = True): rollout.engine.tensor_parallel_size={size} is "
            f"above cluster.gpus_per_node={per_node}: lower it"
        )
    log_file = config.trainer.run_dir / "logs" / "engine_0.log"
    made = "http://127.0.0.1:9"
    server: dict[str, Any] = {"model_path": config.model.path, "host": "127.0.0.1", "log_file": log_file}
    server |= {"tokenizer": False, "weights_from_sync": True, "gpu_ids": None}
    parts: list[tuple[str, type, Callable[[], object]]] = [
        ("server", EngineServer, lambda: engine.server(0, **server)),
        ("client", EngineClient, lambda: engine.client(made)),
    ]
    if config.rollout.engine.backend not in ENGINES.names:  # a built-in engine's imports torch, which takes a second
        parts.append(("weight_sync", WeightSync, lambda: engine.weight_sync([made])))
    for name, protocol, make in parts:
        try:
            part = make()
        except ValueError:
            raise
        except Exception as error:
            raise ExtensionError(f"{label}: its {name}(…) raised {type(error).__name__}: {error}") from error
        _check_parts(f"{label}: what its {name}(…) returned", part, protocol)
        if name == "client" and hasattr(part, "score"):
            _check_parts(f"{label}: what its {name}(…) returned", part, ScoringClient)
        if name == "client" and hasattr(part, "rank"):
            _check_parts(f"{label}: what its {name}(…) returned", part, RankingClient)
        if name == "client" and config.rollout.engine.adapters.max_rank:
            _check_parts(f"rollout.engine.adapters.max_rank above 0 with {label}", part, AdapterClient)
        if name == "client" and config.trainer.profiler.engines:
            _check_parts(f"trainer.profiler.engines=true with {label}", part, ProfilingClient)


def _check_parts(label: str, found: object, protocol: type) -> None:
    """Raise ExtensionError where ``found`` has not the methods of ``protocol``, to be called in the same way."""
    kind = type(found).__name__
    for name, member in {**dict.fromkeys(protocol.__annotations__), **vars(protocol)}.items():
        if name.startswith("_") and name not in ("__aenter__", "__aexit__"):
            continue
        # A property may need what only start() gives it: look at the class.
        if not hasattr(type(found), name) and name not in getattr(found, "__dict__", {}):
            raise ExtensionError(
                f"{label}: {kind} has no {name!r}: define what sglang_rollout.engine.base.{protocol.__name__} lists"
            )
        if not inspect.isfunction(member):
            continue
        own = getattr(found, name)
        if not callable(own):
            raise ExtensionError(f"{label}: {kind}.{name} is no method")
        wanted = list(inspect.signature(member).parameters.values())[1:]
        positions = [each.name for each in wanted if each.kind is each.POSITIONAL_OR_KEYWORD]
        keywords = [each.name for each in wanted if each.kind is each.KEYWORD_ONLY]
        try:
            inspect.signature(own).bind(*positions, **dict.fromkeys(keywords))
        except TypeError as error:
            raise ExtensionError(
                f"{label}: {kind}.{name}{inspect.signature(own)} cannot be called as {name}"
                f"{inspect.signature(member)}: {error}"
            ) from error
        except ValueError:
            continue
        if inspect.iscoroutinefunction(member) and not inspect.iscoroutinefunction(own):
            raise ExtensionError(f"{label}: {kind}.{name} must be a coroutine (async def)")
