"""The configuration of `megatron-retool tinker`: adapters everywhere by default, and what does not go is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_retool.config import ConfigError, load_config
from megatron_retool.tinker.settings import served_model, server_config
from tests.tinker.served import CONTEXT, VOCABULARY


def configured(model: Path, tmp_path: Path, *overrides: str):
    config = load_config(None, [f"model.path={model}", "learner.dtype=float32", *overrides])
    return server_config(config, tmp_path / "kept")


def test_learner_and_engines_have_adapters_of_one_rank(model_directory, tmp_path):
    config = configured(model_directory, tmp_path)
    engines = config.rollout.engine.adapters
    assert (config.learner.lora.rank, engines.max_rank) == (32, 32)
    assert config.learner.lora.targets == engines.targets == ["attention", "mlp"]
    assert config.trainer.run_dir == tmp_path / "kept"
    own = configured(model_directory, tmp_path, "learner.lora.rank=8", "learner.lora.targets=[mlp]")
    assert (own.rollout.engine.adapters.max_rank, own.rollout.engine.adapters.targets) == (8, ["mlp"])


def test_a_runs_recipe_may_share_prefixes(model_directory, tmp_path):
    assert configured(model_directory, tmp_path, "learner.share_prefixes=true").learner.share_prefixes is False


def test_what_clients_are_told_of_the_model(model_directory, tmp_path):
    config = configured(
        model_directory, tmp_path, "tinker.names=[Qwen/Qwen3-8B]", "learner.lora.targets=[mlp]", "learner.lora.rank=32"
    )
    near = served_model(config.model, config.learner, config.tinker, "model", CONTEXT, on_this_machine=True)
    assert (near.names, near.vocabulary, near.most_rank) == (("Qwen/Qwen3-8B", "model"), VOCABULARY, 32)
    assert (near.tokenizer, near.finds_texts) == (str(model_directory), True)
    assert (near.adapts_attention, near.adapts_mlp) == (False, True)
    assert (
        served_model(config.model, config.learner, config.tinker, "model", CONTEXT, on_this_machine=False).tokenizer
        == "Qwen/Qwen3-8B"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.gpus_per_node=2", "cluster.placement=colocated"], "cluster.placement=colocated lets learner and"),
        (["rollout.engine.backend=transformers"], "rollout.engine.backend=transformers loads no adapters"),
        (
            ["learner.lora.rank=4", "learner.lora.path=files"],
            "learner.lora.path=files: every run begins with an adapter",
        ),
        (["tinker.api_key=secret"], "tinker.api_key does not begin with tml-"),
        (["tinker.names=['']"], "tinker.names has an empty name"),
        (["learner.dtype=float16"], "learner.dtype=float16 does not go with several runs"),
        (["learner.optimizer.name=muon"], "learner.optimizer.name=muon"),
    ],
)
def test_settings_that_do_not_go(model_directory, tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        configured(model_directory, tmp_path, *overrides)
