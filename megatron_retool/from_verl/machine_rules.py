"""Rules as in ``rules``, about GPUs, learner, engines and the agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf

from megatron_retool.config.rollout import SETTINGS_OF_ARGUMENTS
from megatron_retool.config.verl_keys import ACTOR, MODEL, ROLLOUT, fp8_recipe, moment_dtype
from megatron_retool.from_verl.rules import Settings, VerlValues

SANDBOX_TOOL, SEARCH_TOOL = "SandboxFusionTool", "SearchTool"


def gpus(values: VerlValues) -> Settings:
    """Learner and engines on the same GPUs, as verl's hybrid engine has them, and how the model is cut."""
    nodes, per_node = int(values.number("trainer.nnodes", 1)), int(values.number("trainer.n_gpus_per_node", 8))
    world = nodes * per_node
    result: Settings = {
        "cluster.nodes": nodes,
        "cluster.gpus_per_node": per_node,
        "cluster.placement": "colocated",
        "weight_sync.method": "tensor",
        "learner.world_size": world,
        **_layout(values),
    }
    engine = int(values.number(f"{ROLLOUT}.tensor_model_parallel_size", 2))
    stages = int(values.number(f"{ROLLOUT}.pipeline_model_parallel_size", 1))
    if stages > 1:
        engine *= stages
        values.decide(
            f"engines have no pipeline stages here: rollout.engine.tensor_parallel_size={engine} in their place"
        )
    if engine > per_node:
        values.decide(
            f"an engine of {engine} GPUs would span nodes of {per_node}, and engines that share their GPUs with the "
            f"learner lie inside a node here: it gets {per_node}"
        )
        engine = per_node
    result["rollout.engine.tensor_parallel_size"] = engine
    result["rollout.engine.count"] = max(world // engine, 1)
    parts = result["learner.tensor_model_parallel_size"] * result["learner.pipeline_model_parallel_size"]
    data_parallel = max(world // (parts * result["learner.context_parallel_size"]), 1)
    return result | _batches(values, data_parallel, result["learner.context_parallel_size"])


def _layout(values: VerlValues) -> Settings:
    """Sizes of the parallel layout; of FSDP's, Megatron's nearest."""
    if not values.megatron:
        size = int(values.number(f"{ACTOR}.ulysses_sequence_parallel_size", 1))
        values.decide(
            "the file is for FSDP, which shards the weights over all GPUs: the nearest of Megatron is "
            f"learner.tensor_model_parallel_size={size} (ulysses_sequence_parallel_size). `megatron-retool plan` says "
            "whether the model fits like this and proposes faster layouts"
        )
        checkpointing = values.get(f"{MODEL}.enable_gradient_checkpointing", True)
        recompute = {"granularity": "full", "method": "uniform", "num_layers": 1} if checkpointing else {}
        return {
            "learner.tensor_model_parallel_size": size,
            "learner.sequence_parallel": size > 1,
            "learner.pipeline_model_parallel_size": 1,
            "learner.context_parallel_size": 1,
            **{f"learner.recompute.{name}": value for name, value in recompute.items()},
        }
    prefix = f"{ACTOR}.megatron"
    result: Settings = {
        f"learner.{name}": int(values.number(f"{prefix}.{name}", 1))
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
        )
    }
    result["learner.sequence_parallel"] = (
        result["learner.tensor_model_parallel_size"] > 1 and values.get(f"{prefix}.sequence_parallel", True) is True
    )
    virtual = values.get(f"{prefix}.virtual_pipeline_model_parallel_size")
    if isinstance(virtual, int) and result["learner.pipeline_model_parallel_size"] > 2:
        result["learner.virtual_pipeline_model_parallel_size"] = virtual
    elif isinstance(virtual, int):
        result["learner.virtual_pipeline_model_parallel_size"] = None
        values.decide(
            "virtual pipeline stages need learner.pipeline_model_parallel_size of at least 4: they are left out"
        )
    expert_tensor = values.get(f"{prefix}.expert_tensor_parallel_size")
    if isinstance(expert_tensor, int):
        result["learner.expert_tensor_parallel_size"] = expert_tensor
    for name in ("granularity", "method", "num_layers", "modules"):
        value = values.get(f"{prefix}.override_transformer_config.recompute_{name}")
        if value is not None and (name == "granularity" or "learner.recompute.granularity" in result):
            result[f"learner.recompute.{name}"] = value
    if result.get("learner.recompute.granularity") == "full":
        result.pop("learner.recompute.modules", None)
        result.setdefault("learner.recompute.method", "uniform")
        result.setdefault("learner.recompute.num_layers", 1)
    return result


def pipeline_overlap(values: VerlValues) -> Settings:
    """Exchanges of virtual pipeline stages while others compute; Megatron-Core has one of two ways."""
    options = f"{ACTOR}.megatron.override_transformer_config"
    if not values.is_true(f"{options}.overlap_p2p_comm"):
        return {}
    if int(values.number(f"{ACTOR}.megatron.pipeline_model_parallel_size", 1)) > 2 and isinstance(
        values.get(f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size"), int
    ):
        return {"learner.overlap_p2p_comm": True}
    values.decide("overlap_p2p_comm is left out: only virtual pipeline stages have other chunks to compute meanwhile")
    return {}


def _batches(values: VerlValues, data_parallel: int, context_parallel: int) -> Settings:
    """Mini-batches count responses here and prompts in verl; the micro-batch's budget is of all its ranks together."""
    n = int(values.number(f"{ROLLOUT}.n", 1))
    if n < 2 and values.get("algorithm.adv_estimator") in ("grpo", "rloo", "reinforce_plus_plus_baseline"):
        values.decide(f"{ROLLOUT}.n={n} in verl's words: an estimator that compares answers needs rollout.train.n >= 2")
    responses = int(values.number("data.train_batch_size", 1024)) * n
    wanted = min(int(values.number(f"{ACTOR}.ppo_mini_batch_size", 256)) * n, responses)
    fitting = [size for size in range(1, wanted + 1) if responses % size == 0 and size % data_parallel == 0]
    mini_batch = fitting[-1] if fitting else wanted
    if mini_batch != wanted:
        values.decide(
            f"learner.mini_batch_size={mini_batch} in place of {wanted}: it has to divide {responses} responses and to "
            f"be a multiple of the data parallel size {data_parallel}"
        )
    longest = int(values.number("data.max_prompt_length", 512) + values.number("data.max_response_length", 512))
    if values.is_true(f"{ACTOR}.use_dynamic_bsz"):
        shares = (
            context_parallel if values.megatron else int(values.number(f"{ACTOR}.ulysses_sequence_parallel_size", 1))
        )
        tokens = int(values.number(f"{ACTOR}.ppo_max_token_len_per_gpu", 16384)) * shares
    else:
        tokens = int(values.number(f"{ACTOR}.ppo_micro_batch_size_per_gpu", 1)) * longest
    return {"learner.mini_batch_size": mini_batch, "learner.max_tokens_per_micro_batch": max(tokens, longest)}


def fp8(values: VerlValues) -> Settings:
    """The learner's FP8 recipe; Megatron-Core takes delayed scaling where none is named."""
    options = f"{ACTOR}.megatron.override_transformer_config"
    if values.get(f"{options}.fp8") and fp8_recipe(values.get(f"{options}.fp8_recipe", "delayed")) is None:
        values.decide(
            "delayed FP8 scaling has no counterpart (its scales are not yet there when log-probs are computed): set "
            "learner.fp8.recipe to tensorwise, blockwise or mxfp8, or the learner computes without FP8"
        )
    return {}


def optimizers(values: VerlValues) -> Settings:
    """Policy's and, for gae, critic's optimizer."""
    result: Settings = {}
    pairs = [(f"{ACTOR}.optim", "learner.optimizer", f"{ACTOR}.grad_clip", 1e-6)]
    if values.get("algorithm.adv_estimator") == "gae":
        pairs.append(("critic.optim", "learner.critic.optimizer", "critic.grad_clip", 1e-5))
    for theirs, ours, old_clip, rate in pairs:
        lr = float(values.number(f"{theirs}.lr", rate))
        styles = ("lr_decay_style", "lr_scheduler_type", "warmup_style")
        style = next((values.get(f"{theirs}.{name}") for name in styles if values.get(f"{theirs}.{name}")), "constant")
        if style not in ("constant", "linear", "cosine"):
            values.decide(f"{theirs}: the schedule {style} has no counterpart: {ours}.schedule=constant is taken")
            style = "constant"
        ratio = values.get(f"{theirs}.min_lr_ratio")
        result |= {
            f"{ours}.lr": lr,
            f"{ours}.min_lr": float(values.number(f"{theirs}.min_lr", 0.0)) if ratio is None else lr * float(ratio),
            f"{ours}.betas": list(values.get(f"{theirs}.betas", [0.9, 0.999])),
            f"{ours}.weight_decay": float(values.number(f"{theirs}.weight_decay", 0.01)),
            f"{ours}.clip_grad": float(values.get(f"{theirs}.clip_grad", values.get(old_clip, 1.0))),
            f"{ours}.schedule": style,
            f"{ours}.warmup_steps": _warmup_steps(values, theirs, ours),
        }
        if values.is_true(f"{theirs}.override_optimizer_config.optimizer_cpu_offload"):
            result[f"{ours}.cpu_offload"] = True  # which is precision-aware by itself
        elif values.is_true(f"{theirs}.override_optimizer_config.use_precision_aware_optimizer"):
            result |= _precision_aware(values, f"{theirs}.override_optimizer_config", ours)
    return result


def _precision_aware(values: VerlValues, theirs: str, ours: str) -> Settings:
    result: Settings = {f"{ours}.use_precision_aware_optimizer": True}
    for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        word = values.get(f"{theirs}.{name}")
        dtype = None if word is None else moment_dtype(word)
        if dtype is None or (name == "main_params_dtype" and dtype == "bfloat16"):
            if word is not None:
                values.decide(f"{theirs}.{name}={word} has no counterpart: {ours}.{name} stays float32")
            continue
        result[f"{ours}.{name}"] = dtype
    return result


def _warmup_steps(values: VerlValues, theirs: str, ours: str) -> int:
    steps = int(values.number(f"{theirs}.lr_warmup_steps", -1))
    if steps >= 0:
        return steps
    ratio = float(values.number(f"{theirs}.lr_warmup_steps_ratio", 0.0))
    total = values.get("trainer.total_training_steps")
    if ratio and not isinstance(total, int):
        values.decide(
            f"{theirs}.lr_warmup_steps_ratio={ratio:g}: set {ours}.warmup_steps to that share of the run's steps"
        )
        return 0
    return int(ratio * total) if ratio else 0


def engines(values: VerlValues) -> Settings:
    """How responses are sampled for validation, and SGLang's own arguments."""
    val = f"{ROLLOUT}.val_kwargs"
    temperature = float(values.number(f"{val}.temperature"))
    if values.get(f"{ROLLOUT}.mode") == "sync" and not values.is_true(f"{val}.do_sample"):
        temperature = 0.0
    top_k = int(values.number(f"{val}.top_k", -1))
    result: Settings = {
        "rollout.train.n": values.get(f"{ROLLOUT}.n"),
        "rollout.val.n": values.get(f"{val}.n"),
        "rollout.val.temperature": temperature,
        "rollout.val.top_p": float(values.number(f"{val}.top_p", 1.0)),
        "rollout.val.top_k": top_k if top_k > 0 else -1,
    }
    arguments = []
    if values.is_true(f"{ROLLOUT}.enforce_eager"):
        arguments.append("--disable-cuda-graph")
    if values.get(f"{ROLLOUT}.enable_prefix_caching") is False:
        arguments.append("--disable-radix-cache")
    experts = values.get(f"{ROLLOUT}.expert_parallel_size", 1)
    if isinstance(experts, int) and experts > 1:
        if int(values.number(f"{ROLLOUT}.tensor_model_parallel_size", 2)) % experts:
            values.decide(
                f"{ROLLOUT}.expert_parallel_size={experts} does not divide an engine's GPUs: every GPU has experts"
            )
        else:
            result["rollout.engine.expert_parallel_size"] = experts
    prefix = f"{ROLLOUT}.engine_kwargs.sglang."
    for key, value in values.given.items():
        if key.startswith(prefix) and value is not None and value is not False:
            option = "--" + key.removeprefix(prefix).replace("_", "-")
            if ours := SETTINGS_OF_ARGUMENTS.get(option):
                _engine_setting(values, result, key, ours, value)
                continue
            arguments += [option] if value is True else [option, str(value)]
    if arguments:
        result["rollout.engine.extra_args"] = arguments
    return result


def _engine_setting(values: VerlValues, found: Settings, key: str, ours: str, value: Any) -> None:
    """An argument of SGLang that is a setting here."""
    if ours in ("count", "attention_data_parallel_size"):
        values.decide(
            f"{key}={value}: data parallelism inside an engine is rollout.engine.{ours} here, of other meaning"
        )
    else:
        found[f"rollout.engine.{ours}"] = value


def agent(values: VerlValues) -> Settings:
    """Turns and tools; verl's runs without multi_turn have neither."""
    prefix, ours = f"{ROLLOUT}.multi_turn", "rollout.multi_turn"
    tools = values.get(f"{prefix}.tool_config_path") or values.get("data.tool_config_path")
    # An agent loop with tools does not ask for multi_turn.enable.
    if not values.is_true(f"{prefix}.enable") and not tools:
        return {f"{ours}.tools": [], f"{ours}.max_assistant_turns": 1}
    result: Settings = {}
    turns = values.get(f"{prefix}.max_assistant_turns", values.get(f"{prefix}.max_turns"))
    if isinstance(turns, int):
        result[f"{ours}.max_assistant_turns"] = turns
    else:
        values.decide(f"{prefix}.max_assistant_turns is not limited in the file: {ours}.max_assistant_turns is 8 here")
    results = values.get(f"{prefix}.max_user_turns", turns)
    if isinstance(results, int):
        result[f"{ours}.max_tool_calls"] = results * int(values.number(f"{prefix}.max_parallel_calls", 1))
    if values.get(f"{prefix}.format") not in (None, "hermes"):
        values.decide(f"{prefix}.format={values.get(f'{prefix}.format')}: see {ours}.format for the formats there are")
    result["tools.code_interpreter.max_output_characters"] = int(
        values.number(f"{prefix}.max_tool_response_length", 256)
    )
    return result | _tools(values, tools)


def _tools(values: VerlValues, path: Any) -> Settings:
    """The tools that verl's tool file lists, as far as they are built in here."""
    key = "rollout.multi_turn.tools"
    own = f"each own tool becomes a class or a function that {key} names (docs/extending.md)"
    if not path:
        values.decide(f"multi_turn.enable=true, and the file names no tools: {key}=[] is taken; {own}")
        return {key: []}
    file = values.find_file(str(path))
    if file is None:
        values.decide(f"verl's tools ({path}) were not found: {key}=[code_interpreter] is taken; {own}")
        return {key: ["code_interpreter"]}
    content = OmegaConf.to_container(OmegaConf.load(file))
    entries = content.get("tools") if isinstance(content, dict) else None
    result: Settings = {key: []}
    for entry in entries or []:
        name = str(entry.get("class_name", "")).rpartition(".")[2]
        settings = entry.get("config") or {}
        if name.endswith(SANDBOX_TOOL):
            result[key].append("code_interpreter")
            for theirs, ours in (("num_workers", "workers"), ("memory_limit_mb", "memory_limit_mb"),
                                 ("default_timeout", "run_timeout_seconds")):  # fmt: skip
                if isinstance(settings.get(theirs), (int, float)):
                    result[f"tools.code_interpreter.{ours}"] = settings[theirs]
            if settings.get("sandbox_fusion_url"):
                values.decide(
                    "the trainer starts sandboxes of its own: set tools.code_interpreter.url="
                    f"{str(settings['sandbox_fusion_url']).removesuffix('/run_code')} to use the file's server"
                )
        elif name.endswith(SEARCH_TOOL):
            result[key].append("search")
            server = settings.get("retrieval_service_url")
            if isinstance(server, str) and server:
                result["tools.search.backend"] = "retriever"
                result["tools.search.service.base_url"] = server.rstrip("/").removesuffix("/retrieve")
                for theirs, ours in (("topk", "top_k"), ("timeout", "service.timeout_seconds")):
                    if isinstance(settings.get(theirs), (int, float)):
                        result[f"tools.search.{ours}"] = settings[theirs]
            else:
                values.decide("tools.search looks in a file of passages: set tools.search.corpus, or another backend")
        else:
            values.decide(f"the tool {entry.get('class_name')} is written for verl: {own}")
    return result


MACHINE_RULES: tuple[Callable[[VerlValues], Settings], ...] = (gpus, pipeline_overlap, fp8, optimizers, engines, agent)
