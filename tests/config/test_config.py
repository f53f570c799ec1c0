from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from megatron_retool.cluster.placement import plan_placement
from megatron_retool.config import Config, ConfigError, load_config, save_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def test_override_reaches_nested_key():
    config = load_config(None, ["rollout.train.n=4", "learner.optimizer.betas=[0.8,0.9]", "data.train_batch_size=16"])
    assert config.rollout.train.n == 4
    assert config.learner.optimizer.betas == [0.8, 0.9]


def test_override_wins_over_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("trainer: {seed: 3, total_steps: 9}\n")
    config = load_config(file, ["trainer.seed=4"])
    assert (config.trainer.seed, config.trainer.total_steps) == (4, 9)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learner.tensor_parallel_size=2", ["learner.tensor_parallel_size", "learner.tensor_model_parallel_size"]),
        ("tools.code_interpreter.share_results=true", ["share_results is no longer a setting", "remove the key"]),
        ("trainer.sead=2", ["trainer.sead", "trainer.seed"]),
        ("trainer.seed=many", ["trainer.seed", "many"]),
        ("trainer.resume_mode=sometimes", ["trainer.resume_mode", "resume_path"]),
        ("no_equals_sign", ["no_equals_sign", "dotted.key=value"]),
        ("trainer.loggers=[{", ["trainer.loggers", "not valid YAML"]),
        ("learner.world_size=3", []),
        ("learner.sequence_parallel=true", ["tensor_model_parallel_size"]),
        ("learner.mini_batch_size=7", ["mini_batch_size", "512"]),
        ("rollout.train.n=1", ["rollout.train.n"]),
        ("trainer.resume_mode=resume_path", ["resume_from_path"]),
        ("data.train_batch_size=0", ["train_batch_size"]),
    ],
)
def test_bad_override_names_key_and_cure(override, words):
    if override == "learner.world_size=3":
        override_list = [override, "learner.tensor_model_parallel_size=2"]
        words = ["learner.world_size=3", "TP x PP x CP = 2"]
    else:
        override_list = [override]
    with pytest.raises(ConfigError) as caught:
        load_config(None, override_list)
    for word in words:
        assert word in str(caught.value)


def test_a_deterministic_run_seeds_its_engines_and_leaves_nothing_to_timing():
    assert load_config(None, ["trainer.seed=5"]).rollout.engine.random_seed is None
    deterministic = ["trainer.seed=5", "trainer.deterministic=true"]
    assert load_config(None, deterministic).rollout.engine.random_seed == 5
    assert load_config(None, deterministic).tools.code_interpreter.hide_addresses
    assert load_config(None, [*deterministic, "rollout.engine.random_seed=9"]).rollout.engine.random_seed == 9
    for override in (
        "rollout.staleness=1", "rollout.partial.enable=true", "rollout.branching.enable=true",
        "rollout.engine.backend=transformers", "algorithm.dynamic_sampling.surplus=next_step",
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"trainer.deterministic=true: with {override.partition('=')[0]}"):
            load_config(None, [*deterministic, override])
        load_config(None, [*deterministic, override, "rollout.replay_dir=stored"])


def test_three_filters_at_once_are_refused_for_training():
    filters = [f"rollout.{{}}.{setting}" for setting in ("top_k=50", "top_p=0.9", "min_p=0.01")]
    with pytest.raises(ConfigError, match="top_k=50, top_p=0.9 and min_p=0.01 together"):
        load_config(None, [setting.format("train") for setting in filters])
    load_config(None, [setting.format("train") for setting in filters[:2]])
    load_config(None, [setting.format("val") for setting in filters])


def test_both_kl_penalties_are_refused():
    with pytest.raises(ConfigError, match="same KL twice"):
        load_config(None, ["algorithm.kl_in_loss=0.1", "algorithm.kl_in_reward=0.1"])


def test_a_critic_and_dynamic_sampling_are_refused_together():
    with pytest.raises(ConfigError, match=r"gae.*set algorithm\.dynamic_sampling\.enable=false"):
        load_config(None, ["algorithm.advantage=gae"])
    load_config(None, ["algorithm.advantage=gae", "algorithm.dynamic_sampling.enable=false"])


def test_experts_of_old_log_probs_that_are_not_computed_are_refused():
    correction = "algorithm.rollout_correction"
    bypass = [f"{correction}.bypass_old_log_probs=true", f"{correction}.mode=none", f"{correction}.denominator=pre"]
    load_config(None, [*bypass, "learner.routing_replay=rollout"])
    with pytest.raises(ConfigError, match=r"learner\.routing_replay=old_log_probs .*bypass_old_log_probs leaves out"):
        load_config(None, [*bypass, "learner.routing_replay=old_log_probs"])


def test_vpp_on_two_stages_needs_overlap():
    overrides = [
        "learner.world_size=2",
        *(f"learner.{kind}pipeline_model_parallel_size=2" for kind in ("", "virtual_")),
    ]
    with pytest.raises(ConfigError, match="needs learner.overlap_p2p_comm=true"):
        load_config(None, overrides)
    load_config(None, [*overrides, "learner.overlap_p2p_comm=true"])


