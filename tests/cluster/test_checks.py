import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from megatron_retool.cluster.checks import check_extensions, check_model, check_run
from megatron_retool.config import ConfigError, load_config
from megatron_retool.config.model import check_model_path
from tests.kit.model_variants import PHI_4_MINI

MODEL = Path(__file__).parents[1] / "kit" / "traced_model"
CONFIGS = Path(__file__).parents[2] / "configs"
TWO_TOOLS = CONFIGS / "demo_two_tools_cpu.yaml"


def test_a_corpus_that_the_demo_will_write_need_not_be_there_yet(tmp_path):
    runs = f"trainer.runs_dir={tmp_path}"
    check_extensions(load_config(TWO_TOOLS, [runs]))
    with pytest.raises(ValueError, match=r"tools\.search\.corpus: search corpus .*corpus\.parquet does not exist"):
        check_extensions(load_config(TWO_TOOLS, [runs, "demo.enable=false"]))
    with pytest.raises(ValueError, match=r"search corpus gone\.parquet does not exist"):
        check_extensions(load_config(TWO_TOOLS, [runs, "tools.search.corpus=gone.parquet"]))


def test_a_mixture_of_experts_that_the_demo_will_write_need_not_be_there_yet(tmp_path):
    overrides = [f"trainer.runs_dir={tmp_path}", "learner.routing_replay=rollout"]
    check_extensions(load_config(CONFIGS / "demo_moe_cpu.yaml", overrides))


def test_a_checkpoint_in_a_models_place_is_told_what_it_is(tmp_path):
    alone = tmp_path / "weights_step_4"
    alone.mkdir()
    (alone / "metadata.json").touch()
    with pytest.raises(ConfigError, match=r"It is a Megatron-Core checkpoint: give it as model\.mcore_path, .*_4/hf"):
        check_model(load_config(None, [f"model.path={alone}"]), learns=True)
    complete = tmp_path / "global_step_4"
    complete.mkdir()
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    (model / "model.safetensors").touch()
    for place, words in ((complete, "whose weights lie in learner/: give .*global_step_4/learner"), (alone, None)):
        config = load_config(None, [f"model.path={model}", f"model.mcore_path={place}"])
        if words is None:
            check_model(config, learns=True)
        else:
            with pytest.raises(ConfigError, match=words):
                check_model(config, learns=True)


def test_texts_that_outgrow_longrope_are_refused_with_any_engine(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PHI_4_MINI))
    (tmp_path / "model.safetensors").touch()
    keys = [f"model.path={tmp_path}", "rollout.engine.backend=transformers", "data.max_prompt_length=1096"]
    short, long = [*keys, "data.max_response_length=3000"], [*keys, "data.max_response_length=3001"]
    check_model(load_config(None, short), learns=True)
    with pytest.raises(ConfigError, match="original_max_position_embeddings=4096 tokens.* 4097 now"):
        check_model(load_config(None, long), learns=True)
    with pytest.raises(ConfigError, match=r"sft\.stages\[0\]\.max_length=4097: .*set it to that at most"):
        check_model(load_config(None, [*short, "sft.stages=[{name: warm, max_length: 4097}]"]), learns=True)


def test_compression_needs_its_package(tmp_path, monkeypatch):
    config = load_config(None, [f"trainer.runs_dir={tmp_path}", "trainer.checkpoint_compression=zstd"])
    check_run(config.trainer, config.learner, config.cluster)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="checkpoint_compression=zstd needs the Python package zstandard"):
        check_run(config.trainer, config.learner, config.cluster)


@pytest.mark.parametrize(
    "path", ["nowhere", "./nowhere", "/no/such/model", "models/a/b", "here/nowhere", "~/no_such_model"]
)
def test_a_model_that_is_not_here_is_said_without_asking_a_hub(path, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="the directory does not exist"):
        check_model_path(path)


def test_hub_ids_and_models_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "models--gpt2").mkdir(parents=True)
    for path in ("", "Qwen/Qwen2.5-7B-Instruct", "gpt2", str(MODEL)):
        check_model_path(path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file"):
        check_model_path("model.safetensors")
