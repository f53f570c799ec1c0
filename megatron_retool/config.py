"""The typed configuration tree: one YAML file plus dotted overrides, checked before anything starts.

    config = load_config("configs/demo_cpu.yaml", ["learner.context_parallel_size=2"])

A file with the key ``extends: other.yaml`` (relative to itself) holds only what differs from the other file; a list is
replaced as a whole.

Every key is declared here with its type and default; an unknown key is an error that names the nearest known one.
After ``load_config`` the tree is frozen: no code may change a setting while a run is under way.  Cross-field rules
(divisibility, exclusive options) live in ``validate``; rules that need the model's own shape live in
``megatron_retool.learner.parallel``.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_retool.algorithms.rejection_rules import parse_rejection_rules
from megatron_retool.algorithms.stage_schedule import parse_stages


class ConfigError(ValueError):
    """A setting is unknown, mistyped or inconsistent. The message names the key and says what to do."""


def choice(default: str, *others: str) -> Any:
    """A string field that accepts ``default`` or one of ``others``; anything else is a ConfigError."""
    return field(default=default, metadata={"choices": (default, *others)})


@dataclass(frozen=True)
class ModelConfig:
    path: str = ""
    """Hugging Face directory (config.json, safetensors, tokenizer) or hub id. Tokenizer and engines read it."""
    mcore_path: str | None = None
    """Output of conversion/hf_to_mcore.py. None: the learner reads the Hugging Face weights directly."""
    tokenizer_path: str | None = None
    """Where the tokenizer is when it does not lie in ``path``."""


@dataclass(frozen=True)
class DataConfig:
    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)
    train_batch_size: int = 32
    """Prompts whose groups are trained on in one step."""
    max_prompt_length: int = 2048
    max_response_length: int = 16384
    """Tokens after the prompt: sampled tokens and tool results together."""
    overlong_prompts: str = choice("filter", "error")
    shuffle: bool = True
    deduplicate: bool = True
    """Keep the first row of each distinct prompt (DAPO-Math-17k ships 1.79 M rows of about 17 k prompts)."""
    prompt_key: str = "prompt"
    question_instruction: str = "Solve the problem step by step and put your final answer within \\boxed{}."
    """Added below bare questions (AIME's files, reasoning-gym); prompts that are messages stay as they are."""
    max_val_samples: int | None = None


@dataclass(frozen=True)
class SamplingConfig:
    n: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0


@dataclass(frozen=True)
class ValSamplingConfig(SamplingConfig):
    n: int = 30
    top_p: float = 0.6


@dataclass(frozen=True)
class MultiTurnConfig:
    format: str = choice("hermes", "retool", "arpo")
    max_assistant_turns: int = 8
    max_tool_calls: int = 8
    max_tool_response_tokens: int = 512
    """Longer tool results lose their middle, and say so."""
    max_wall_seconds: float = 3600.0
    tools: list[str] = field(default_factory=lambda: ["code_interpreter"])
    """Names in tools.registry."""


@dataclass(frozen=True)
class EngineConfig:
    count: int = 1
    """SGLang servers (data parallelism over servers)."""
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


@dataclass(frozen=True)
class CodeInterpreterConfig:
    url: Any = None
    """An existing SandboxFusion-compatible server, or a list of them; None: the trainer starts one on each node."""
    workers: int = 128
    """Snippets that run at the same time on one server."""
    memory_limit_mb: int = 1024
    run_timeout_seconds: float = 10.0
    port: int = 0
    """0: any free port."""
    isolation: str = choice("auto", "namespaces", "bubblewrap", "rlimits")
    print_last_expression: bool = True
    preimport: list[str] = field(default_factory=lambda: ["numpy", "sympy", "scipy", "math"])
    error_style: str = choice("traceback", "last_line")
    """What the model sees of a failure: the whole traceback, or its last line alone."""
    max_error_characters: int | None = None
    """A longer error is cut off; None: only max_output_characters holds."""
    max_output_characters: int = 20000
    """A longer result loses its middle, and says so."""
    empty_output_text: str = ""
    """What the model sees when the code prints nothing."""

    @property
    def urls(self) -> list[str]:
        """The existing servers of ``url``; none where the trainer starts its own."""
        return [self.url] if isinstance(self.url, str) else list(self.url or [])


@dataclass(frozen=True)
class SearchConfig:
    corpus: str | None = None
    """Parquet or JSONL file with the columns id, text (and optionally title)."""
    top_k: int = 3
    show_ranks: bool = True
    """Write [1], [2], … before the passages."""


@dataclass(frozen=True)
class ToolsConfig:
    code_interpreter: CodeInterpreterConfig = field(default_factory=CodeInterpreterConfig)
    search: SearchConfig = field(default_factory=SearchConfig)


@dataclass(frozen=True)
class OverlongConfig:
    mode: str = choice("none", "soft_punish", "piecewise")
    buffer_length: int = 4096
    penalty: float = 1.0
    pieces: list[str] = field(default_factory=lambda: ["8000 0.01", "12000 0.05"])
    """piecewise: "<from tokens> <penalty per further 1000 tokens>" in ascending order."""
    filter: bool = False
    """Overlong filtering: truncated responses give no loss."""


@dataclass(frozen=True)
class RewardConfig:
    function: str = "math"
    """"math", "deep_research" (ARPO's tags), "deep_research_hermes", "reasoning_gym", or path/to/file.py:function or
    package.module:function."""
    processes: int = 2
    timeout_seconds: float = 30.0
    """For one response; then the process is killed and replaced."""
    memory_limit_mb: int = 4096
    """Address space of each reward process."""
    failure_score: float = -1.0
    """Score of a response whose function timed out, raised, ran out of memory or returned no number."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)


@dataclass(frozen=True)
class DynamicSamplingConfig:
    enable: bool = True
    """Must be off with algorithm.advantage=gae: a critic learns from groups of equal reward too."""
    max_generation_rounds: int = 10
    metric: str = choice("reward", "acc")
    """Groups whose members all have the same value of it are dropped and replaced."""


@dataclass(frozen=True)
class AdaptiveSamplingConfig:
    """Number of responses by stage of training and by the prompt's own history, in place of rollout.train.n."""

    enable: bool = False
    stages: list[str] = field(default_factory=lambda: ["0 24", "30 16", "80 12"])
    """"<first step> <n>" in ascending order."""
    easy_accuracy: float = 0.9
    easy_batches: int = 3
    """A prompt above easy_accuracy in its last easy_batches groups gets easy_n responses."""
    easy_n: int = 8
    hard_accuracy: float = 0.5
    hard_n: int = 24
    """A prompt whose last group was below hard_accuracy gets at least this many."""


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Training-inference mismatch: docs/algorithms.md has the definitions, docs/mismatch.md figures.

    The defaults are those for Megatron and SGLang (Geo-MIS) with responses of thousands of tokens; short ones need
    wider geometric bounds.
    """

    level: str = choice("token", "sequence", "geometric")
    """Level of the importance weight."""
    mode: str = choice("truncate", "none", "clip", "mask")
    """What happens to the weight outside its bounds; "none" turns weights off and leaves rejection on."""
    lower: float = 0.0
    upper: float = 2.0
    rejection: list[str] = field(default_factory=lambda: ["geometric_ratio 0.999 1.001"])
    """Rules, ANDed, each "<level>_<statistic> <lower> <upper>": see algorithms/rejection_rules.py."""
    veto_threshold: float | None = 1e-4
    """Drop a sequence with any token ratio strictly below it."""
    batch_k3_limit: float | None = None
    """Skip the update where the batch's k3 KL exceeds it."""
    batch_normalize: bool = False
    """Divide the weights by their mean over the whole global batch."""
    denominator: str = choice("pre", "post")
    bypass_old_log_probs: bool = False
    """Take the rollout log-probs as old_log_probs and skip the learner's recomputation."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantages, losses, KL and rollout correction: docs/algorithms.md has the definitions."""

    advantage: str = choice("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae")
    normalize_by_std: bool = True
    gamma: float = 1.0
    gae_lambda: float = 0.95
    gae_reward: str = choice("last_token", "spread")
    """Where a response's reward goes: its last sampled token, or equal shares on all sampled tokens."""
    gae_level: str = choice("token", "sequence")
    """sequence: every token gets the mean of its response's token advantages."""
    gae_whiten: bool = True
    policy_loss: str = choice("clip", "gspo", "cispo", "policy_gradient")
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.28
    dual_clip: float | None = None
    """PPO's dual clip constant c (3.0 is usual); None: off."""
    loss_aggregation: str = choice("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    entropy_coefficient: float = 0.0
    kl_in_loss: float = 0.0
    kl_in_reward: float = 0.0
    kl_estimator: str = choice("k3", "k1", "k2", "abs", "mse")
    adaptive_kl_target: float | None = None
    adaptive_kl_horizon: int = 10000
    """Responses over which a KL 20 % off its target changes kl_in_reward by 20 %."""
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    adaptive_sampling: AdaptiveSamplingConfig = field(default_factory=AdaptiveSamplingConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = 1e-6
    min_lr: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    schedule: str = choice("constant", "linear", "cosine")
    warmup_steps: int = 0
    cpu_offload: bool = False


@dataclass(frozen=True)
class Fp8Config:
    recipe: str | None = None
    """None, or one of delayed, tensorwise, blockwise, mxfp8. Needs Transformer Engine and a GPU that has FP8."""
    format: str = choice("hybrid", "e4m3")
    keep_first_last_bf16: bool = True


@dataclass(frozen=True)
class RecomputeConfig:
    granularity: str | None = None
    """None, "full" or "selective"."""
    method: str | None = None
    num_layers: int | None = None
    modules: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CriticConfig:
    """The value model of algorithm.advantage=gae. It has as many ranks as the learner, in the same layout."""

    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    value_clip: float = 0.5
    """How far a value may move from the one before the update, within one step."""
    warmup_steps: int = 0
    """First steps in which the critic alone learns."""


@dataclass(frozen=True)
class LearnerConfig:
    world_size: int = 1
    """Learner processes (GPUs). Data parallel size = world_size / (TP x PP x CP)."""
    device: str = choice("auto", "cpu", "cuda")
    dtype: str = choice("bfloat16", "float32", "float16")
    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    use_distributed_optimizer: bool = True
    mini_batch_size: int = 64
    """Responses in one optimizer step; a step of the loop makes train_batch_size x n / mini_batch_size of them."""
    max_tokens_per_micro_batch: int = 32768
    """Token budget of a packed micro-batch, over all context-parallel ranks together."""
    log_prob_chunk_tokens: int = 1024
    """Tokens whose vocabulary logits exist at one time while log-probs and entropy are computed."""
    fp32_lm_head: bool = False
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    fp8: Fp8Config = field(default_factory=Fp8Config)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    threads: int = 1
    """CPU threads of each learner process on a host without CUDA."""


@dataclass(frozen=True)
class WeightSyncConfig:
    method: str = choice("distributed", "tensor", "disk")
    bucket_bytes: int = 512 * 2**20
    verify: bool = False
    """Compare checksums of every tensor on both sides after each sync."""
    round_to_fp8: bool = False
    """Send linear weights rounded to block-wise e4m3 values, in the engine's own dtype: the mismatch of FP8 serving on
    engines that cannot serve FP8."""
    timeout_seconds: float = 300.0


@dataclass(frozen=True)
class ClusterConfig:
    nodes: int = 1
    gpus_per_node: int = 0
    placement: str = choice("disaggregated", "colocated")
    """disaggregated: learner and engines have GPUs of their own. colocated: they take turns on the same ones."""
    ray_address: str = "local"
    """"local" starts a private Ray; "auto" joins the one that the Slurm script started."""


@dataclass(frozen=True)
class TrainerConfig:
    experiment_name: str = "experiment"
    runs_dir: str = "runs"
    seed: int = 0
    total_steps: int | None = None
    """None: total_epochs passes over the prompts."""
    total_epochs: int = 1
    test_freq: int = 5
    """Steps between validations; 0: only before and after training."""
    test_schedule: list[str] = field(default_factory=list)
    """In place of test_freq: "<first step> <steps between validations>" in ascending order, as in ["0 10", "50 5"]."""
    save_freq: int = 30
    """Steps between checkpoints; 0: only at the end."""
    val_before_train: bool = True
    log_val_generations: int = 4
    resume_mode: str = choice("auto", "disable", "resume_path")
    resume_from_path: str | None = None
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept; 0 keeps all."""
    keep_every: int = 0
    """Checkpoints of steps that are multiples of it are kept for good; 0: none."""
    keep_best: int = 0
    """Best checkpoints by best_metric that are kept besides."""
    best_metric: str = ""
    """A validation metric, higher is better, such as val-core/all/acc/mean@30."""
    async_save: bool = False
    """Write checkpoints while the next step is generated; the learner waits only until its state is copied."""
    on_failed_save: str = choice("continue", "stop")
    """continue: a checkpoint that the disk has no room for is tried again after each step; the last always stops."""
    max_learner_restarts: int = 3
    """Times in a row, without a new checkpoint in between, that a learner which lost a rank is built anew."""
    max_skipped_steps: int = 5
    """Steps in a row that change no weight (no group with different rewards, a mismatch beyond its limit, gradients
    that are not finite) after which the run ends; 0: never. float16's loss scale may need some steps to settle."""
    straggler_factor: float = 1.5
    """A learner rank whose own part of the updates takes this many times the others' median is named; 0: none is."""
    straggler_steps: int = 3
    """Steps in a row after which it is named, and again after as many more."""
    hang_timeout_seconds: float = 3600.0
    """Time without progress in a phase of a step after which every process's stacks are written to logs/; 0: off."""
    start_hang_timeout_seconds: float = 7200.0
    """The same for the start of engines, sandboxes and learner, and for a learner that is built anew. Large models on
    slow file systems take long to load."""
    hang_action: str = choice("dump", "abort")
    """abort: the run ends then, with the exit code that asks Slurm's script for a requeue."""
    loggers: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])


@dataclass(frozen=True)
class SFTStage:
    """One pass of supervised fine-tuning; stages follow one another on the same weights."""

    name: str = "sft"
    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)
    batch_size: int = 32
    """Conversations in one optimizer step."""
    epochs: int = 6
    steps: int | None = None
    """None: as many as the epochs need."""
    max_length: int = 16384
    overlong: str = choice("drop", "truncate", "error")
    """What happens to a conversation of more than max_length tokens."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5, schedule="cosine"))


@dataclass(frozen=True)
class SFTConfig:
    stages: list[SFTStage] = field(default_factory=list)
    messages_key: str = "messages"
    tools_key: str = "tools"
    log_freq: int = 10
    test_freq: int = 0
    """Steps between validation losses; 0: at the end of each stage."""
    save_freq: int = 0


@dataclass(frozen=True)
class DemoConfig:
    """What make-demo writes: a small model and the integer problems it learns to solve with tools."""

    enable: bool = False
    """The pipeline command makes the demo's data and model, fine-tunes and converts it before it trains."""
    variant: str = choice("one_tool", "two_tools")
    """two_tools: half of the problems need a search in a corpus, made too, before or in place of Python."""
    directory: str = "runs/demo_data"
    hidden_size: int = 128
    num_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    intermediate_size: int = 384
    vocab_size: int = 512
    pretrain_rows: int = 28800
    sft_rows: int = 6000
    sft_val_rows: int = 256
    train_rows: int = 3000
    val_rows: int = 128
    entities: int = 400
    """two_tools: entities that the corpus knows, besides those of val.parquet."""
    val_entities: int = 40


