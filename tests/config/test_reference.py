"""docs/configuration.md says what the code declares, of every setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_retool.config import Config
from megatron_retool.config.algorithm import RolloutCorrectionConfig
from megatron_retool.config.reference import field_meanings, reference_page, sections_of
from megatron_retool.config.schema import dotted_keys

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
SECTIONS = list(sections_of(Config))
SETTINGS = [setting for section in SECTIONS for setting in section.settings]


def test_the_page_is_what_the_code_says():
    assert PAGE.read_text(encoding="utf-8") == reference_page(), (
        "write it again: megatron-retool config reference > docs/configuration.md"
    )


def test_every_key_is_in_it():
    keys = {setting.key for setting in SETTINGS} | {section.key for section in SECTIONS}
    assert {key.replace("[]", "") for key in keys} == set(dotted_keys(Config))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.key)
def test_every_section_and_setting_has_a_meaning(section):
    assert section.about, f"write a docstring for {section.key}"
    for setting in section.settings:
        assert setting.meaning, f"write what {setting.key} means below its declaration"
        assert setting.meaning.endswith((".", '"')) and setting.readers


def test_rows_say_type_range_choices_and_default():
    rows = {setting.key: setting for setting in SETTINGS}
    assert rows["learner.optimizer.lr"].kind == "a number: above 0, at most 1"
    assert rows["trainer.total_steps"].kind == "a whole number, or null: at least 1"
    assert rows["trainer.resume_mode"].kind == "one of `auto`, `disable`, `resume_path`"
    assert rows["learner.fp8.recipe"].kind.startswith("one of null, `tensorwise`")
    assert rows["learner.optimizer.betas"].default == "[0.9, 0.95]"
    assert rows["sft.stages[].optimizer.schedule"].default == "constant"
    assert "loop" in rows["trainer.hang_action"].readers or "cluster" in rows["trainer.hang_action"].readers
    assert rows["rollout.multi_turn.max_tool_calls"].readers == ("planning", "serving", "sglang_rollout")


def test_meanings_of_inherited_settings_are_found():
    meanings = field_meanings(RolloutCorrectionConfig)
    assert meanings["denominator"] and meanings["veto_threshold"]
