"""Examples in the shape of verl's own, from the file to a configuration that loads."""

import io
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest
import yaml
from rich.console import Console

from megatron_retool.config import Config, ConfigError, load_config
from megatron_retool.from_verl.command import translate_file
from megatron_retool.from_verl.convert import VerlSource, translate

EXAMPLES = Path(__file__).parent / "verl_examples"


def from_verl(file, tmp_path):
    """(exit status, configuration or None, what was printed)."""
    out = io.StringIO()
    target = tmp_path / "ours.yaml"
    status = translate_file(file, target, Console(file=out, width=400))
    return status, load_config(target) if status == 0 else None, out.getvalue()


def test_multi_turn_dapo_on_fsdp(tmp_path):
    status, config, printed = from_verl(EXAMPLES / "retool_dapo.sh", tmp_path)
    assert status == 0
    assert (config.data.train_batch_size, config.rollout.train.n, config.learner.mini_batch_size) == (512, 16, 64 * 16)
    assert config.data.train_files == ["/data/dapo_math"] and config.data.max_response_length == 16384
    assert (config.cluster.nodes, config.cluster.gpus_per_node, config.cluster.placement) == (2, 8, "colocated")
    assert (config.learner.world_size, config.rollout.engine.count, config.rollout.engine.tensor_parallel_size) == (
        16,
        4,
        4,
    )
    assert (config.learner.tensor_model_parallel_size, config.learner.sequence_parallel) == (8, True)
    assert config.learner.max_tokens_per_micro_batch == 18432 * 8
    assert config.learner.recompute.granularity == "full"
    assert (config.algorithm.clip_ratio_low, config.algorithm.clip_ratio_high, config.algorithm.dual_clip) == (
        0.2,
        0.28,
        10,
    )
    assert not config.algorithm.dynamic_sampling.enable and config.algorithm.rollout_correction.mode == "none"
    assert config.rollout.multi_turn.tools == ["code_interpreter"] and config.rollout.multi_turn.max_tool_calls == 8
    assert config.tools.code_interpreter.workers == 96 and config.tools.code_interpreter.memory_limit_mb == 512
    assert (config.rollout.val.n, config.rollout.val.top_p, config.rollout.val.temperature) == (30, 0.6, 1.0)
    assert config.trainer.loggers == ["console", "wandb", "jsonl"]
    assert (config.trainer.runs_dir, config.trainer.experiment_name) == ("/checkpoints", "math_32b")
    assert config.learner.optimizer.betas == [0.9, 0.999] and config.learner.optimizer.weight_decay == 0.01
    assert config.reward.function == "rewards/own.py:compute_score"
    for words in ("algorithm.adv_estimator -> algorithm.advantage=grpo", "no counterpart", "to decide", "Megatron"):
        assert words in printed


