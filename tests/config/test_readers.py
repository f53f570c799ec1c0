"""A setting that nothing reads is refused with the setting that would read it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from megatron_retool.algorithms.advantages import advantage_estimators
from megatron_retool.algorithms.kl import kl_estimators
from megatron_retool.algorithms.policy_loss import policy_losses
from megatron_retool.algorithms.settings import BUILT_IN, READ_BY
from megatron_retool.config import AlgorithmConfig, ConfigError, load_config
from megatron_retool.config.readers import READERS
from megatron_retool.config.tree import default_values
from megatron_retool.registry import Registry

REGISTRIES: dict[str, Registry[Any]] = {
    "advantage": advantage_estimators,
    "policy_loss": policy_losses,
    "kl_estimator": kl_estimators,
}


@pytest.mark.parametrize(
    ("overrides", "read_with"),
    [
        (["algorithm.policy_loss=cispo", "algorithm.dual_clip=3.0"], "algorithm.policy_loss=clip or gspo"),
        (
            ["algorithm.policy_loss=policy_gradient", "algorithm.clip_ratio_high=0.5"],
            "algorithm.policy_loss=clip or gspo or cispo",
        ),
        (["algorithm.advantage=rloo", "algorithm.normalize_by_std=false"], "algorithm.advantage=grpo"),
        (["algorithm.gae_lambda=0.5"], "algorithm.advantage=gae"),
        (["trainer.resume_from_path=runs/other/checkpoints/global_step_80"], "trainer.resume_mode=resume_path"),
        (["reward.overlong.penalty=3.0"], "reward.overlong.mode=soft_punish"),
        (["reward.overlong.mode=soft_punish", "reward.overlong.pieces=[1 2]"], "reward.overlong.mode=piecewise"),
        (["algorithm.adaptive_sampling.easy_n=4"], "algorithm.adaptive_sampling.enable=true"),
        (["algorithm.adaptive_kl_horizon=5"], "algorithm.adaptive_kl_target"),
        (["trainer.best_metric=val-core/all/acc/mean@4"], "trainer.keep_best above 0"),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(overrides: list[str], read_with: str) -> None:
    with pytest.raises(ConfigError, match="nothing reads it in this configuration") as caught:
        load_config(None, overrides)
    key = overrides[-1].split("=")[0]
    assert str(caught.value).startswith(f"{key}=") and f"it is read with {read_with}" in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.policy_loss=gspo", "algorithm.dual_clip=3.0"],
        ["algorithm.policy_loss=cispo", "algorithm.dual_clip=null"],
        ["algorithm.gae_lambda=0.95"],
    ],
)
def test_what_is_read_and_what_is_the_default_is_accepted(overrides: list[str]) -> None:
    load_config(None, overrides)


@pytest.mark.parametrize("setting", READ_BY)
def test_the_table_is_that_of_the_functions(setting: str) -> None:
    shared = set(AlgorithmConfig.__dataclass_fields__)
    for name in BUILT_IN[setting]:
        function = REGISTRIES[setting].load(name)
        takes = set(list(inspect.signature(function).parameters)[1:]) & shared
        assert takes == {key for key, names in READ_BY[setting].items() if name in names}, name


def test_every_key_of_the_table_is_a_setting() -> None:
    assert {f"{reader.section}.{key}" for reader in READERS for key in reader.keys} <= set(default_values())
