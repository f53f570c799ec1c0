import pytest
from rich.console import Console

from megatron_retool.config import ConfigError, load_config
from megatron_retool.pipeline import Stages


def stages(tmp_path, *overrides):
    config = load_config(None, ["demo.enable=true", f"trainer.runs_dir={tmp_path}", *overrides])
    return Stages(config.run_dir, config, Console(quiet=True))


def test_results_of_other_settings_are_not_mixed(tmp_path):
    stages(tmp_path, "trainer.seed=1").call("make-demo", lambda: 0)
    stages(tmp_path, "trainer.seed=1", "trainer.total_steps=5", "learner.optimizer.lr=1")  # neither matters before RL
    with pytest.raises(ConfigError, match=r"trainer\.seed=1, now 2.*resume_mode=disable"):
        stages(tmp_path, "trainer.seed=2")
    with pytest.raises(ConfigError, match=r"demo\.hidden_size=128, now 64"):
        stages(tmp_path, "trainer.seed=1", "demo.hidden_size=64")


def test_a_stage_whose_result_is_there_is_not_run_again(tmp_path):
    done = tmp_path / "result"
    command = ["sh", "-c", f"echo x >> {done}"]
    for _ in range(2):
        stages(tmp_path).run("make-demo", command, done)
    assert done.read_text() == "x\n"
    assert "make-demo" in stages(tmp_path).seconds


def test_a_failed_stage_names_its_command(tmp_path):
    with pytest.raises(RuntimeError, match="stage sft failed with exit code 3: sh -c exit 3"):
        stages(tmp_path).run("sft", ["sh", "-c", "exit 3"], tmp_path / "never")
