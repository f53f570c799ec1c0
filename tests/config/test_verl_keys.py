from collections import Counter

import pytest

from megatron_retool.config import Config, ConfigError, load_config
from megatron_retool.config.schema import dotted_keys
from megatron_retool.config.verl_keys import TABLE, explain


def test_every_counterpart_is_a_setting():
    known = set(dotted_keys(Config))
    assert [(row.verl, key) for row in TABLE for key in row.ours if key not in known] == []


def test_every_key_has_one_row_and_a_reason_where_it_has_no_counterpart():
    assert [key for key, count in Counter(row.verl for row in TABLE).items() if count > 1] == []
    assert [row.verl for row in TABLE if not row.ours and not row.note] == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.adv_estimator=grpo", ["algorithm.advantage=grpo"]),
        ("algorithm.adv_estimator=remax", ["algorithm.advantage", "none of its built-in values"]),
        ("algorithm.lam=0.9", ["algorithm.gae_lambda=0.9"]),
        ("algorithm.filter_groups.enable=True", ["algorithm.dynamic_sampling.enable=true"]),
        ("algorithm.kl_penalty=low_var_kl", ["algorithm.kl_estimator=k3"]),
        ("trainer.nnodes=2", ["cluster.nodes=2"]),
        ("trainer.n_gpus_per_node=8", ["cluster.gpus_per_node=8"]),
        ("trainer.logger=[console]", ["trainer.loggers=['console']"]),
        ("trainer.total_training_steps=5", ["trainer.total_steps=5"]),
        ("trainer.balance_batch=True", ["no counterpart", "always balanced"]),
        ("data.truncation=left", ["data.overlong_prompts"]),
        ("actor_rollout_ref.actor.optim.lr=1e-6", ["learner.optimizer.lr=1e-06"]),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=64", ["learner.mini_batch_size", "rollout.train.n"]),
        ("actor_rollout_ref.rollout.n=8", ["rollout.train.n=8"]),
        ("rollout.n=8", ["rollout.train.n=8"]),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path=t.yaml", ["rollout.multi_turn.tools"]),
        ("rollout.multi_turn.tool_config_path=t.yaml", ["rollout.multi_turn.tools", "code_interpreter"]),
        ("actor_rollout_ref.actor.fsdp_config.param_offload=True", ["no counterpart", "Megatron"]),
        ("actor_rollout_ref.actor.invented=1", ["no counterpart"]),
        ("actor.megatron.override_transformer_config.fp8_recipe=mxfp8", ["learner.fp8.recipe=mxfp8"]),
        ("actor.megatron.override_transformer_config.fp4=e2m1", ["learner.fp8.recipe=nvfp4"]),
        ("actor.megatron.override_transformer_config.fp8_recipe=delayed", ["learner.fp8.recipe", "without delayed"]),
        ("reward_model.enable=True", ["no counterpart", "reward function"]),
        ("custom_reward_function.path=r.py", ["reward.function=r.py"]),
    ],
)
def test_a_key_of_verl_is_answered_with_ours(override, words):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    for word in words:
        assert word in str(caught.value)
    assert "nearest" not in str(caught.value)


def test_a_file_of_verl_is_sent_to_the_translation(tmp_path):
    file = tmp_path / "verl.yaml"
    file.write_text("actor_rollout_ref: {actor: {optim: {lr: 1e-6}}, rollout: {n: 4}}")
    with pytest.raises(ConfigError, match=r"learner\.optimizer\.lr.*and 1 more.*config from-verl FILE"):
        load_config(file)


@pytest.mark.parametrize("key", ["trainer.sead", "rolout.n", "learner.tensor_parallel_size"])
def test_a_slip_of_ones_own_is_not_taken_for_verls(key):
    assert explain(key, 1) is None