def test_grpo_on_gsm8k_with_megatron(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    status, config, printed = from_verl(EXAMPLES / "grpo_gsm8k_megatron.sh", tmp_path)
    assert status == 0
    assert config.data.train_files == ["/home/me/data/gsm8k/train.parquet", "/home/me/data/math/train.parquet"]
    learner = config.learner
    assert (learner.tensor_model_parallel_size, learner.pipeline_model_parallel_size, learner.world_size) == (2, 2, 8)
    assert learner.sequence_parallel and learner.mini_batch_size == 256 * 5
    assert learner.max_tokens_per_micro_batch == 4 * 2048
    assert (config.algorithm.kl_in_loss, config.algorithm.kl_estimator) == (0.001, "k3")
    assert config.algorithm.clip_ratio_high == 0.2 and config.algorithm.dual_clip == 3.0
    assert config.rollout.val.temperature == 0.0 and config.rollout.val.n == 1
    assert config.rollout.multi_turn.tools == [] and config.rollout.multi_turn.max_assistant_turns == 1
    assert "data.return_raw_chat=$return_raw_chat has no value" in printed


def test_dapo_with_megatron(tmp_path):
    status, config, _ = from_verl(EXAMPLES / "dapo_megatron.sh", tmp_path)
    assert status == 0
    sampling, correction = config.algorithm.dynamic_sampling, config.algorithm.rollout_correction
    assert (sampling.enable, sampling.metric, sampling.max_generation_batches) == (True, "acc", 10)
    assert (correction.level, correction.mode, correction.upper) == ("token", "truncate", 2.0)
    assert correction.rejection == ["geometric_ratio 0.999 1.001"] and correction.veto_threshold is None
    overlong = config.reward.overlong
    assert (overlong.mode, overlong.buffer_length, overlong.penalty) == ("soft_punish", 4096, 1.0)
    assert config.learner.max_tokens_per_micro_batch == 10240 * 2
    assert config.learner.recompute.method == "uniform" and config.learner.optimizer.warmup_steps == 10
    assert (config.trainer.save_freq, config.trainer.total_steps) == (0, 200)
    assert config.rollout.val.temperature == 1.0 and config.data.overlong_prompts == "filter"


def test_a_resolved_yaml_with_interpolations(tmp_path):
    file = tmp_path / "verl.yaml"
    file.write_text(
        """
defaults: [ppo_megatron_trainer]
actor_rollout_ref:
  model: {path: /m, _target_: verl.Model}
  actor: {strategy: megatron, ppo_mini_batch_size: 4, rollout_n: "${actor_rollout_ref.rollout.n}"}
  rollout: {n: 2, tensor_model_parallel_size: 1, name: "???", prompt_length: "${oc.select:data.max_prompt_length,512}"}
data: {train_files: a.parquet, train_batch_size: 8}
critic: {optim: {lr: 2e-5}}
trainer: {n_gpus_per_node: 1, nnodes: 1, logger: [console, clearml]}
algorithm: {adv_estimator: gae, use_kl_in_reward: true, kl_penalty: abs, kl_ctrl: {type: adaptive, target_kl: 0.2}}
"""
    )
    status, config, printed = from_verl(file, tmp_path)
    assert status == 0, printed
    assert (config.learner.mini_batch_size, config.learner.critic.optimizer.lr) == (8, 2e-5)
    algorithm = config.algorithm
    assert (algorithm.kl_in_reward, algorithm.kl_estimator, algorithm.adaptive_kl_target) == (0.001, "abs", 0.2)
    assert algorithm.gae_lambda == 1.0 and "clearml has no counterpart" in printed


def test_verls_search_server_is_asked_here_too(tmp_path):
    (tmp_path / "tools.yaml").write_text(
        """
tools:
  - class_name: verl.tools.search_tool.SearchTool
    config: {retrieval_service_url: "http://10.0.0.5:8000/retrieve", topk: 5, timeout: 30, num_workers: 120}
"""
    )
    (tmp_path / "verl.yaml").write_text(
        """
actor_rollout_ref:
  model: {path: /m}
  rollout: {n: 2, name: sglang, multi_turn: {enable: true, tool_config_path: tools.yaml}}
data: {train_files: a.parquet, train_batch_size: 8}
trainer: {n_gpus_per_node: 1, nnodes: 1}
algorithm: {adv_estimator: grpo}
"""
    )
    _, config, printed = from_verl(tmp_path / "verl.yaml", tmp_path)
    search = config.tools.search
    assert config.rollout.multi_turn.tools == ["search"], printed
    assert (search.backend, search.service.base_url) == ("retriever", "http://10.0.0.5:8000")
    assert (search.top_k, search.service.timeout_seconds) == (5, 30.0)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gone.sh", None, "does not exist"),
        ("a.yaml", "a: [", "not valid YAML"),
        ("a.yaml", "[1]", "must hold a mapping"),
        ("a.sh", "echo hello", "no setting of verl's"),
        ("a.sh", "n=1\nx a.b='1\nc.d=2", "a.sh, line 2: a quote or parenthesis that opens here is never closed"),
        ("a.sh", "x a.b=(1\n" + "c.d=2\n" * 20_000, "a.sh, line 1: the statement that begins here has more than"),
        ("a.sh", "torchrun -m verl.trainer.fsdp_sft_trainer data.max_length=3 optim.lr=1e-5", "the section sft"),
    ],
)
def test_files_that_cannot_be_translated(name, content, words, tmp_path):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=words):
        translate_file(tmp_path / name, tmp_path / "out.yaml", Console(file=io.StringIO()))


def test_an_existing_file_is_not_overwritten(tmp_path):
    (tmp_path / "ours.yaml").write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        from_verl(EXAMPLES / "dapo_megatron.sh", tmp_path)


