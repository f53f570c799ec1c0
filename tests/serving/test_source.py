"""What is served, by what was named; and what is said where nothing can be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_retool.config import ConfigError, load_config, save_config
from megatron_retool.serving.service import engine_gpus
from megatron_retool.serving.source import context_length, find_source, with_work_directory
from sglang_rollout.engine.launch_command import CPU_CACHE_TOKENS, RESERVED_TOKENS


def model(directory: Path, **settings: object) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 4096} | settings))
    return directory


def complete(directory: Path) -> Path:
    (directory / "learner").mkdir(parents=True)
    (directory / "learner" / "metadata.json").write_text("{}")
    (directory / "COMPLETE").write_text("{}")
    return directory


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 2 and 4, weights of step 6, and one of step 8 that was not finished."""
    run = tmp_path / "runs" / "mine"
    complete(run / "checkpoints" / "global_step_2")
    complete(run / "checkpoints" / "global_step_4")
    complete(run / "checkpoints" / "weights_step_6")
    (run / "checkpoints" / "global_step_8" / "learner").mkdir(parents=True)
    config = load_config(None, ["rollout.val.temperature=0.25", "learner.routing_replay=old_log_probs"])
    save_config(config, run / "config.yaml")
    return run


def exported(run: Path, step: int) -> Path:
    export = model(run / "export")
    (export / "COMPLETE").write_text("{}")
    (run / "pipeline.json").write_text(json.dumps({"steps": {"export": step}}))
    return export


def test_the_newest_checkpoint_with_the_settings_of_the_run(run_dir: Path) -> None:
    source = find_source(str(run_dir), overrides=["rollout.val.top_p=0.5"])
    assert source.name == "mine" and "step 6" in source.description
    assert source.config.model.path == str(run_dir / "checkpoints" / "weights_step_6")
    assert (source.config.rollout.val.temperature, source.config.rollout.val.top_p) == (0.25, 0.5)
    assert source.config.learner.routing_replay == "none", "engines would return what nobody asks for"


def test_a_step_of_the_run(run_dir: Path) -> None:
    source = find_source(str(run_dir), 2)
    assert source.config.model.path == str(run_dir / "checkpoints" / "global_step_2")
    with pytest.raises(ValueError, match="no complete checkpoint of step 8: it has 2, 4, 6"):
        find_source(str(run_dir), 8)


def test_an_export_spares_the_conversion_where_nothing_is_newer(run_dir: Path) -> None:
    export = exported(run_dir, 4)
    assert find_source(str(run_dir)).config.model.path.endswith("weights_step_6")
    (run_dir / "pipeline.json").write_text(json.dumps({"steps": {"export": 6}}))
    assert find_source(str(run_dir)).config.model.path == str(export)
    assert find_source(str(run_dir), 4).config.model.path.endswith("global_step_4")


def test_models_and_checkpoints_of_a_run_have_its_settings(run_dir: Path) -> None:
    export = exported(run_dir, 4)
    for path in (export, run_dir / "checkpoints" / "global_step_4", run_dir / "checkpoints" / "global_step_4/learner"):
        source = find_source(str(path))
        assert source.config.model.path == str(path) and source.config.rollout.val.temperature == 0.25
        with pytest.raises(ValueError, match="--step 4 chooses a checkpoint of a run"):
            find_source(str(path), 4)


def test_a_model_of_no_run_and_a_config_of_its_own(tmp_path: Path, run_dir: Path) -> None:
    path = model(tmp_path / "models" / "small")
    source = find_source(str(path), overrides=["rollout.engine.device=cpu"])
    assert source.name == "small" and source.config.rollout.val.temperature == 1.0
    assert source.config.rollout.engine.max_total_tokens == CPU_CACHE_TOKENS
    assert context_length(source.config.rollout, source.config.model) == 4096 - RESERVED_TOKENS
    config = find_source(str(path), config_file=str(run_dir / "config.yaml")).config
    assert config.rollout.val.temperature == 0.25
    served = with_work_directory(config, tmp_path / "scratch")
    assert served.trainer.run_dir == tmp_path / "scratch" / "serving", "a run's own weight_sync/ is not touched"


def test_the_context_is_the_smallest_that_is_said(tmp_path: Path) -> None:
    path = str(model(tmp_path / "small"))
    config = find_source(path, overrides=["rollout.engine.context_length=300"]).config
    assert context_length(config.rollout, config.model) == 300
    unknown = str(model(tmp_path / "unknown", max_position_embeddings=None))
    with pytest.raises(ConfigError, match="no max_position_embeddings: say rollout.engine.context_length"):
        config = find_source(unknown, overrides=["rollout.engine.backend=transformers"]).config
        context_length(config.rollout, config.model)


def test_what_is_nothing(tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"runs/other does not exist: .*; runs/ has mine"):
        find_source("runs/other")
    with pytest.raises(FileNotFoundError, match="is a file"):
        find_source(str(run_dir / "config.yaml"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="neither a run .* nor a checkpoint .* nor a Hugging Face model"):
        find_source("empty")
    young = tmp_path / "runs" / "young"
    young.mkdir()
    save_config(load_config(), young / "config.yaml")
    with pytest.raises(ValueError, match="neither a complete checkpoint nor an export yet"):
        find_source(str(young))
    with pytest.raises(ValueError, match="step 3: it has none"):
        find_source(str(young), 3)


def test_gpus_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_retool.serving import service

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(service, "nvidia_smi", lambda query: ["NVIDIA X"] * 4)
    two = ["rollout.engine.device=cuda", "rollout.engine.count=2"]

    def gpus(*overrides: str) -> list[list[str] | None]:
        return engine_gpus(load_config(None, list(overrides)).rollout)

    assert gpus(*two, "rollout.engine.tensor_parallel_size=2") == [["0", "1"], ["2", "3"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    assert gpus(*two) == [["7"], ["5"]]
    with pytest.raises(ConfigError, match="2 x 4 GPUs, and this machine shows 4: lower them"):
        gpus(*two, "rollout.engine.tensor_parallel_size=4")
    assert gpus("rollout.engine.device=cpu", "rollout.engine.count=2") == [None, None]
