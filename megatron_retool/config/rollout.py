"""Sampling, the agent's turns, engines, partial rollout and branching."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conversion.model.adapter_map import TARGETS
from megatron_retool.algorithms.settings import SamplingSettings
from megatron_retool.config.base import ConfigError, at_least_one, choice, fraction, not_negative, number, positive


@dataclass(frozen=True)
class SamplingConfig(SamplingSettings):
    """Sampling of responses that are trained on."""

    n: int = at_least_one(16, maximum=1_000_000)
    """Responses to each prompt."""


@dataclass(frozen=True)
class ValSamplingConfig(SamplingConfig):
    """Sampling of validations."""

    n: int = at_least_one(30, maximum=1_000_000)
    """Responses to each prompt, over which mean, best and majority are taken."""
    top_p: float = number(0.6, above=0, maximum=1)
    """Sample from the most probable tokens that make up this probability."""


@dataclass(frozen=True)
class QuickValConfig:
    """What differs in quick validations (trainer.quick_test_freq)."""

    n: int = at_least_one(4, maximum=1_000_000)
    """Responses to each prompt; they are sampled as rollout.val says."""


@dataclass(frozen=True)
class ToolEntry:
    """One element of rollout.multi_turn.tools."""

    tool: str
    """A built-in of tools.registry, or package.module:object or path/to/file.py:object (a Tool class or a function)."""
    name: str | None = None
    """How the policy calls it; None: by the tool's own name."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the tool; a built-in's replace those of its section (tools.search, …) for this entry."""
    timeout_seconds: float = 600.0
    """Longest call of a tool of one's own, in seconds; built-in tools have limits in their settings."""


