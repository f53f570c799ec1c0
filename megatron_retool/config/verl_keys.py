"""verl's settings (0.4 to 0.9) and ours: one table for error messages, ``config from-verl`` and docs/verl.md.

A row is one key of verl, or all below a key that ends in ``.*``. Nothing here imports verl or needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
MODEL, CORRECTION = "actor_rollout_ref.model", "algorithm.rollout_correction"


@dataclass(frozen=True)
class VerlKey:
    """A row of the table.

    Attributes:
        verl: verl's dotted key, or a prefix of keys with ``.*`` at its end.
        ours: our dotted keys that stand for it; none where nothing does.
        note: what differs, or why there is no counterpart.
        convert: verl's value -> that of ``ours[0]``, None where no word of ours says it; None: the value depends on
            other settings of verl's too, and ``from_verl`` has a rule for them.
    """

    verl: str
    ours: tuple[str, ...]
    note: str = ""
    convert: Callable[[Any], Any] | None = None


def advantage(word: Any) -> str | None:
    """verl's adv_estimator in our words; None where there is no built-in one."""
    same = ("grpo", "gae", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    return {**dict(zip(same, same, strict=True)), "grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}.get(str(word))


def policy_loss(word: Any) -> str | None:
    """verl's loss_mode in our words; None where there is no built-in one."""
    return {"vanilla": "clip", "gspo": "gspo", "cispo": "cispo", "gpg": "policy_gradient"}.get(str(word))


def kl_estimator(word: Any) -> str | None:
    """verl's name of a KL estimator in our words; None where there is none."""
    names = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "mse", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    return names.get(str(word).removesuffix("+"))


def token_dispatcher(word: Any) -> str | None:
    """verl's moe_token_dispatcher_type in our words; None where there is none."""
    return str(word) if word in ("alltoall", "flex") else None


def routing_replay(word: Any) -> str | None:
    """verl's router_replay.mode in our words; None where there is none."""
    return {"disabled": "none", "R2": "old_log_probs", "R3": "rollout"}.get(str(word))


def fp8_recipe(word: Any) -> str | None:
    """Megatron-Core's fp8_recipe in our words; None where there is none."""
    return str(word) if str(word) in ("tensorwise", "blockwise", "mxfp8") else None


def fp4_recipe(word: Any) -> str | None:
    """The recipe that Megatron-Core takes for its fp4 format; None where there is none."""
    return "nvfp4" if str(word) == "e2m1" else None


def moment_dtype(word: Any) -> str | None:
    """A dtype of the optimizer's state in our words, of Megatron-Core's fp32 or torch's; None where there is none."""
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    name = str(word).removeprefix("torch.")
    return names.get(name, name if name in names.values() else None)


def find(key: str) -> VerlKey | None:
    """The row of a key, else of the longest prefix that has one, else None.

    A key may lack the first part, as in ``rollout.gpu_memory_utilization`` for
    ``actor_rollout_ref.rollout.gpu_memory_utilization``.
    """
    exact, prefixes = _index()
    row = exact.get(key) or exact.get(f"actor_rollout_ref.{key}")
    above = [prefix for prefix in prefixes if key.startswith(f"{prefix}.") or key == prefix]
    return row or (prefixes[max(above, key=len)] if above else None)


@cache
def _index() -> tuple[dict[str, VerlKey], dict[str, VerlKey]]:
    exact = {row.verl: row for row in TABLE if not row.verl.endswith(".*")}
    return exact, {row.verl.removesuffix(".*"): row for row in TABLE if row.verl.endswith(".*")}


def explain(key: str, value: Any) -> str | None:
    """What to say of an unknown key that is verl's; None where it is not.

    Args:
        value: that it is set to; a mapping where the key holds others.
    """
    if isinstance(value, Mapping):
        texts = [text for name, inner in value.items() if (text := explain(f"{key}.{name}", inner))]
        more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
        return texts[0] + more if texts else None
    row = find(key)
    if row is None:
        return None
    return f"{key}={value} is verl's{_counterpart(row, value)}"


def _counterpart(row: VerlKey, value: Any) -> str:
    if not row.ours:
        return f" and has no counterpart: {row.note}"
    names = ", ".join(row.ours)
    note = f" ({row.note})" if row.note else ""
    if row.convert is not None:
        try:
            converted = row.convert(value)
        except (TypeError, ValueError):
            converted = value
        if converted is None:
            return f"; the key is {names} here, and none of its built-in values stands for that one{note}"
        names = f"{names}={_word(converted)}"
    return f"; here it is {names}{note}"


def _word(value: Any) -> str:
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _same(value: Any) -> Any:
    return value


def _rows(prefix: str, names: str, why: str) -> list[VerlKey]:
    """Keys without a counterpart."""
    return [VerlKey(f"{prefix}.{name}", (), why) for name in names.split()]


def _unless_negative(value: Any) -> int:
    return max(int(value), 0)


def _files(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _parallel(verl: str) -> list[VerlKey]:
    """The sizes of a Megatron layout."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
             "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
             "sequence_parallel")  # fmt: skip
    return [VerlKey(f"{verl}.{name}", (f"learner.{name}",), convert=_same) for name in names]


def _optimizer(verl: str, ours: str) -> list[VerlKey]:
    return [
        *(VerlKey(f"{verl}.{name}", (f"{ours}.{name}",), convert=_same)
          for name in ("lr", "min_lr", "betas", "weight_decay", "clip_grad")),
        VerlKey(f"{verl}.lr_warmup_steps", (f"{ours}.warmup_steps",), "-1 is 0", _unless_negative),
        VerlKey(f"{verl}.lr_warmup_steps_ratio", (f"{ours}.warmup_steps",), "ratio x the run's steps"),
        *(VerlKey(f"{verl}.{name}", (f"{ours}.schedule",), convert=_same)
          for name in ("lr_decay_style", "lr_scheduler_type", "warmup_style")),
        VerlKey(f"{verl}.min_lr_ratio", (f"{ours}.min_lr",), "ratio x lr"),
        VerlKey(f"{verl}.override_optimizer_config.optimizer_cpu_offload", (f"{ours}.cpu_offload",), convert=_same),
        VerlKey(f"{verl}.override_optimizer_config.use_precision_aware_optimizer",
                (f"{ours}.use_precision_aware_optimizer",), "part of cpu_offload here, and set only without it"),
        *(VerlKey(f"{verl}.override_optimizer_config.{name}", (f"{ours}.{name}",),
                  "with use_precision_aware_optimizer")
          for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")),
        *_rows(f"{verl}.override_optimizer_config", "optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d *",
               "Megatron-Core's own settings of its optimizer stay as they are"),
        *_rows(verl, "total_training_steps", "the run's own length is taken"),
        VerlKey(f"{verl}.*", (), "of optimizers there are AdamW and Muon (learner.optimizer.name)"),
    ]  # fmt: skip


_WORKERS = "verl's workers and their micro-batches; one token budget holds here: learner.max_tokens_per_micro_batch"
_REFERENCE = "the reference policy has the learner's layout and budget"
_ALWAYS = "always so here"
_OFFLOAD = "with cluster.placement=colocated the learner leaves for host memory by itself"
_PROFILER = "trainer.profiler has a tool, steps and ranks of its own; timing_s/* says where the time goes"
_VLM = "images and videos are not supported"
_FUSED = "chosen by Megatron-Core and Transformer Engine"

TABLE: tuple[VerlKey, ...] = (
    # --- algorithm
    VerlKey("algorithm.adv_estimator", ("algorithm.advantage",), "other estimators: a function of one's own",
        advantage),
    VerlKey("algorithm.norm_adv_by_std_in_grpo", ("algorithm.normalize_by_std",), convert=_same),
    VerlKey("algorithm.gamma", ("algorithm.gamma",), convert=_same),
    VerlKey("algorithm.lam", ("algorithm.gae_lambda",), convert=_same),
    VerlKey("algorithm.use_kl_in_reward", ("algorithm.kl_in_reward",), "the coefficient kl_ctrl.kl_coef, or 0"),
    VerlKey("algorithm.kl_penalty", ("algorithm.kl_estimator",), "kl is k1, low_var_kl is k3", kl_estimator),
    VerlKey("algorithm.kl_ctrl.kl_coef", ("algorithm.kl_in_reward",), "0 where use_kl_in_reward is false", _same),
    VerlKey("algorithm.kl_ctrl.type", ("algorithm.adaptive_kl_target",), "adaptive: target_kl; fixed: null"),
    VerlKey("algorithm.kl_ctrl.target_kl", ("algorithm.adaptive_kl_target",), "where type is adaptive", _same),
    VerlKey("algorithm.kl_ctrl.horizon", ("algorithm.adaptive_kl_horizon",), convert=_same),
    VerlKey("algorithm.filter_groups.enable", ("algorithm.dynamic_sampling.enable",), convert=_same),
    VerlKey("algorithm.filter_groups.metric", ("algorithm.dynamic_sampling.metric",), "acc, or the reward",
            lambda value: "acc" if value == "acc" else "reward"),
    VerlKey("algorithm.filter_groups.max_num_gen_batches", ("algorithm.dynamic_sampling.max_generation_batches",),
            "0: no limit", _unless_negative),
    *_rows("algorithm", "filter_groups.max_inflight_gen_batches", "each round generates the groups that are missing"),
    VerlKey(f"{CORRECTION}.rollout_is", (f"{CORRECTION}.level", f"{CORRECTION}.mode"), "mode=truncate; null: mode=none",
            _same),
    VerlKey(f"{CORRECTION}.rollout_is_threshold", (f"{CORRECTION}.upper",), convert=_same),
    VerlKey(f"{CORRECTION}.rollout_rs", (f"{CORRECTION}.rejection",), 'a rule such as "geometric_ratio 0.999 1.001"'),
    VerlKey(f"{CORRECTION}.rollout_rs_threshold", (f"{CORRECTION}.rejection",), "upper bound of the rule"),
    VerlKey(f"{CORRECTION}.rollout_rs_threshold_lower", (f"{CORRECTION}.rejection",), "lower bound of the rule"),
    VerlKey(f"{CORRECTION}.rollout_token_veto_threshold", (f"{CORRECTION}.veto_threshold",), convert=_same),
    VerlKey(f"{CORRECTION}.rollout_is_batch_normalize", (f"{CORRECTION}.batch_normalize",), convert=_same),
    VerlKey(f"{CORRECTION}.bypass_mode", (f"{CORRECTION}.bypass_old_log_probs",), convert=_same),
    VerlKey(f"{CORRECTION}.loss_type", ("algorithm.policy_loss",), "reinforce is policy_gradient"),
    VerlKey(f"{CORRECTION}.use_policy_gradient", ("algorithm.policy_loss",), "true is policy_gradient"),
    VerlKey("algorithm.rollout_is", (f"{CORRECTION}.mode",), "verl 0.6.0; false is none"),
    VerlKey("algorithm.rollout_is_threshold", (f"{CORRECTION}.upper",), "verl 0.6.0", _same),
    VerlKey("algorithm.rollout_is_threshold_lower", (f"{CORRECTION}.lower",), "verl 0.6.0", _same),
    VerlKey("algorithm.rollout_is_level", (f"{CORRECTION}.level",), "verl 0.6.0", _same),
    VerlKey("algorithm.rollout_is_mode", (f"{CORRECTION}.mode",), "verl 0.6.0", _same),
    VerlKey("algorithm.rollout_is_veto_threshold", (f"{CORRECTION}.veto_threshold",), "verl 0.6.0", _same),
    *_rows("algorithm", "use_pf_ppo pf_ppo.*", "preference feedback PPO is not built in"),
    # --- data
    VerlKey("data.train_files", ("data.train_files",), "a list", _files),
    VerlKey("data.val_files", ("data.val_files",), "a list", _files),
    *(VerlKey(f"data.{name}", (f"data.{name}",), note, _same) for name, note in (
        ("train_batch_size", "prompts, as in verl"), ("max_prompt_length", ""), ("max_response_length", ""),
        ("prompt_key", ""), ("shuffle", ""))),
    VerlKey("data.seed", ("trainer.seed",), convert=_same),
    VerlKey("data.val_max_samples", ("data.max_val_samples",), "-1 is null",
            lambda value: int(value) if int(value) > 0 else "null"),
    VerlKey("data.filter_overlong_prompts", ("data.overlong_prompts",), "filter, or error",
            lambda value: "filter" if value else "error"),
    VerlKey("data.truncation", ("data.overlong_prompts",),
        "prompts are never cut: filter leaves long ones out, error stops"),
    *_rows("data", "gen_batch_size", "each round generates the groups that are still missing"),
    *_rows("data", "train_max_samples", "shorten the file itself"),
    *_rows("data", "val_batch_size validation_shuffle", "a validation streams all its prompts at once"),
    *_rows("data", "custom_cls.* datagen.* sampler.*",
        "bring the file into verl's columns instead (docs/extending.md)"),
    *_rows("data", "return_raw_chat return_raw_input_ids return_full_prompt reward_fn_key dataloader_num_workers "
           "filter_overlong_prompts_workers use_shm", _ALWAYS + ", or not needed"),
    *_rows("data", "image_key video_key audio_key image_patch_size mm_processor_kwargs return_multi_modal_inputs",
           _VLM),
    *_rows("data", "function_tool_path", "own tools as path/to/file.py:function in rollout.multi_turn.tools"),
    VerlKey("data.tokenizer", ("model.tokenizer_path",), convert=_same),
    *_rows("data", "trust_remote_code apply_chat_template_kwargs.*",
        "the tokenizer's own chat template is taken as it is"),
    VerlKey("data.tool_config_path", ("rollout.multi_turn.tools",), "a list of tools in place of a file"),
    # --- actor
    VerlKey(f"{ACTOR}.ppo_mini_batch_size", ("learner.mini_batch_size",), "responses: x rollout.train.n"),
    *(VerlKey(f"{ACTOR}.{name}", ("learner.max_tokens_per_micro_batch",), note) for name, note in (
        ("ppo_max_token_len_per_gpu", "of all context-parallel ranks together: x CP"),
        ("ppo_micro_batch_size_per_gpu", "in tokens: x (max_prompt_length + max_response_length)"),
        ("ppo_micro_batch_size", "in tokens"), ("use_dynamic_bsz", "packing is always on"))),
    VerlKey(f"{ACTOR}.clip_ratio", ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"), "", _same),
    VerlKey(f"{ACTOR}.clip_ratio_low", ("algorithm.clip_ratio_low",), convert=_same),
    VerlKey(f"{ACTOR}.clip_ratio_high", ("algorithm.clip_ratio_high",), convert=_same),
    VerlKey(f"{ACTOR}.clip_ratio_c", ("algorithm.dual_clip",), "off here where nothing is said, 3 in verl", _same),
    VerlKey(f"{ACTOR}.entropy_coeff", ("algorithm.entropy_coefficient",), convert=_same),
    VerlKey(f"{ACTOR}.use_kl_loss", ("algorithm.kl_in_loss",), "the coefficient kl_loss_coef, or 0"),
    VerlKey(f"{ACTOR}.kl_loss_coef", ("algorithm.kl_in_loss",), "0 where use_kl_loss is false", _same),
    VerlKey(f"{ACTOR}.kl_loss_type", ("algorithm.kl_estimator",), "low_var_kl is k3", kl_estimator),
    VerlKey(f"{ACTOR}.loss_agg_mode", ("algorithm.loss_aggregation",), convert=_same),
    VerlKey(f"{ACTOR}.policy_loss.loss_mode", ("algorithm.policy_loss",), "vanilla is clip", policy_loss),
    VerlKey(f"{ACTOR}.tis_imp_ratio_cap", (f"{CORRECTION}.upper",), "verl 0.5; with mode=truncate, level=token", _same),
    VerlKey(f"{ACTOR}.grad_clip", ("learner.optimizer.clip_grad",), convert=_same),
    VerlKey(f"{ACTOR}.checkpoint.async_save", ("trainer.async_save",), convert=_same),
    VerlKey(f"{ACTOR}.ulysses_sequence_parallel_size", ("learner.tensor_model_parallel_size",),
            "with learner.sequence_parallel=true, Megatron's nearest to FSDP with Ulysses"),
    *_optimizer(f"{ACTOR}.optim", "learner.optimizer"),
    *_parallel(f"{ACTOR}.megatron"),
    VerlKey(f"{ACTOR}.megatron.use_distributed_optimizer", ("learner.use_distributed_optimizer",), convert=_same),
    VerlKey(f"{ACTOR}.megatron.dtype", ("learner.dtype",), convert=_same),
    VerlKey(f"{ACTOR}.fsdp_config.dtype", ("learner.dtype",), convert=_same),
    VerlKey(f"{ACTOR}.megatron.seed", ("trainer.seed",), convert=_same),
    VerlKey(f"{ACTOR}.megatron.dist_checkpointing_path", ("model.mcore_path",), "made by conversion/hf_to_mcore.py",
        _same),
    *_rows(f"{ACTOR}.megatron", "param_offload grad_offload optimizer_offload", _OFFLOAD),
    *_rows(f"{ACTOR}.megatron", "use_mbridge vanilla_mbridge use_dist_checkpointing use_remove_padding forward_only "
           "dist_checkpointing_prefix", "Hugging Face weights are read and packed as they are"),
    *(VerlKey(f"{ACTOR}.megatron.override_transformer_config.recompute_{name}", (f"learner.recompute.{name}",), "",
        _same)
      for name in ("granularity", "method", "num_layers", "modules")),
    VerlKey(f"{ACTOR}.megatron.override_transformer_config.fp8", ("learner.fp8.format",), "with learner.fp8.recipe",
        _same),
    VerlKey(f"{ACTOR}.megatron.override_transformer_config.fp8_recipe", ("learner.fp8.recipe",),
        "without delayed, whose scales are not yet there when log-probs are computed", fp8_recipe),
    *(VerlKey(f"{ACTOR}.megatron.{name}", ("learner.fp8.parameters",), "", _same)
      for name in ("override_transformer_config.fp8_param", "override_transformer_config.fp4_param",
                   "override_ddp_config.fp8_param_gather", "override_ddp_config.fp4_param_gather")),
    VerlKey(f"{ACTOR}.megatron.override_transformer_config.fp4", ("learner.fp8.recipe",), "e2m1 is nvfp4", fp4_recipe),
    *(VerlKey(f"{ACTOR}.megatron.override_transformer_config.{name}", (f"learner.{name}",), "", _same)
      for name in ("gradient_accumulation_fusion", "moe_permute_fusion", "moe_router_fusion",
                   "cpu_offloading_num_layers")),
    VerlKey(f"{ACTOR}.megatron.override_transformer_config.moe_token_dispatcher_type",
            ("learner.moe_token_dispatcher_type",), "packed sequences have no allgather; flex is DeepEP's",
            token_dispatcher),
    VerlKey(f"{ACTOR}.megatron.override_transformer_config.overlap_p2p_comm", ("learner.overlap_p2p_comm",),
            "with virtual pipeline stages"),
    VerlKey(f"{ACTOR}.megatron.override_transformer_config.batch_p2p_comm", ("learner.overlap_p2p_comm",),
            "true where overlap_p2p_comm is false"),
    *(VerlKey(f"{ACTOR}.megatron.override_ddp_config.{name}", (f"learner.{name}",), "", _same)
      for name in ("overlap_grad_reduce", "overlap_param_gather")),
    VerlKey(f"{ACTOR}.megatron.override_ddp_config.bucket_size", ("learner.gradient_bucket_size",), "", _same),
    *_rows(f"{ACTOR}.megatron", "override_transformer_config.* override_mcore_model_config.* override_ddp_config.*",
           "Megatron-Core's own settings follow the model and the layout"),
    *_rows(ACTOR, "fsdp_config.*", "FSDP's settings; the learner is Megatron-Core"),
    *_rows(ACTOR, "policy_loss.*", "for losses that are not built in: algorithm.policy_loss_kwargs of one's own"),
    *_rows(ACTOR, "strategy use_torch_compile use_fused_kernels entropy_checkpointing calculate_entropy "
           "entropy_from_logits_with_chunking use_remove_padding", _FUSED),
    *_rows(ACTOR, "ppo_epochs", "each response is trained on once (verl's default)"),
    *_rows(ACTOR, "shuffle data_loader_seed", "responses are shuffled by trainer.seed in every step"),
    *_rows(ACTOR, "loss_scale_factor", "seq-mean-token-sum-norm divides by data.max_response_length"),
    *_rows(ACTOR, "checkpoint.*", "a checkpoint holds everything, trainer.save_weights_freq's the weights; export "
           "makes Hugging Face's files of it"),
    *(VerlKey(f"{ACTOR}.{part}router_replay.mode", ("learner.routing_replay",), "R2: old_log_probs; R3: rollout",
        routing_replay)
      for part in ("", "megatron.")),
    *_rows(ACTOR, "router_replay.* megatron.router_replay.*",
           "rollouts/ of a run keeps what was replayed; rollout.replay_dir takes it"),
    *_rows(ACTOR, "profiler.* profile.*", _PROFILER),
    *_rows(ACTOR, "freeze_vision_tower", _VLM),
    # --- reference and rollout's log-probs
    VerlKey(f"{REF}.*", (), _REFERENCE),
    *_rows(ROLLOUT, "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
           "log_prob_max_token_len_per_gpu", _WORKERS),
    # --- rollout
    VerlKey(f"{ROLLOUT}.n", ("rollout.train.n",), convert=_same),
    VerlKey(f"{ROLLOUT}.temperature", ("rollout.train.temperature",), convert=_same),
    VerlKey(f"{ROLLOUT}.top_p", ("rollout.train.top_p",), convert=_same),
    VerlKey(f"{ROLLOUT}.top_k", ("rollout.train.top_k",), "-1: all", lambda value: value if int(value) > 0 else -1),
    *(VerlKey(f"{ROLLOUT}.val_kwargs.{name}", (f"rollout.val.{name}",), "", _same)
      for name in ("n", "top_p", "top_k", "temperature")),
    VerlKey(f"{ROLLOUT}.val_kwargs.do_sample", ("rollout.val.temperature",),
        "false is temperature 0, where verl heeds it"),
    VerlKey(f"{ROLLOUT}.name", ("rollout.engine.backend",), "SGLang serves in place of vLLM; hf is transformers",
            lambda value: "transformers" if value == "hf" else "sglang"),
    VerlKey(f"{ROLLOUT}.tensor_model_parallel_size", ("rollout.engine.tensor_parallel_size",), "", _same),
    VerlKey(f"{ROLLOUT}.pipeline_model_parallel_size", ("rollout.engine.tensor_parallel_size",),
        "engines have no stages"),
    VerlKey(f"{ROLLOUT}.expert_parallel_size", ("rollout.engine.expert_parallel_size",), "divides an engine's GPUs"),
    VerlKey(f"{ROLLOUT}.data_parallel_size", ("rollout.engine.count",), "engines fill the GPUs"),
    VerlKey(f"{ROLLOUT}.gpu_memory_utilization", ("rollout.engine.mem_fraction_static",), "weights and KV cache",
        _same),
    VerlKey(f"{ROLLOUT}.max_num_seqs", ("rollout.engine.max_running_requests",), "of each engine", _same),
    VerlKey(f"{ROLLOUT}.max_model_len", ("rollout.engine.context_length",), convert=_same),
    VerlKey(f"{ROLLOUT}.dtype", ("rollout.engine.dtype",), convert=_same),
    VerlKey(f"{ROLLOUT}.quantization", ("rollout.engine.quantization",), "fp8", _same),
    *(VerlKey(f"{ROLLOUT}.{name}", ("rollout.engine.extra_args",), note) for name, note in (
        ("enforce_eager", "[--disable-cuda-graph]"), ("enable_prefix_caching", "false: [--disable-radix-cache]"),
        ("engine_kwargs.sglang.*", "[--name, value]"))),
    *(VerlKey(f"{ROLLOUT}.{name}", ("weight_sync.bucket_bytes",), "in bytes: x 2^20", lambda value: int(value) * 2**20)
      for name in ("update_weights_bucket_megabytes", "checkpoint_engine.update_weights_bucket_megabytes")),
    VerlKey(f"{ROLLOUT}.prompt_length", ("data.max_prompt_length",), convert=_same),
    VerlKey(f"{ROLLOUT}.response_length", ("data.max_response_length",), convert=_same),
    VerlKey(f"{ROLLOUT}.multi_turn.enable", ("rollout.multi_turn.tools",), "false: [], and max_assistant_turns=1"),
    VerlKey(f"{ROLLOUT}.multi_turn.max_assistant_turns", ("rollout.multi_turn.max_assistant_turns",), "", _same),
    VerlKey(f"{ROLLOUT}.multi_turn.max_turns", ("rollout.multi_turn.max_assistant_turns",), "verl 0.4", _same),
    VerlKey(f"{ROLLOUT}.multi_turn.max_user_turns", ("rollout.multi_turn.max_tool_calls",),
        "tool results: x max_parallel_calls",
            _same),
    VerlKey(f"{ROLLOUT}.multi_turn.max_parallel_calls", ("rollout.multi_turn.max_tool_calls",), "calls of all turns"),
    VerlKey(f"{ROLLOUT}.multi_turn.max_tool_response_length", ("tools.code_interpreter.max_output_characters",),
            "characters; rollout.multi_turn.max_tool_response_tokens limits tokens", _same),
    VerlKey(f"{ROLLOUT}.multi_turn.tool_config_path", ("rollout.multi_turn.tools",),
            "a list of tools in place of a file: [code_interpreter] for SandboxFusionTool, settings in "
            "tools.code_interpreter, own tools as path/to/file.py:Class"),
    VerlKey(f"{ROLLOUT}.multi_turn.format", ("rollout.multi_turn.format",), convert=_same),
    VerlKey(f"{ROLLOUT}.enable_rollout_routing_replay", ("learner.routing_replay",), "rollout says it to both sides"),
    *_rows(ROLLOUT, "multi_turn.tool_response_truncate_side", "a long result loses its middle"),
    *_rows(ROLLOUT, "multi_turn.interaction_config_path agent.*",
        "an agent of one's own: rollout.agent (docs/extending.md)"),
    *_rows(ROLLOUT, "multi_turn.*", "tokens are never made twice: nothing to check or to choose"),
    *_rows(ROLLOUT, "mode free_cache_engine calculate_log_probs load_format multi_stage_wake_up", _ALWAYS),
    *_rows(ROLLOUT, "max_num_batched_tokens enable_chunked_prefill disable_log_stats engine_kwargs.* layered_summon "
           "cudagraph_capture_sizes ignore_eos logprobs_mode skip_tokenizer_init",
               "SGLang's own; rollout.engine.extra_args"),
    *_rows(ROLLOUT, "skip_rollout skip_dump_dir", "rollout.replay_dir takes a run's stored trajectories"),
    *_rows(ROLLOUT, "over_sample_rate", "see rollout.partial.over_sampling_factor, which loses no trajectory"),
    *_rows(ROLLOUT, "trace.* profiler.* prometheus.*", _PROFILER),
    VerlKey(f"{ROLLOUT}.*", (), "vLLM's or verl's own workers"),
    # --- model
    VerlKey(f"{MODEL}.path", ("model.path",), convert=_same),
    VerlKey(f"{MODEL}.tokenizer_path", ("model.tokenizer_path",), convert=_same),
    VerlKey(f"{MODEL}.enable_gradient_checkpointing", ("learner.recompute.granularity",), "FSDP's; full",
            lambda value: "full" if value else "null"),
    *(VerlKey(f"{MODEL}.{name}", ("learner.lora.rank",), convert=_same) for name in ("lora_rank", "lora.rank")),
    *(VerlKey(f"{MODEL}.{name}", ("learner.lora.alpha",), convert=_same) for name in ("lora_alpha", "lora.alpha")),
    *(VerlKey(f"{MODEL}.{name}", ("learner.lora.targets",), "kinds of matrices: attention, mlp, experts")
      for name in ("target_modules", "lora.target_modules")),
    *_rows(MODEL, "exclude_modules lora.exclude_modules", "adapters are chosen by kind: learner.lora.targets"),
    *(VerlKey(f"{MODEL}.{name}", ("learner.lora.path",), "has to have this rank and alpha")
      for name in ("lora_adapter_path", "lora.adapter_path")),
    *_rows(MODEL, "lora.*", "adapters without dropout, as learner.lora describes them"),
    *_rows(MODEL, "use_remove_padding use_fused_kernels fused_kernel_options.* use_liger use_shm tiled_mlp.* "
           "enable_activation_offload", _FUSED),
    *_rows(MODEL, "trust_remote_code external_lib hf_config_path", "families of one's own: model.families"),
    *_rows(MODEL, "custom_chat_template", "the tokenizer's own chat template is taken as it is"),
    VerlKey(f"{MODEL}.*", (), "the model's own config.json holds"),
    VerlKey("actor_rollout_ref.*", (), "verl's workers"),
    # --- critic
    *_optimizer("critic.optim", "learner.critic.optimizer"),
    VerlKey("critic.cliprange_value", ("learner.critic.value_clip",), convert=_same),
    VerlKey("critic.grad_clip", ("learner.critic.optimizer.clip_grad",), convert=_same),
    VerlKey("critic.model.path", (), "the critic starts from model.path, with a new value head"),
    VerlKey("critic.*", (),
        "learner.critic has its settings; layout, mini-batches and token budget are those of the learner"),
    # --- reward
    *(VerlKey(f"{prefix}custom_reward_function.{name}", ("reward.function",), "path/to/file.py:function", convert)
      for prefix in ("", "reward.") for name, convert in (("path", _same), ("name", None))),
    *(VerlKey(f"{prefix}custom_reward_function.reward_kwargs.*", ("reward.function_kwargs",))
      for prefix in ("", "reward.")),
    *(VerlKey(f"{prefix}.{name}", (ours,), note, convert)
      for prefix in ("reward_model.reward_kwargs.overlong_buffer_cfg", "reward_model.overlong_buffer",
                     "reward.reward_kwargs.overlong_buffer_cfg")
      for name, ours, note, convert in (
        ("enable", "reward.overlong.mode", "true is soft_punish", lambda value: "soft_punish" if value else "none"),
        ("len", "reward.overlong.buffer_length", "", _same), ("penalty_factor", "reward.overlong.penalty", "", _same))),
    *_rows("reward_model", "reward_kwargs.max_resp_len", "data.max_response_length is taken"),
    *_rows("reward_model", "reward_kwargs.overlong_buffer_cfg.log overlong_buffer.log", "the penalty is always logged"),
    *_rows("reward_model", "reward_manager reward_loop_source reward_loop_module_path reward_loop_class_name "
           "use_reward_loop launch_reward_fn_async", "rewards are always scored in processes while others generate"),
    *_rows("reward", "reward_kwargs.max_resp_len", "data.max_response_length is taken"),
    *_rows("reward", "reward_kwargs.overlong_buffer_cfg.log", "the penalty is always logged"),
    *(VerlKey(f"{section}.num_workers", ("reward.processes",), convert=_same)
      for section in ("reward_model", "reward")),
    *_rows("reward", "reward_manager.*", "rewards are always scored in processes while others generate"),
    *_rows("reward", "sandbox_fusion.*", "a reward function that runs code asks a server of its own"),
    *_rows("reward", "reward_model.* reward_kwargs.*",
           "there is no reward model: a reward function may ask a server that serves one"),
    VerlKey("sandbox_fusion.*", (), "a reward function that runs code asks a server of its own"),
    VerlKey("reward_model.sandbox_fusion.*", (), "a reward function that runs code asks a server of its own"),
    VerlKey("reward_model.*", (), "there is no reward model: a reward function may ask a server that serves one"),
    VerlKey("reward_manager.*", (), "rewards are always scored in processes while others generate"),
    # --- trainer
    *(VerlKey(f"trainer.{name}", (f"trainer.{name}",), "", _same) for name in (
        "project_name", "experiment_name", "total_epochs", "val_before_train", "val_only", "log_val_generations",
        "resume_mode", "resume_from_path", "rollout_data_dir")),
    VerlKey("trainer.total_training_steps", ("trainer.total_steps",), convert=_same),
    VerlKey("trainer.save_freq", ("trainer.save_freq",), "-1 is 0; the last step is always saved", _unless_negative),
    VerlKey("trainer.test_freq", ("trainer.test_freq",), "-1 is 0; the last step is always validated",
        _unless_negative),
    VerlKey("trainer.logger", ("trainer.loggers",), "jsonl besides, which reports read", _files),
    VerlKey("trainer.nnodes", ("cluster.nodes",), "and learner.world_size of all GPUs", _same),
    VerlKey("trainer.n_gpus_per_node", ("cluster.gpus_per_node",), "and learner.world_size of all GPUs", _same),
    VerlKey("trainer.default_local_dir", ("trainer.runs_dir",), "the run lies in <runs_dir>/<experiment_name>"),
    VerlKey("trainer.max_actor_ckpt_to_keep", ("trainer.keep_checkpoints",), convert=_same),
    VerlKey("trainer.critic_warmup", ("learner.critic.warmup_steps",), convert=_same),
    *_rows("trainer", "validation_data_dir", "<run>/validation/ holds every validation's trajectories"),
    VerlKey("trainer.device", (), "GPUs are taken where there are some (learner.device, rollout.engine.device)"),
    *_rows("trainer", "balance_batch", "micro-batches are always balanced over ranks"),
    *_rows("trainer", "default_hdfs_dir del_local_ckpt_after_load max_critic_ckpt_to_keep esi_redundant_time",
           "checkpoints lie in the run's directory, on a file system that all nodes share"),
    *_rows("trainer", "profile_steps npu_profile.* profiler.*", _PROFILER),
    *_rows("trainer", "ray_wait_register_center_timeout use_legacy_worker_impl", "verl's workers"),
    VerlKey("global_profiler.*", (), _PROFILER),
    VerlKey("ray_kwargs.*", (), "cluster.ray_address; docs/cluster.md says how Ray is started"),
    VerlKey("ray_init.*", (), "cluster.ray_address; docs/cluster.md says how Ray is started"),
    VerlKey("transfer_queue.*", (), "verl's own data plane"),
    VerlKey("distillation.*", (), "teachers have other settings here: algorithm.distillation"),
    *_rows("trainer", "use_v1 v1.*", "verl's trainers of 0.9; see trainer.mode, cluster.placement and rollout.partial"),
    VerlKey("skip.*", (), "rollout.replay_dir takes a run's stored trajectories"),
)  # fmt: skip