def test_missing_file_and_bad_yaml(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(broken)


def test_a_file_extends_another(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "trainer: {seed: 3, total_steps: 9}\nlearner: {optimizer: {betas: [0.8, 0.9]}}\n"
    )
    (tmp_path / "more").mkdir()
    middle, file = tmp_path / "middle.yaml", tmp_path / "more" / "c.yaml"
    middle.write_text("extends: base.yaml\ntrainer: {seed: 4}\n")
    file.write_text("extends: ../middle.yaml\nlearner: {optimizer: {betas: [0.7, 0.9]}}\n")
    config = load_config(file, ["trainer.test_freq=7"])
    assert (config.trainer.seed, config.trainer.total_steps, config.trainer.test_freq) == (4, 9, 7)
    assert config.learner.optimizer.betas == [0.7, 0.9]


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("extends: gone.yaml", ["gone.yaml", "c.yaml extends", "does not exist"]),
        ("extends: [a.yaml]", ["c.yaml", "must name one file"]),
        ("extends: c.yaml", ["c.yaml", "leads back to itself"]),
        ("extends: other.yaml", ["other.yaml", "leads back to itself"]),
        ("extends: broken.yaml", ["broken.yaml", "trainer.sead"]),
    ],
)
def test_bad_extends(base, words, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(base)
    (tmp_path / "other.yaml").write_text("extends: c.yaml")
    (tmp_path / "broken.yaml").write_text("trainer: {sead: 3}")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("override", "urls"),
    [
        ("http://a:1", ["http://a:1"]),
        ("[http://a:1, http://b:2]", ["http://a:1", "http://b:2"]),
        ("null", []),
    ],
)
def test_code_interpreter_url_is_one_or_several(override, urls, tmp_path):
    config = load_config(None, [f"tools.code_interpreter.url={override}"])
    assert config.tools.code_interpreter.urls == urls
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize("value", ["3", "[]", "[1]", "{a: 1}"])
def test_code_interpreter_url_of_another_type(value):
    with pytest.raises(ConfigError, match=r"tools\.code_interpreter\.url=.*must be a URL, a list of URLs, or null"):
        load_config(None, [f"tools.code_interpreter.url={value}"])


def test_unknown_key_inside_a_list_of_sections(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("sft: {stages: [{name: a, step: 3}]}\n")
    with pytest.raises(ConfigError, match=r"sft\.stages\[0\]\.step"):
        load_config(file)


def test_frozen_after_parsing():
    config = load_config(None)
    with pytest.raises(FrozenInstanceError):
        config.trainer.seed = 1


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_config_round_trips(path, tmp_path):
    config = load_config(path)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_config_divides(path):
    config = load_config(path)
    learner = config.learner
    model_ranks = (
        learner.tensor_model_parallel_size * learner.pipeline_model_parallel_size * learner.context_parallel_size
    )
    data_parallel, rest = divmod(learner.world_size, model_ranks)
    assert rest == 0
    responses = config.data.train_batch_size * config.rollout.train.n
    assert responses % learner.mini_batch_size == 0
    assert learner.mini_batch_size % data_parallel == 0
    # A packed micro-batch must hold the longest sequence that the limits allow.
    assert learner.max_tokens_per_micro_batch >= config.data.max_prompt_length + config.data.max_response_length
    plan_placement(config)


def test_32b_recipe_is_the_published_one():
    config = load_config(CONFIGS[[p.stem for p in CONFIGS].index("retool_qwen2.5_32b_8xh200")])
    assert config.learner.optimizer.lr == 1e-6
    assert config.rollout.train.n == 16
    assert config.data.train_batch_size * config.rollout.train.n == 512
    assert config.learner.mini_batch_size == 64
    assert config.rollout.multi_turn.max_assistant_turns == 8
    assert (config.data.max_prompt_length, config.data.max_response_length) == (2048, 16384)
    assert (config.rollout.val.n, config.rollout.val.top_p) == (30, 0.6)
    assert (config.trainer.test_freq, config.trainer.save_freq) == (5, 30)
    assert config.trainer.resume_mode == "auto"
    assert (config.algorithm.clip_ratio_low, config.algorithm.clip_ratio_high) == (0.2, 0.28)


def test_colocated_engine_may_not_cut_a_node():
    config = load_config(CONFIGS[[p.stem for p in CONFIGS].index("retool_qwen3_30b_a3b_2x8h100")])
    engine = replace(config.rollout.engine, tensor_parallel_size=3, count=4)
    with pytest.raises(ConfigError, match="lies inside one node or has all GPUs"):
        plan_placement(replace(config, rollout=replace(config.rollout, engine=engine)))


def test_placement_refuses_more_gpus_than_there_are():
    config = load_config(None, ["cluster.gpus_per_node=2", "learner.world_size=2"])
    with pytest.raises(ConfigError, match="need 3"):
        plan_placement(config)


def test_defaults_are_valid():
    assert isinstance(load_config(None), Config)


def test_the_demo_with_experts_computes_in_two_precisions():
    """Without that, engine and learner would hardly ever choose different experts, and there were nothing to replay."""
    config = load_config(CONFIGS[[p.stem for p in CONFIGS].index("demo_moe_cpu")])
    assert config.demo.num_experts >= config.demo.num_experts_per_tok > 1
    assert (config.rollout.engine.dtype, config.learner.dtype) == ("bfloat16", "float32")
    assert config.learner.routing_replay == "rollout"
    dense = load_config(CONFIGS[[p.stem for p in CONFIGS].index("demo_cpu")])
    assert not dense.demo.num_experts and dense.rollout.engine.dtype == "float32"
    assert config.trainer.run_dir != dense.trainer.run_dir