def test_what_does_not_load_yet_is_written_and_said(tmp_path):
    (tmp_path / "a.sh").write_text("x algorithm.adv_estimator=grpo trainer.n_gpus_per_node=2")
    status, _, printed = from_verl(tmp_path / "a.sh", tmp_path)
    assert status == 1 and "does not load yet" in printed and "rollout.train.n" in printed
    assert "To decide" in (tmp_path / "ours.yaml").read_text()


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"algorithm.rollout_is": True, "algorithm.rollout_is_threshold": 4.0, "algorithm.rollout_is_mode": "mask"},
         {"mode": "mask", "lower": 0.25, "upper": 4.0, "level": "token"}),
        ({"actor_rollout_ref.actor.tis_imp_ratio_cap": 2}, {"mode": "truncate", "upper": 2.0, "level": "token"}),
        ({"algorithm.rollout_correction.rollout_rs": "token_k1,seq_max_k2",
          "algorithm.rollout_correction.rollout_rs_threshold": "0.6_1.6,2.5"},
         {"rejection": ["token_ratio 0.6 1.6", "sequence_max_k2 -inf 2.5"]}),
        ({"algorithm.rollout_correction.rollout_rs": "sequence",
            "algorithm.rollout_correction.rollout_rs_threshold": 2.0},
         {"rejection": ["sequence_ratio 0.5 2"]}),
        ({"algorithm.rollout_correction.bypass_mode": True}, {"bypass_old_log_probs": True, "mode": "none"}),
    ],
)  # fmt: skip
def test_rollout_correction_of_each_version(given, ours):
    settings = translate(VerlSource(given)).settings
    for name, value in ours.items():
        assert settings[f"algorithm.rollout_correction.{name}"] == value


@pytest.mark.parametrize("part", ["", "megatron."])
def test_the_replay_of_experts_in_our_words(part):
    """verl 0.7 moved the key below the strategy's."""
    key = f"actor_rollout_ref.actor.{part}router_replay"
    for mode, ours in (("disabled", "none"), ("R2", "old_log_probs"), ("R3", "rollout")):
        given = {f"{key}.mode": mode, "actor_rollout_ref.rollout.enable_rollout_routing_replay": mode == "R3"}
        translation = translate(VerlSource(given))
        assert translation.settings["learner.routing_replay"] == ours and not translation.missing
    translation = translate(VerlSource({f"{key}.mode": "R3", f"{key}.record_file": "a.pt"}))
    assert list(translation.missing) == [f"{key}.record_file"]


def test_the_precision_aware_optimizer_and_its_dtypes():
    options = "actor_rollout_ref.actor.optim.override_optimizer_config"
    ours = "learner.optimizer"
    given = {f"{options}.use_precision_aware_optimizer": True, f"{options}.exp_avg_dtype": "bf16",
             f"{options}.exp_avg_sq_dtype": "torch.float16", f"{options}.main_params_dtype": "bf16"}  # fmt: skip
    translation = translate(VerlSource(given, megatron=True))
    assert translation.settings[f"{ours}.use_precision_aware_optimizer"] is True and not translation.missing
    assert translation.settings[f"{ours}.exp_avg_dtype"] == "bfloat16"
    assert translation.settings[f"{ours}.exp_avg_sq_dtype"] == "float16"
    assert f"{ours}.main_params_dtype" not in translation.settings
    assert any("main_params_dtype=bf16" in text for text in translation.decisions)
    # Megatron-Core asks for both together; offloaded state is precision-aware here by itself.
    both = translate(VerlSource(given | {f"{options}.optimizer_cpu_offload": True}, megatron=True)).settings
    assert both[f"{ours}.cpu_offload"] is True and f"{ours}.use_precision_aware_optimizer" not in both
    # A dtype without the option would be refused.
    alone = translate(VerlSource({f"{options}.exp_avg_dtype": "bf16"}, megatron=True)).settings
    assert f"{ours}.exp_avg_dtype" not in alone


@pytest.mark.parametrize("virtual", [2, None])
def test_overlapped_exchanges_need_virtual_stages(virtual):
    megatron = "actor_rollout_ref.actor.megatron"
    given = {f"{megatron}.override_transformer_config.overlap_p2p_comm": True,
             f"{megatron}.pipeline_model_parallel_size": 4,
             f"{megatron}.virtual_pipeline_model_parallel_size": virtual}  # fmt: skip
    translation = translate(VerlSource(given, megatron=True))
    assert translation.settings.get("learner.overlap_p2p_comm") is (True if virtual else None)
    assert any("overlap_p2p_comm" in text for text in translation.decisions) is (virtual is None)


