"""Sampling, the agent's turns, engines, partial rollout and branching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_retool.algorithms.settings import SamplingSettings
from megatron_retool.config.base import ConfigError, choice


@dataclass(frozen=True)
class SamplingConfig(SamplingSettings):
    n: int = 16


@dataclass(frozen=True)
class ValSamplingConfig(SamplingConfig):
    n: int = 30
    top_p: float = 0.6


@dataclass(frozen=True)
class ToolEntry:
    """One element of rollout.multi_turn.tools."""

    tool: str
    """A built-in of tools.registry, or package.module:object or path/to/file.py:object (a Tool class or a function)."""
    name: str | None = None
    """How the policy calls it; None: by the tool's own name."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the tool; a built-in's replace those of its section (tools.search, …) for this entry."""


@dataclass(frozen=True)
class MultiTurnConfig:
    format: str = "hermes"
    """"hermes", "retool", "arpo", or package.module:Class or path/to/file.py:Class of a ToolCallFormat."""
    format_kwargs: dict[str, Any] = field(default_factory=dict)
    max_assistant_turns: int = 8
    max_tool_calls: int = 8
    max_tool_response_tokens: int = 512
    """Longer tool results lose their middle, and say so."""
    max_wall_seconds: float = 3600.0
    tools: list[Any] = field(default_factory=lambda: ["code_interpreter"])
    """Built-in names, targets (package.module:object, path/to/file.py:object), or mappings {tool, name, kwargs}."""

    @property
    def uses_code_interpreter(self) -> bool:
        """Whether one of the tools is the built-in code interpreter, which needs a server."""
        return any(entry.tool == "code_interpreter" for entry in tool_entries(self.tools))


def tool_entries(tools: Sequence[Any]) -> list[ToolEntry]:
    """rollout.multi_turn.tools in its long form.

    Raises:
        ConfigError: an element is neither a name nor a mapping of ToolEntry's keys.
    """
    entries = []
    for index, item in enumerate(tools):
        key = f"rollout.multi_turn.tools[{index}]"
        given = {"tool": item} if isinstance(item, str) else item
        if not isinstance(given, Mapping) or not isinstance(given.get("tool"), str):
            raise ConfigError(f"{key}={item!r} must be a name, or a mapping {{tool: <name>, kwargs: {{…}}}}")
        unknown = sorted(set(given) - {"tool", "name", "kwargs"}, key=str)
        if unknown:
            raise ConfigError(f"{key}.{unknown[0]} is unknown: the keys are tool, name and kwargs; settings are kwargs")
        name, kwargs = given.get("name"), given.get("kwargs") or {}
        if name is not None and not (isinstance(name, str) and name):
            raise ConfigError(f"{key}.name={name!r} must be text")
        if not isinstance(kwargs, Mapping) or not all(isinstance(each, str) for each in kwargs):
            raise ConfigError(f"{key}.kwargs={kwargs!r} must be a mapping of settings")
        entries.append(ToolEntry(given["tool"], name, dict(kwargs)))
    return entries


@dataclass(frozen=True)
class EngineConfig:
    backend: str = "sglang"
    """"sglang", "transformers" (one slow model in the driver, for debugging: it takes new weights from files in the
    run's directory, whatever weight_sync.method), or package.module:Class or path/to/file.py:Class that follows
    sglang_rollout.engine.base.Engine."""
    backend_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that class."""
    count: int = 1
    """Engines, each with all weights (data parallelism)."""
    tensor_parallel_size: int = 1
    device: str = choice("auto", "cpu", "cuda")
    dtype: str = choice("auto", "float32", "bfloat16", "float16")
    quantization: str | None = None
    """None or "fp8": with fp8 the weights are block-quantised (128x128, e4m3) at every sync."""
    mem_fraction_static: float = 0.7
    max_total_tokens: int | None = None
    """KV-cache size in tokens; None lets SGLang choose. Set it on CPU."""
    max_running_requests: int = 256
    context_length: int | None = None
    random_seed: int | None = None
    start_timeout_seconds: float = 600.0
    health_timeout_seconds: float = 60.0
    extra_args: list[str] = field(default_factory=list)
    """Passed to sglang.launch_server as they are."""


@dataclass(frozen=True)
class PartialRolloutConfig:
    enable: bool = False
    over_sampling_factor: float = 1.0
    """Groups started for each group needed."""
    max_age: int = 1
    """Steps that a paused trajectory may wait before it is dropped."""
    mask_older_tokens: bool = False
    """True: tokens of older weight versions give no loss. False: the rollout correction weighs them."""


@dataclass(frozen=True)
class BranchingConfig:
    """ARPO entropy-guided branching (arXiv:2507.19849, section 3.1)."""

    enable: bool = False
    initial_rollouts: int = 8
    beam_size: int = 2
    branch_probability: float = 0.5
    entropy_weight: float = 0.2
    threshold: float = 0.5
    entropy_tokens: int = 20
    timing: str = choice("after_tool_result", "before_tool_result")
    advantage: str = choice("soft", "hard")


@dataclass(frozen=True)
class RolloutConfig:
    train: SamplingConfig = field(default_factory=SamplingConfig)
    val: ValSamplingConfig = field(default_factory=ValSamplingConfig)
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    agent: str = "tool_calling"
    """What drives a trajectory: "tool_calling", or package.module:Class or path/to/file.py:Class of an Agent."""
    agent_kwargs: dict[str, Any] = field(default_factory=dict)
    engine: EngineConfig = field(default_factory=EngineConfig)
    partial: PartialRolloutConfig = field(default_factory=PartialRolloutConfig)
    branching: BranchingConfig = field(default_factory=BranchingConfig)
    max_concurrent_trajectories: int = 512
    """Per engine."""
    request_retries: int = 3
    request_timeout_seconds: float = 3600.0
    replay_dir: str | None = None
    """A run's rollouts/ directory: take the stored trajectories of each step instead of generating."""
    staleness: int = 0
    """Weight updates by which generation may run ahead of training; 0 is strictly on-policy."""

    def check(self) -> None:
        """Raise ConfigError where settings of this section contradict each other."""
        if self.train.temperature <= 0:
            raise ConfigError(
                f"rollout.train.temperature={self.train.temperature}: greedy decoding has no distribution to learn from"
            )
        train = self.train
        if train.top_k > 0 and train.top_p < 1 and train.min_p > 0:
            raise ConfigError(
                f"rollout.train: top_k={train.top_k}, top_p={train.top_p} and min_p={train.min_p} together: SGLang "
                "then takes top_p of what top_k left instead of the whole distribution, and the learner's log-probs "
                "would be of another distribution than the sampled one. Set one of them to its neutral value "
                "(top_k=-1, top_p=1, min_p=0)"
            )
        tool_entries(self.multi_turn.tools)
        if self.engine.count < 1:
            raise ConfigError(f"rollout.engine.count={self.engine.count} must be at least 1")
        if self.partial.over_sampling_factor < 1:
            raise ConfigError(f"rollout.partial.over_sampling_factor={self.partial.over_sampling_factor} is below 1")
        if self.branching.enable and self.branching.initial_rollouts > self.train.n:
            raise ConfigError("rollout.branching.initial_rollouts exceeds the budget rollout.train.n")
