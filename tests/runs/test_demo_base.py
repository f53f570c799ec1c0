import json

import pytest

from megatron_retool.config import ConfigError, load_config
from megatron_retool.runs.demo_base import DemoBase, base_settings, difference, find_base, missing_base


def config_of(tmp_path, name, *overrides):
    return load_config(
        None,
        [
            "demo.enable=true", f"trainer.runs_dir={tmp_path}", f"trainer.experiment_name={name}",
            f"demo.directory={tmp_path}/{name}/data",
            f"sft.stages=[{{name: pretrain, train_files: [{tmp_path}/{name}/data/pretrain.parquet]}}]",
            *overrides,
        ],
    )  # fmt: skip


def make_base(tmp_path, name, *overrides, without=None):
    config = config_of(tmp_path, name, *overrides)
    for part in ("data/model", "sft", "sft_hf", "sft_mcore"):
        if part != without:
            (config.trainer.run_dir / part).mkdir(parents=True)
    if without != "sft":
        (config.trainer.run_dir / "sft" / "COMPLETE").touch()
    (config.trainer.run_dir / "pipeline.json").write_text(json.dumps({"settings": base_settings(config)}))
    return DemoBase(config.trainer.run_dir)


def test_a_second_experiment_finds_the_first_ones_base(tmp_path):
    base = make_base(tmp_path, "demo")
    assert find_base(config_of(tmp_path, "mine", "learner.optimizer.lr=1e-3", "algorithm.policy_loss=gspo")) == base
    assert base.data_overrides == [f"demo.directory={tmp_path}/demo/data"]
    assert find_base(config_of(tmp_path, "demo")) is None, "a run with data of its own keeps them"
    assert find_base(config_of(tmp_path, "mine", "demo.base=none")) is None


def test_the_newest_of_equal_bases_is_taken(tmp_path):
    import os

    make_base(tmp_path, "old")
    newer = make_base(tmp_path, "a_newer_one")
    os.utime(tmp_path / "old" / "sft_mcore", (1, 1))
    assert find_base(config_of(tmp_path, "mine")) == newer


@pytest.mark.parametrize(
    "change",
    [
        "trainer.seed=1",
        "demo.hidden_size=64",
        "demo.num_experts=8",
        "sft.stages=[{name: pretrain, train_files: [x], steps: 3}]",
    ],
)
def test_a_base_of_other_settings_is_taken_by_name_alone(tmp_path, change):
    base = make_base(tmp_path, "demo")
    config = config_of(tmp_path, "mine", change)
    assert find_base(config) is None
    assert change.split("=")[0] in missing_base(config) and "demo.base=runs/" in missing_base(config)
    assert find_base(config_of(tmp_path, "mine", change, f"demo.base={base.run_dir}")) == base


@pytest.mark.parametrize("part", ["data/model", "sft", "sft_hf", "sft_mcore"])
def test_a_base_that_is_not_complete_is_none(tmp_path, part):
    base = make_base(tmp_path, "demo", without=part)
    assert find_base(config_of(tmp_path, "mine")) is None
    with pytest.raises(ConfigError, match=r"demo\.base=.*does not exist; give a demo run whose fine-tuning is done"):
        find_base(config_of(tmp_path, "mine", f"demo.base={base.run_dir}"))


def test_a_run_stays_with_its_base(tmp_path):
    first = make_base(tmp_path, "demo")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "pipeline.json").write_text(json.dumps({"base": str(first.run_dir)}))
    make_base(tmp_path, "newer")
    assert find_base(config_of(tmp_path, "mine")) == first
    (first.run_dir / "sft_hf").rmdir()
    with pytest.raises(ConfigError, match=r"mine started from the base of .*demo: .*sft_hf does not exist"):
        find_base(config_of(tmp_path, "mine"))


def test_a_setting_that_is_new_since_then_had_its_default(tmp_path):
    settings = base_settings(config_of(tmp_path, "mine"))
    older = {key: value for key, value in settings.items() if key not in ("demo.variant", "demo.num_experts")}
    assert difference(older, settings) is None
    assert difference(older, {**settings, "demo.num_experts": 8}) == "demo.num_experts=0, now 8"
    assert difference({**settings, "sft.stages[1].name": "sft"}, settings) == "sft.stages[1].name='sft', now nothing"
