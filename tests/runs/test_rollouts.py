import pytest

from megatron_retool.config import ConfigError, load_config
from megatron_retool.runs.checkpoints import set_aside
from megatron_retool.runs.rollouts import prepare_rollouts


def config_of(tmp_path, elsewhere=None):
    overrides = [f"trainer.runs_dir={tmp_path}/runs", "trainer.experiment_name=run"]
    return load_config(None, overrides + ([f"trainer.rollout_data_dir={elsewhere}"] if elsewhere else []))


def test_rollouts_lie_in_the_runs_directory(tmp_path):
    assert prepare_rollouts(config_of(tmp_path).trainer) == tmp_path / "runs" / "run" / "rollouts"
    assert (tmp_path / "runs" / "run" / "rollouts").is_dir()


def test_rollouts_elsewhere_are_found_below_the_run_and_after_a_resume(tmp_path):
    config = config_of(tmp_path, tmp_path / "big")
    (prepare_rollouts(config.trainer) / "step_000001.parquet").write_text("x")
    assert (tmp_path / "big" / "run" / "step_000001.parquet").exists()
    assert (prepare_rollouts(config.trainer) / "step_000001.parquet").exists()
    # Without the setting the run goes on where its rollouts are.
    assert (prepare_rollouts(config_of(tmp_path).trainer) / "step_000001.parquet").exists()


def test_rollouts_in_two_places_are_refused(tmp_path):
    (prepare_rollouts(config_of(tmp_path).trainer) / "step_000001.parquet").write_text("x")
    with pytest.raises(ConfigError, match=r"trainer\.rollout_data_dir.*lie in .*runs/run/rollouts already"):
        prepare_rollouts(config_of(tmp_path, tmp_path / "big").trainer)


def test_another_runs_rollouts_are_not_overwritten(tmp_path):
    (tmp_path / "big" / "run").mkdir(parents=True)
    (tmp_path / "big" / "run" / "step_000001.parquet").write_text("x")
    with pytest.raises(ConfigError, match="another run's rollouts"):
        prepare_rollouts(config_of(tmp_path, tmp_path / "big").trainer)


def test_a_run_that_is_set_aside_takes_its_rollouts_along(tmp_path):
    config = config_of(tmp_path, tmp_path / "big")
    (prepare_rollouts(config.trainer) / "step_000001.parquet").write_text("x")
    (config.trainer.run_dir / "metrics.jsonl").write_text("")
    moved = set_aside(config.trainer.run_dir)
    assert (moved / "rollouts" / "step_000001.parquet").exists()
    assert list(prepare_rollouts(config.trainer).iterdir()) == []


def test_a_link_that_leads_nowhere_is_named(tmp_path):
    config = config_of(tmp_path, tmp_path / "big")
    prepare_rollouts(config.trainer)
    (tmp_path / "big" / "run").rmdir()
    with pytest.raises(ConfigError, match="is gone"):
        prepare_rollouts(config_of(tmp_path).trainer)