@pytest.mark.parametrize("recipe", [None, "delayed", "blockwise"])
def test_fp8_with_delayed_scaling_is_left_to_the_reader(recipe):
    options = "actor_rollout_ref.actor.megatron.override_transformer_config"
    translation = translate(
        VerlSource({f"{options}.fp8": "e4m3"} | ({f"{options}.fp8_recipe": recipe} if recipe else {}))
    )
    ours = "blockwise" if recipe == "blockwise" else None
    assert translation.settings.get("learner.fp8.recipe") == ours
    assert any("delayed FP8 scaling" in text for text in translation.decisions) is (ours is None)


def test_engines_with_groups_of_experts_and_speculative_decoding():
    rollout, engine = "actor_rollout_ref.rollout", "rollout.engine"
    sglang = f"{rollout}.engine_kwargs.sglang"
    given = {f"{rollout}.tensor_model_parallel_size": 8, f"{rollout}.expert_parallel_size": 4,
             f"{sglang}.speculative_algorithm": "NGRAM", f"{sglang}.speculative_num_draft_tokens": 8,
             f"{sglang}.attn_dp_size": 2, f"{sglang}.page_size": 16}  # fmt: skip
    translation = translate(VerlSource(given, megatron=True))
    settings = translation.settings
    assert settings[f"{engine}.expert_parallel_size"] == 4
    assert settings[f"{engine}.speculative.algorithm"] == "NGRAM"
    assert settings[f"{engine}.speculative.num_draft_tokens"] == 8
    assert settings[f"{engine}.extra_args"] == ["--page-size", "16"]
    assert any("attention_data_parallel_size" in text for text in translation.decisions)
    odd = translate(VerlSource(given | {f"{rollout}.expert_parallel_size": 3}, megatron=True))
    assert f"{engine}.expert_parallel_size" not in odd.settings
    assert any("expert_parallel_size=3" in text for text in odd.decisions)


def test_a_mini_batch_that_does_not_fit_is_made_to_fit_and_said():
    given = {"data.train_batch_size": 10, "actor_rollout_ref.rollout.n": 2, "trainer.n_gpus_per_node": 2,
             "actor_rollout_ref.actor.ppo_mini_batch_size": 3}  # fmt: skip
    translation = translate(VerlSource(given))
    assert translation.settings["learner.mini_batch_size"] == 4
    assert any("in place of 6" in text for text in translation.decisions)


def test_sections_come_in_our_order(tmp_path):
    from_verl(EXAMPLES / "dapo_megatron.sh", tmp_path)
    sections = list(yaml.safe_load((tmp_path / "ours.yaml").read_text()))
    assert sections == [name for name in Config.__dataclass_fields__ if name in sections]


def script(tmp_path, *overrides):
    file = tmp_path / "run.sh"
    file.write_text("python3 -m verl.trainer.main_ppo " + " ".join(overrides) + "\n")
    return file


BASE = ("algorithm.adv_estimator=grpo", "data.train_files=a.parquet", "actor_rollout_ref.model.path=/m",
        "actor_rollout_ref.rollout.n=2", "trainer.n_gpus_per_node=2")  # fmt: skip


def test_without_a_function_the_data_sources_choose_the_grader(tmp_path):
    status, config, printed = from_verl(script(tmp_path, *BASE), tmp_path)
    assert status == 0 and config.reward.function == "by_data_source"
    assert "a run on rows of another data_source is refused" in printed