@dataclass(frozen=True)
class Config:
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    demo: DemoConfig = field(default_factory=DemoConfig)

    @property
    def run_dir(self) -> Path:
        """runs/<experiment_name>, where everything the run leaves behind lies."""
        return Path(self.trainer.runs_dir) / self.trainer.experiment_name


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read ``path``, apply ``dotted.key=value`` overrides, check every key and type, validate, freeze.

    Raises:
        ConfigError: the file is missing or no mapping, a key is unknown, a value has the wrong type, or
            ``validate`` finds a contradiction.
    """
    layers = [] if path is None else _read_file(Path(path), ())
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"override {override!r} is not of the form dotted.key=value")
        try:
            layers.append((f"override {override!r}", OmegaConf.from_dotlist([override])))
        except Exception as error:
            raise ConfigError(f"override {override!r}: the value is not valid YAML: {error}") from error

    tree = OmegaConf.structured(Config)
    _unlock(tree)
    for source, layer in layers:
        _reject_unknown_keys(OmegaConf.to_container(layer), Config, source)
        try:
            tree = OmegaConf.merge(tree, layer)
        except OmegaConfBaseException as error:
            key = getattr(error, "full_key", None) or "?"
            raise ConfigError(f"{source}: {key}: {str(error).splitlines()[0]}") from error
    config = OmegaConf.to_object(tree)
    assert isinstance(config, Config)
    validate(config)
    return config


def _read_file(path: Path, extended_by: tuple[Path, ...]) -> list[tuple[str, DictConfig]]:
    """The file's settings with its path, after those of the files that it extends."""
    origin = f", which {extended_by[-1]} extends," if extended_by else ""
    if not path.is_file():
        raise ConfigError(f"config file {path}{origin} does not exist")
    try:
        loaded = OmegaConf.load(path)
    except Exception as error:
        raise ConfigError(f"config file {path} is not valid YAML: {error}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"config file {path} must hold a mapping at its top level")
    base = loaded.pop("extends", None)
    if base is None:
        return [(str(path), loaded)]
    if not isinstance(base, str):
        raise ConfigError(f"config file {path}: extends must name one file, not {base!r}")
    chain = (*extended_by, path.resolve())
    if (path.parent / base).resolve() in chain:
        raise ConfigError(f"config file {path}: extends: {base} leads back to itself")
    return [*_read_file(path.parent / base, chain), (str(path), loaded)]


def save_config(config: Config, path: str | Path) -> None:
    """Write the resolved tree as YAML that ``load_config`` reads back."""
    OmegaConf.save(OmegaConf.structured(config), path)


def _unlock(node: Any) -> None:
    # OmegaConf marks nodes of frozen dataclasses read-only, which would refuse the YAML file as well.
    OmegaConf.set_readonly(node, False)
    for key in range(len(node)) if isinstance(node, ListConfig) else node:
        child = node._get_node(key)
        if OmegaConf.is_config(child) and not child._is_none():
            _unlock(child)


def _reject_unknown_keys(node: Any, schema: type, source: str, prefix: str = "") -> None:
    if not isinstance(node, dict):
        raise ConfigError(f"{source}: {prefix.rstrip('.')} must be a mapping")
    known = {item.name for item in dataclasses.fields(schema)}
    for key, value in node.items():
        dotted = f"{prefix}{key}"
        if key not in known:
            nearest = difflib.get_close_matches(dotted, _dotted_keys(Config), n=1, cutoff=0.0)
            raise ConfigError(f"{source}: unknown key {dotted!r}; the nearest known key is {nearest[0]!r}")
        inner = _dataclass_of(schema, key)
        if inner is None or value is None or isinstance(value, str):  # a string may be an interpolation
            continue
        if isinstance(value, list):
            for index, element in enumerate(value):
                _reject_unknown_keys(element, inner, source, f"{dotted}[{index}].")
        else:
            _reject_unknown_keys(value, inner, source, f"{dotted}.")


def _dataclass_of(schema: type, name: str) -> type | None:
    """The dataclass that field ``name`` holds (itself or as a list's element), if any."""
    import typing

    hint = typing.get_type_hints(schema)[name]
    for candidate in (hint, *typing.get_args(hint)):
        if isinstance(candidate, type) and dataclasses.is_dataclass(candidate):
            return candidate
    return None


def _dotted_keys(schema: type, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for item in dataclasses.fields(schema):
        inner = _dataclass_of(schema, item.name)
        keys.append(prefix + item.name)
        if inner is not None:
            keys.extend(_dotted_keys(inner, f"{prefix}{item.name}."))
    return keys


def _walk(node: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    for item in dataclasses.fields(node):
        value = getattr(node, item.name)
        yield prefix + item.name, item, value
        if dataclasses.is_dataclass(value):
            yield from _walk(value, f"{prefix}{item.name}.")
        elif isinstance(value, list):
            for index, element in enumerate(value):
                if dataclasses.is_dataclass(element):
                    yield from _walk(element, f"{prefix}{item.name}[{index}].")


def _validate_rollout_correction(correction: RolloutCorrectionConfig) -> None:
    key = "algorithm.rollout_correction"
    try:
        parse_rejection_rules(correction.rejection)
    except ValueError as error:
        raise ConfigError(f"{key}.rejection: {error}") from error
    if correction.mode != "none" and not 0 <= correction.lower < correction.upper:
        raise ConfigError(f"{key}: the bounds must satisfy 0 <= lower={correction.lower} < upper={correction.upper}")
    if correction.veto_threshold is not None and not 0 < correction.veto_threshold < 1:
        raise ConfigError(f"{key}.veto_threshold={correction.veto_threshold} must lie between 0 and 1, or be null")
    if correction.bypass_old_log_probs and correction.mode != "none":
        raise ConfigError(
            f"{key}.bypass_old_log_probs=true puts the mismatch into PPO's own ratio: weights on top would count it "
            f"twice, set {key}.mode=none"
        )
    if correction.bypass_old_log_probs and correction.batch_k3_limit is not None:
        raise ConfigError(
            f"{key}.batch_k3_limit needs the learner's log-probs before the update, which bypass_old_log_probs skips"
        )
    rejects = bool(correction.rejection) or correction.veto_threshold is not None
    if correction.bypass_old_log_probs and correction.denominator == "post" and rejects:
        raise ConfigError(
            f"{key}.denominator=post counts what rejection leaves before the update, but with "
            f"bypass_old_log_probs=true rejection happens in the update: set {key}.denominator=pre"
        )


def validate(config: Config) -> None:
    """Check choices and the rules between settings that need no model.

    Raises:
        ConfigError: naming the key or keys and what would satisfy the rule.
    """
    for key, item, value in _walk(config):
        choices = item.metadata.get("choices")
        if choices is not None and value not in choices:
            raise ConfigError(f"{key}={value!r} is not one of {', '.join(choices)}")

    learner, algorithm, rollout = config.learner, config.algorithm, config.rollout
    model_ranks = (
        learner.tensor_model_parallel_size * learner.pipeline_model_parallel_size * learner.context_parallel_size
    )
    if learner.world_size % model_ranks:
        raise ConfigError(f"learner.world_size={learner.world_size} is not divisible by TP x PP x CP = {model_ranks}")
    data_parallel = learner.world_size // model_ranks
    expert_ranks = (
        learner.expert_model_parallel_size
        * (learner.expert_tensor_parallel_size or learner.tensor_model_parallel_size)
        * learner.pipeline_model_parallel_size
    )
    if learner.world_size % expert_ranks:
        raise ConfigError(f"learner.world_size={learner.world_size} is not divisible by ETP x EP x PP = {expert_ranks}")
    if learner.sequence_parallel and learner.tensor_model_parallel_size == 1:
        raise ConfigError("learner.sequence_parallel=true needs learner.tensor_model_parallel_size > 1")
    if learner.virtual_pipeline_model_parallel_size is not None:
        if learner.pipeline_model_parallel_size < 2:
            raise ConfigError("learner.virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size > 1")
        if learner.pipeline_model_parallel_size == 2:
            raise ConfigError(
                "learner.virtual_pipeline_model_parallel_size with pipeline_model_parallel_size=2 gives wrong "
                "gradients in Megatron-Core 0.16 without overlapped point-to-point communication: use PP >= 4"
            )
    responses = config.data.train_batch_size * rollout.train.n
    if responses % learner.mini_batch_size:
        raise ConfigError(
            f"data.train_batch_size x rollout.train.n = {responses} responses are not divisible by "
            f"learner.mini_batch_size={learner.mini_batch_size}"
        )
    if learner.mini_batch_size % data_parallel:
        raise ConfigError(
            f"learner.mini_batch_size={learner.mini_batch_size} is not divisible by the data parallel size "
            f"{data_parallel}"
        )
    if algorithm.kl_in_loss and algorithm.kl_in_reward:
        raise ConfigError("algorithm.kl_in_loss and algorithm.kl_in_reward penalise the same KL twice: set one to 0")
    _validate_rollout_correction(algorithm.rollout_correction)
    if algorithm.adaptive_kl_target is not None and (not algorithm.kl_in_reward or algorithm.adaptive_kl_target <= 0):
        raise ConfigError("algorithm.adaptive_kl_target must be positive, and needs kl_in_reward as its start")
    if algorithm.dual_clip is not None and algorithm.dual_clip <= 1:
        raise ConfigError(f"algorithm.dual_clip={algorithm.dual_clip} must be above 1 (3.0 is usual)")
    if algorithm.adaptive_sampling.enable:
        try:
            parse_stages(algorithm.adaptive_sampling.stages)
        except ValueError as error:
            raise ConfigError(f"algorithm.adaptive_sampling.stages: {error}") from error
    if rollout.train.n < 2 and algorithm.advantage in ("grpo", "dr_grpo", "rloo"):
        raise ConfigError(
            f"algorithm.advantage={algorithm.advantage} compares answers of a group: rollout.train.n must be at least 2"
        )
    if algorithm.advantage == "gae" and algorithm.dynamic_sampling.enable:
        raise ConfigError(
            "algorithm.advantage=gae with algorithm.dynamic_sampling.enable=true would withhold groups of equal reward "
            "from the critic, which learns from them too: set algorithm.dynamic_sampling.enable=false"
        )
    if config.trainer.test_schedule:
        try:
            parse_stages(config.trainer.test_schedule)
        except ValueError as error:
            raise ConfigError(f"trainer.test_schedule: {error}") from error
    if rollout.train.temperature <= 0:
        raise ConfigError(
            f"rollout.train.temperature={rollout.train.temperature}: greedy decoding has no distribution to learn from"
        )
    if config.weight_sync.round_to_fp8 and rollout.engine.quantization is not None:
        raise ConfigError(
            "weight_sync.round_to_fp8 imitates FP8 serving; rollout.engine.quantization=fp8 is the real thing: set one"
        )
    if config.trainer.keep_best and not config.trainer.best_metric:
        raise ConfigError("trainer.keep_best needs trainer.best_metric, such as val-core/all/acc/mean@30")
    if config.trainer.resume_mode == "resume_path" and not config.trainer.resume_from_path:
        raise ConfigError("trainer.resume_mode=resume_path needs trainer.resume_from_path=…/global_step_N")
    if rollout.staleness and config.cluster.placement == "colocated" and config.cluster.gpus_per_node:
        raise ConfigError(
            "rollout.staleness > 0 generates while the learner trains, which cluster.placement=colocated cannot: "
            "choose disaggregated, or staleness 0"
        )
    url = config.tools.code_interpreter.url
    urls = [url] if isinstance(url, str) else url
    if url is not None and not (isinstance(urls, list) and urls and all(isinstance(each, str) for each in urls)):
        raise ConfigError(f"tools.code_interpreter.url={url!r} must be a URL, a list of URLs, or null")
    if rollout.partial.over_sampling_factor < 1:
        raise ConfigError(f"rollout.partial.over_sampling_factor={rollout.partial.over_sampling_factor} is below 1")
    if rollout.branching.enable and rollout.branching.initial_rollouts > rollout.train.n:
        raise ConfigError("rollout.branching.initial_rollouts exceeds the budget rollout.train.n")
    for key, value in (
        ("data.train_batch_size", config.data.train_batch_size),
        ("data.max_prompt_length", config.data.max_prompt_length),
        ("data.max_response_length", config.data.max_response_length),
        ("rollout.engine.count", rollout.engine.count),
        ("learner.max_tokens_per_micro_batch", learner.max_tokens_per_micro_batch),
    ):
        if value < 1:
            raise ConfigError(f"{key}={value} must be at least 1")