@dataclass(frozen=True)
class MultiTurnConfig:
    """Turns, tool calls, and their limits."""

    format: str = "hermes"
    """"hermes", "qwen3_coder", "seed_oss", "minimax_m2", "deepseek_v3", "llama3", "glm45", "harmony", "retool", "arpo"
    (docs/extending.md), or package.module:Class or path/to/file.py:Class of a ToolCallFormat."""
    format_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that class."""
    max_assistant_turns: int = at_least_one(8)
    """Turns of the policy in one response."""
    max_tool_calls: int = not_negative(8)
    """Calls in one response; further ones end it."""
    at_tool_limit: str = choice("stop", "append_eos")
    """What follows the turn whose calls exceed max_tool_calls, or that is the last of max_assistant_turns: nothing, or
    an end-of-turn token that the policy did not sample and that gives no loss (docs/algorithms.md)."""
    max_tool_response_tokens: int = at_least_one(512)
    """Longer tool results lose their middle, and say so."""
    max_wall_seconds: float = positive(3600.0)
    """For one response, tools included; then it ends as it is."""
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
        unknown = sorted(set(given) - {"tool", "name", "kwargs", "timeout_seconds"}, key=str)
        if unknown:
            raise ConfigError(
                f"{key}.{unknown[0]} is unknown: the keys are tool, name and kwargs, where settings stand, and "
                "timeout_seconds of a tool of your own"
            )
        name, kwargs = given.get("name"), given.get("kwargs") or {}
        if name is not None and not (isinstance(name, str) and name):
            raise ConfigError(f"{key}.name={name!r} must be text")
        if not isinstance(kwargs, Mapping) or not all(isinstance(each, str) for each in kwargs):
            raise ConfigError(f"{key}.kwargs={kwargs!r} must be a mapping of settings")
        seconds = given.get("timeout_seconds", ToolEntry.timeout_seconds)
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds <= 86400:
            raise ConfigError(f"{key}.timeout_seconds={seconds!r} must be a number of seconds above 0, at most 86400")
        entries.append(ToolEntry(given["tool"], name, dict(kwargs), float(seconds)))
    return entries


DRAFT_MODEL_ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE")


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding: tokens are guessed cheaply, and the policy checks several in one pass. What is sampled, and
    its log-probs, are the policy's own. For few long responses at a time; needs a GPU."""

    algorithm: str | None = choice(None, "NGRAM", *DRAFT_MODEL_ALGORITHMS)
    """Who guesses. NGRAM: what followed the same tokens before, without a model. EAGLE, EAGLE3: a head trained for the
    model; STANDALONE: a smaller model. null: no draft."""
    draft_model_path: str | None = None
    """Hugging Face directory of the head or smaller model. It stays as it is while the policy learns, unless it is
    model.path, whose layers for multi-token prediction learner.mtp.train trains: syncs then bring them too."""
    num_steps: int | None = at_least_one(None, maximum=64)
    """Passes of the draft model for each check; null lets SGLang choose."""
    eagle_topk: int | None = at_least_one(None, maximum=64)
    """Guesses that each pass continues from; null lets SGLang choose."""
    num_draft_tokens: int | None = at_least_one(None, maximum=256)
    """Tokens that are checked together; null lets SGLang choose."""

    def check(self, key: str) -> None:
        """Raise ConfigError where settings of this section, which ``key`` names, contradict each other."""
        if self.algorithm is None:
            for name in ("draft_model_path", "num_steps", "eagle_topk", "num_draft_tokens"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{key}.{name}={getattr(self, name)} needs {key}.algorithm")
        drafted = self.algorithm in DRAFT_MODEL_ALGORITHMS
        if drafted and self.draft_model_path is None:
            raise ConfigError(f"{key}.algorithm={self.algorithm} needs {key}.draft_model_path")
        if self.algorithm == "NGRAM":
            for name in ("draft_model_path", "num_steps", "eagle_topk"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{key}.{name}={getattr(self, name)}: NGRAM has no draft model: set it to null")


@dataclass(frozen=True)
class EngineAdaptersConfig:
    """Low-rank adapters (LoRA) that engines load and unload while they run, many of them on one base model."""

    max_rank: int = not_negative(0, maximum=4096)
    """Largest rank that an engine takes; 0: no adapters. learner.lora.sync=adapter sets what it needs by itself."""
    targets: list[str] = field(default_factory=lambda: ["attention", "mlp"])
    """Which matrices adapters may have, as learner.lora.targets; those of experts are not among them."""
    per_batch: int = at_least_one(4, maximum=1024)
    """Adapters whose requests are computed together; the model without an adapter counts as one. Each has memory on
    the GPUs for max_rank. Requests of further ones wait."""
    backend: str = choice("auto", "csgmv", "triton", "torch_native")
    """SGLang's kernels. auto: csgmv on GPUs, torch_native on a CPU, which has no others."""

    def check(self, key: str, device: str) -> None:
        """Raise ConfigError where settings of this section, which ``key`` names, contradict each other."""
        known = tuple(target for target in TARGETS if target != "experts")
        if not self.targets or len(set(self.targets)) != len(self.targets) or not set(self.targets) <= set(known):
            raise ConfigError(f"{key}.targets={self.targets}: name one or more of {', '.join(known)}, each once")
        if device == "cpu" and self.backend not in ("auto", "torch_native"):
            raise ConfigError(
                f"{key}.backend={self.backend} needs CUDA, and rollout.engine.device=cpu: set it to torch_native"
            )


@dataclass(frozen=True)
class EngineConfig:
    """The inference engines."""

    backend: str = "sglang"
    """"sglang", "transformers" (one slow model in the driver, for debugging: it takes new weights from files in the
    run's directory, whatever weight_sync.method), or package.module:Class or path/to/file.py:Class that follows
    sglang_rollout.engine.base.Engine."""
    backend_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that class."""
    count: int = at_least_one(1, maximum=100_000)
    """Engines, each with all weights (data parallelism)."""
    tensor_parallel_size: int = at_least_one(1, maximum=1024)
    """GPUs that share the weights of one engine: of one node, or all of several."""
    expert_parallel_size: int | None = at_least_one(None, maximum=1024)
    """Groups of those GPUs that have experts of their own, in a mixture of experts; null: every GPU is one (on a CPU
    none). It divides tensor_parallel_size. Above 1 weight_sync.verify has no checksums."""
    attention_data_parallel_size: int = at_least_one(1, maximum=1024)
    """Groups of those GPUs that have requests and KV cache of their own: for models with fewer key-value heads than
    tensor_parallel_size, whose cache would be kept several times. It divides tensor_parallel_size. Attention and
    embedding are then in memory once for each group."""
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    """Speculative decoding."""
    adapters: EngineAdaptersConfig = field(default_factory=EngineAdaptersConfig)
    """Adapters that engines load while they run."""
    device: str = choice("auto", "cpu", "cuda")
    """auto: cuda where there is a GPU."""
    dtype: str = choice("auto", "float32", "bfloat16", "float16")
    """Of weights and activations; auto: that of model.path."""
    quantization: str | None = choice(None, "fp8")
    """With fp8 the weights are block-quantised (128x128, e4m3) at every sync."""
    mem_fraction_static: float = number(0.7, above=0, below=1)
    """Share of a GPU's memory for weights and KV cache."""
    max_total_tokens: int | None = at_least_one(None)
    """KV-cache size in tokens; null: SGLang's choice, on a CPU 32768, or context_length where that is more."""
    max_running_requests: int = at_least_one(256)
    """Requests that one engine decodes at the same time."""
    context_length: int | None = at_least_one(None)
    """Tokens of prompt and response together; null: the model's own limit."""
    random_seed: int | None = not_negative(None, maximum=2**31 - 1)
    """Seed of every response's sampling, and deterministic kernels; null: responses differ from run to run."""
    threads: int = at_least_one(1, maximum=1024)
    """CPU threads of an engine without CUDA, of each of its ranks; a seeded one takes 1."""
    start_timeout_seconds: float = positive(600.0)
    """For an engine to answer after its start."""
    health_timeout_seconds: float = positive(60.0)
    """For an engine that does not answer a request to show that it lives; then it is replaced."""
    extra_args: list[str] = field(default_factory=list)
    """Passed to sglang.launch_server as they are."""

    def check(self) -> None:
        """Raise ConfigError where settings of this section contradict each other."""
        key = "rollout.engine"
        for name in ("expert_parallel_size", "attention_data_parallel_size"):
            size = getattr(self, name) or 1
            if self.tensor_parallel_size % size:
                raise ConfigError(
                    f"{key}.{name}={size} must divide {key}.tensor_parallel_size={self.tensor_parallel_size}"
                )
            if size > 1 and self.device == "cpu":
                raise ConfigError(f"{key}.{name}={size} needs CUDA, and {key}.device=cpu: set it to 1")
        self._check_own_settings_are_used(key)
        self.speculative.check(f"{key}.speculative")
        self.adapters.check(f"{key}.adapters", self.device)
        self._check_adapters(key)
        if self.speculative.algorithm is None:
            return
        said = f"{key}.speculative.algorithm={self.speculative.algorithm}"
        if self.device == "cpu":
            raise ConfigError(
                f"{said} needs CUDA: on a CPU SGLang checks guesses by the most probable token, whatever the "
                "temperature, and the samples would not be the policy's. Set it to null"
            )
        if self.random_seed is not None:
            raise ConfigError(
                f"{said}: what is guessed depends on which requests run together, so an engine with "
                f"{key}.random_seed (trainer.deterministic) would not repeat itself: set one of them to null"
            )
        if self.attention_data_parallel_size > 1:
            raise ConfigError(
                f"{said} does not go with {key}.attention_data_parallel_size={self.attention_data_parallel_size}: "
                "SGLang has draft models for one group only. Use one of them"
            )

    def _check_adapters(self, key: str) -> None:
        if not self.adapters.max_rank:
            return
        if self.backend == "transformers":
            raise ConfigError(
                f"{key}.adapters.max_rank={self.adapters.max_rank}: {key}.backend=transformers loads no adapters: set "
                f"it to 0, or {key}.backend=sglang"
            )
        if self.attention_data_parallel_size > 1:
            raise ConfigError(
                f"{key}.adapters.max_rank={self.adapters.max_rank} does not go with "
                f"{key}.attention_data_parallel_size={self.attention_data_parallel_size}: SGLang then lets no adapter "
                "be unloaded while it runs. Set one of them to its default"
            )

    def _check_own_settings_are_used(self, key: str) -> None:
        for argument in self.extra_args:
            flag = argument.partition("=")[0]
            if flag.startswith("--speculative-accept-threshold"):
                raise ConfigError(
                    f"{key}.extra_args: {flag} accepts guesses that the policy would not have sampled as often, while "
                    "their log-probs are the policy's: leave it out"
                )
            if flag in KEY_ARGUMENTS:
                raise ConfigError(
                    f"{key}.extra_args: {flag} does not go with the key that every engine gets for itself: leave it out"
                    + (", and give the file's lines as arguments" if flag == "--config" else "")
                )
            if ours := SETTINGS_OF_ARGUMENTS.get(flag):
                raise ConfigError(
                    f"{key}.extra_args: {flag} is the setting {key}.{ours} here, with its checks: use that"
                )


KEY_ARGUMENTS = (
    "--api-key",
    "--admin-api-key",
    "--config",
    "--grpc-port",
    "--grpc-mode",
    "--smg-grpc-mode",
    "--encoder-only",
    "--tokenizer-worker-num",
    "--use-ray",
)
"""Arguments of SGLang that replace the key, or start a server that does not ask for it."""
SETTINGS_OF_ARGUMENTS = {
    **dict.fromkeys(("--enable-lora", "--max-lora-rank"), "adapters.max_rank"),
    "--lora-target-modules": "adapters.targets",
    "--max-loras-per-batch": "adapters.per_batch",
    "--lora-backend": "adapters.backend",
    **dict.fromkeys(("--ep-size", "--expert-parallel-size", "--ep"), "expert_parallel_size"),
    **dict.fromkeys(
        ("--attn-dp-size", "--attention-data-parallel-size", "--enable-dp-attention"), "attention_data_parallel_size"
    ),
    **dict.fromkeys(("--dp-size", "--data-parallel-size"), "count"),
    "--speculative-algorithm": "speculative.algorithm",
    "--speculative-draft-model-path": "speculative.draft_model_path",
    "--speculative-draft-model": "speculative.draft_model_path",
    "--speculative-num-steps": "speculative.num_steps",
    "--speculative-eagle-topk": "speculative.eagle_topk",
    "--speculative-num-draft-tokens": "speculative.num_draft_tokens",
}
"""Arguments of SGLang that have rules here: data parallel replicas take no new weights, for one."""


@dataclass(frozen=True)
class PartialRolloutConfig:
    """Pausing long responses."""

    enable: bool = False
    """Responses that are not finished when a step has its groups are paused, and continue in the next step.
    Their tool calls run on meanwhile and are not made again."""
    over_sampling_factor: float = number(1.25, minimum=1, maximum=1000)
    """Groups started for each group needed. Without dynamic sampling 1 leaves nothing to pause."""
    max_age: int = not_negative(2)
    """Steps that a paused trajectory may wait before it is dropped."""
    mask_older_tokens: bool = False
    """True: tokens of older weight versions give no loss. False: the rollout correction weighs them."""


@dataclass(frozen=True)
class BranchingConfig:
    """ARPO entropy-guided branching (arXiv:2507.19849, section 3.1)."""

    enable: bool = False
    """Fork responses where a tool's result makes the policy less certain."""
    initial_rollouts: int = at_least_one(8, maximum=1_000_000)
    """Responses that a group of rollout.train.n starts with; the others are forks."""
    beam_size: int = at_least_one(2, maximum=1024)
    """Responses that one becomes at a fork, itself included."""
    branch_probability: float = fraction(0.5)
    """Of a fork where the entropy does not change (alpha)."""
    entropy_weight: float = number(0.2)
    """What a change of the entropy adds to that probability (beta)."""
    threshold: float = number(0.5)
    """after_tool_result: a probability above it forks."""
    entropy_tokens: int = at_least_one(20)
    """Tokens at the start of a turn over which the entropy is summed."""
    timing: str = choice("after_tool_result", "before_tool_result")
    """Whether the turn after a tool's result is measured, as in the paper, or the one before, as in its code."""
    entropy_change: str = choice("authors_code", "paper")
    """How the entropy's change enters the probability. authors_code: sums over the tokens, divided by log V, V the
    vocabulary size; a fork compares with the first turn of its own. paper: the sum of the differences token by token,
    divided by V; a fork compares with what its parent began with."""
    advantage: str = choice("soft", "hard")
    """hard: tokens that forks share get the mean of their advantages."""


@dataclass(frozen=True)
class AgentLimitsConfig:
    """Of agents that are functions or programs; a rollout beyond one ends, and is counted (docs/agents.md)."""

    max_concurrent: int | None = at_least_one(None, maximum=10_000_000)
    """Agents at work at a time; the others wait, which is not their time. null: as many asynchronous functions as the
    engines take (rollout.max_concurrent_trajectories for each), and 64 programs or functions in threads."""
    max_calls: int = at_least_one(1000)
    """Answers of the model in one rollout."""
    max_sampled_tokens: int | None = at_least_one(None)
    """Tokens of all answers together; null: no limit."""
    memory_mb: int = at_least_one(4096)
    """Resident memory of a program and all that it starts."""
    max_processes: int = at_least_one(256)
    """Processes of a program."""


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling, the agent's turns, engines, partial rollout and branching."""

    train: SamplingConfig = field(default_factory=SamplingConfig)
    """Sampling of the responses that are trained on."""
    val: ValSamplingConfig = field(default_factory=ValSamplingConfig)
    """Sampling of validations."""
    quick_val: QuickValConfig = field(default_factory=QuickValConfig)
    """What differs in quick validations (trainer.quick_test_freq)."""
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    """Turns, tools and how they are called."""
    agent: Any = "tool_calling"
    """What drives a trajectory: "tool_calling"; package.module:object or path/to/file.py:object, an Agent's class or a
    function run(task, client); or {command: …}, a program that speaks a model's API (docs/agents.md)."""
    agent_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that class or function."""
    agent_limits: AgentLimitsConfig = field(default_factory=AgentLimitsConfig)
    """What one rollout of a function or program may use, besides rollout.multi_turn.max_wall_seconds."""
    environment: str | None = None
    """Leads trajectories in place of tools and reward function: package.module:Class or path/to/file.py:Class of an
    Environment, or a built-in of sglang_rollout.environments (docs/environments.md); null: none does."""
    environment_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that class."""
    environment_timeout_seconds: float = positive(60.0, maximum=86400)
    """For one answer of the environment; then the trajectory ends, and is counted."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """The inference engines."""
    partial: PartialRolloutConfig = field(default_factory=PartialRolloutConfig)
    """Pausing long responses."""
    branching: BranchingConfig = field(default_factory=BranchingConfig)
    """Entropy-guided forks."""
    max_concurrent_trajectories: int = at_least_one(512)
    """Responses that are under way at the same time, for each engine."""
    request_retries: int = not_negative(3, maximum=1000)
    """Further attempts at a request that an engine did not answer."""
    request_timeout_seconds: float = positive(3600.0)
    """For one request to an engine."""
    replay_dir: str | None = None
    """A run's rollouts/ directory: take the stored trajectories of each step instead of generating."""
    staleness: int = not_negative(0, maximum=1000)
    """Weight updates by which generation may run ahead of training; 0 is strictly on-policy."""

    @property
    def command(self) -> list[str]:
        """The program of ``agent`` with its arguments.

        Raises:
            ConfigError: ``agent`` is neither text nor a mapping with a command.
        """
        given = self.agent.get("command") if isinstance(self.agent, Mapping) and len(self.agent) == 1 else None
        words = shlex.split(given) if isinstance(given, str) else given
        if not isinstance(words, Sequence) or not words or not all(isinstance(word, str) for word in words):
            raise ConfigError(
                f"rollout.agent={self.agent!r} must be a name, package.module:object, path/to/file.py:object, or "
                "{command: [program, argument, …]}"
            )
        if self.agent_kwargs:
            raise ConfigError("rollout.agent_kwargs: a program takes none; write its arguments into the command")
        return list(words)

    def check(self) -> None:
        """Raise ConfigError where settings of this section contradict each other."""
        if self.train.temperature <= 0:
            raise ConfigError(
                f"rollout.train.temperature={self.train.temperature}: greedy decoding has no distribution to learn from"
            )
        if self.engine.random_seed is not None and self.engine.threads > 1:
            raise ConfigError(
                f"rollout.engine.threads={self.engine.threads}: threads share a product out by its rows, so a seeded "
                "engine (rollout.engine.random_seed, trainer.deterministic) would not repeat itself: set threads to 1"
            )
        self.engine.check()
        self._check_speculative()
        train = self.train
        if train.top_k > 0 and train.top_p < 1 and train.min_p > 0:
            raise ConfigError(
                f"rollout.train: top_k={train.top_k}, top_p={train.top_p} and min_p={train.min_p} together: SGLang "
                "then takes top_p of what top_k left instead of the whole distribution, and the learner's log-probs "
                "would be of another distribution than the sampled one. Set one of them to its neutral value "
                "(top_k=-1, top_p=1, min_p=0)"
            )
        tool_entries(self.multi_turn.tools)
        self._check_environment()
        if not isinstance(self.agent, str):
            self.command  # noqa: B018
        if self.branching.enable and self.branching.initial_rollouts > self.train.n:
            raise ConfigError("rollout.branching.initial_rollouts exceeds the budget rollout.train.n")

    def _check_environment(self) -> None:
        if self.environment is None:
            if self.environment_kwargs:
                raise ConfigError("rollout.environment_kwargs needs rollout.environment")
            return
        said = f"rollout.environment={self.environment}"
        if self.agent != "tool_calling" or self.agent_kwargs:
            raise ConfigError(f"{said} leads the built-in agent: leave rollout.agent and rollout.agent_kwargs unset")
        if self.multi_turn.tools:
            raise ConfigError(
                f"{said} brings its own tools, and rollout.multi_turn.tools={self.multi_turn.tools}: set it to []"
            )

    def _check_speculative(self) -> None:
        algorithm = self.engine.speculative.algorithm
        if algorithm is None:
            return
        said = f"rollout.engine.speculative.algorithm={algorithm}"
        neutral = {"top_p": 1, "top_k": -1, "min_p": 0}
        for name, value in neutral.items():
            if getattr(self.train, name) != value:
                raise ConfigError(
                    f"{said} needs rollout.train.{name}={value}, not {getattr(self.train, name)}: SGLang samples what "
                    "the filter leaves, but gives log-probs of the whole distribution"
                )
        if self.val.min_p:
            raise ConfigError(f"{said} needs rollout.val.min_p=0: SGLang's check of guesses does not know it")