def test_a_data_source_without_a_grader_is_left_to_decide(tmp_path):
    sources = ["openai/gsm8k", "codecontests", "my/own"]
    parquet.write_table(pyarrow.table({"data_source": sources}), tmp_path / "a.parquet")
    _, _, printed = from_verl(script(tmp_path, *BASE), tmp_path)
    assert "data_source='codecontests' runs code" in printed and "data_source='my/own' has no grader" in printed
    assert "gsm8k" not in printed.partition("to decide")[2]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor_rollout_ref.model.lora_rank=0.5", "no rank: give a whole number"),
        ("distillation.enabled=True", "distillation"),
    ],
)
def test_another_kind_of_training_is_refused_and_nothing_is_written(override, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        from_verl(script(tmp_path, *BASE, override), tmp_path)
    assert not (tmp_path / "ours.yaml").exists()


@pytest.mark.parametrize(
    ("overrides", "expected", "asked"),
    [
        (["lora_rank=64", "lora_alpha=32"], (64, 32.0, ["attention", "mlp", "experts"]), ""),
        (["lora_rank=8", "target_modules=[q_proj,k_proj,v_proj,o_proj]"], (8, 16.0, ["attention"]), ""),
        (["lora.rank=256"], (256, 32.0, ["attention", "mlp", "experts"]), ""),
        (["lora.rank=4", "lora.target_modules=[linear_fc1,linear_fc2]"], (4, 32.0, ["mlp", "experts"]), ""),
        (["lora_rank=8", "target_modules=[q_proj,v_proj]"], (8, 16.0, ["attention"]), "every matrix of these kinds"),
        (["lora_rank=8", "exclude_modules=.*visual.*"], (8, 16.0, ["attention", "mlp", "experts"]), "chosen by kind"),
    ],
)
def test_adapters_are_translated(overrides, expected, asked, tmp_path):
    given = [f"actor_rollout_ref.model.{text}" for text in overrides]
    status, config, printed = from_verl(script(tmp_path, *BASE, *given), tmp_path)
    lora = config.learner.lora
    assert status == 0 and (lora.rank, lora.alpha, lora.targets) == expected
    decisions = printed.partition("to decide")[2]
    assert asked in decisions and ("target_modules" in decisions or "exclude_modules" in decisions) == bool(asked)


@pytest.mark.parametrize("prefix", ["lora_", "lora."])
def test_an_adapter_to_start_from_is_translated(prefix, tmp_path):
    given = [f"actor_rollout_ref.model.{prefix}{text}" for text in ("rank=8", "adapter_path=/adapter")]
    status, config, _ = from_verl(script(tmp_path, *BASE, *given), tmp_path)
    assert status == 0 and config.learner.lora.path == "/adapter"


def test_no_lora_is_no_question(tmp_path):
    status, _, printed = from_verl(script(tmp_path, *BASE, "actor_rollout_ref.model.lora_rank=0"), tmp_path)
    assert status == 0 and "lora_rank=0" not in printed.partition("to decide")[2]


def test_a_fixed_kl_coefficient_has_no_target(tmp_path):
    """A resolved configuration holds kl_ctrl whole, whichever type is on."""
    resolved = [
        f"algorithm.kl_ctrl.{text}" for text in ("type=fixed", "kl_coef=0.001", "target_kl=0.1", "horizon=10000")
    ]
    for more in ([], ["algorithm.use_kl_in_reward=True"]):
        target = tmp_path / str(len(more))
        target.mkdir()
        status, config, printed = from_verl(script(tmp_path, *BASE, *resolved, *more), target)
        assert status == 0, printed
        assert config.algorithm.adaptive_kl_target is None
        assert config.algorithm.kl_in_reward == (0.001 if more else 0.0)


def test_multi_turn_without_a_tool_file(tmp_path):
    multi_turn = "actor_rollout_ref.rollout.multi_turn"
    overrides = (f"{multi_turn}.enable=True", f"{multi_turn}.tool_config_path=null")
    status, config, printed = from_verl(script(tmp_path, *BASE, *overrides), tmp_path)
    assert status == 0 and config.rollout.multi_turn.tools == []
    assert "None" not in printed and "names no tools" in printed


def test_bounds_of_icepop_mask(tmp_path):
    correction = "algorithm.rollout_correction"
    overrides = (f"{correction}.rollout_is=token", f"{correction}.rollout_is_threshold=0.5_4.0")
    status, config, printed = from_verl(script(tmp_path, *BASE, *overrides), tmp_path)
    assert status == 0, printed
    found = config.algorithm.rollout_correction
    assert (found.mode, found.lower, found.upper) == ("mask", 0.5, 4.0)


@pytest.mark.parametrize(
    "key",
    [
        "reward.num_workers", "reward.reward_manager.name", "reward.reward_model.rollout.dtype", "trainer.use_v1",
        "trainer.v1.trainer_mode", "sandbox_fusion.url", "skip.rollout.enable", "data.audio_key",
        "distillation.n_gpus_per_node",
    ],
)  # fmt: skip
def test_keys_of_newer_versions_are_verls(key):
    assert not translate(VerlSource({key: None})).strange
