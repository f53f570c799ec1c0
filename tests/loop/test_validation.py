"""Full and quick validations: which prompts and how many responses, files, samples and names of metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megatron_retool.config import Config, ConfigError, TrainerConfig, load_config
from megatron_retool.data.prompts import PromptRow, evenly_drawn
from megatron_retool.loop.validation import validate, validate_quickly
from megatron_retool.loop.validation_metrics import check_named_metrics, validation_metrics
from megatron_retool.loop.validation_schedule import Validation, validation_after
from megatron_retool.trajectory import read_trajectories
from run_files.phases import Phase
from tests.loop.stand_ins import run_of
from tests.loop.test_skipped_steps import trajectory

# ---- when


@given(st.integers(0, 7), st.integers(0, 7), st.integers(1, 40))
def test_each_step_has_at_most_one_and_the_last_a_full_one(test_freq: int, quick_test_freq: int, last: int) -> None:
    trainer = TrainerConfig(test_freq=test_freq, quick_test_freq=quick_test_freq)
    held = {step: validation_after(trainer, step, last=step == last) for step in range(1, last + 1)}
    full = {step for step in held if (test_freq and step % test_freq == 0) or step == last}
    quick = {step for step in held if quick_test_freq and step % quick_test_freq == 0} - full
    assert {step for step, kind in held.items() if kind is Validation.FULL} == full
    assert {step for step, kind in held.items() if kind is Validation.QUICK} == quick


def test_a_schedule_of_full_ones_goes_before_quick_ones() -> None:
    trainer = TrainerConfig(test_schedule=["0 4", "8 6"], quick_test_freq=2)
    held = {step: validation_after(trainer, step, last=False) for step in range(1, 15)}
    assert [step for step, kind in held.items() if kind is Validation.FULL] == [4, 12]
    assert [step for step, kind in held.items() if kind is Validation.QUICK] == [2, 6, 8, 10, 14]


# ---- of what


@given(st.integers(1, 700), st.integers(1, 50), st.integers(0, 5))
def test_quick_problems_are_one_of_each_stretch(count: int, samples: int, seed: int) -> None:
    places = evenly_drawn(count, samples, seed)
    assert places == evenly_drawn(count, samples, seed) == sorted(set(places))
    assert len(places) == min(count, samples)
    if samples < count:
        bounds = [count * stretch // samples for stretch in range(samples + 1)]
        assert all(first <= place < end for place, (first, end) in zip(places, pairwise(bounds), strict=True))


def test_the_quick_problems_of_a_seed_are_the_same_for_good() -> None:
    assert evenly_drawn(30, 12, 0) == [1, 4, 5, 7, 11, 13, 16, 17, 20, 23, 26, 28]
    assert evenly_drawn(30, 12, 1) != evenly_drawn(30, 12, 0)


# ---- what is done with them


class Prompts(list[PromptRow]):
    def __init__(self, rows: list[PromptRow], quick: list[int]) -> None:
        super().__init__(rows)
        self.quick = [rows[place] for place in quick]


def deployment(config: Config, asked: list[Any]) -> Any:
    rows = [
        PromptRow([1, 2], group, f"uid{group}", "aime_2025", "7", {"index": group}, [{"role": "user", "content": "?"}])
        for group in range(15)
    ]

    async def stream(prompts: Any, sampling: Any, purpose: str) -> Any:
        asked.append(([prompt.group_id for prompt in prompts], sampling, purpose))
        for prompt in reversed(list(prompts)):
            group = [trajectory(index) for index in range(sampling.n)]
            for each in group:
                each.group_id = prompt.group_id
                each.extra_info = {**prompt.extra_info, "data_source": prompt.data_source, "uid": prompt.uid}
            yield group

    def score(group: Any, purpose: str) -> None:
        for each in group:
            each.reward = float(each.group_id < 10)
            each.reward_info = {"acc": each.reward, "pred": "7"}

    run = run_of(config, Console(quiet=True), 10)
    run.rollout = SimpleNamespace(stream=stream)
    run.rewards = SimpleNamespace(score=score, take_metrics=lambda purpose: {"reward/scored": 1.0})
    run.watchdog.progress = asked.append
    run.validation_prompts = Prompts(rows, [1, 8, 14])
    return run


class Tables:
    """A logger that shows tables."""

    def __init__(self) -> None:
        self.shown: list[tuple[int, int]] = []

    def log_samples(self, step: int, rows: Any) -> None:
        self.shown.append((step, len(rows)))


def test_full_and_quick_ones_share_nothing_but_the_way_they_sample(tmp_path: Path) -> None:
    config = load_config(None, [
        f"trainer.runs_dir={tmp_path}", "trainer.experiment_name=run", "trainer.quick_test_freq=2",
        "trainer.log_val_generations=3", "rollout.val.n=4", "rollout.val.temperature=0.7", "rollout.quick_val.n=2",
    ])  # fmt: skip
    asked: list[Any] = []
    run, log = deployment(config, asked), Tables()
    full = asyncio.run(validate(run, 4, log))
    assert asked[0] == (list(range(15)), config.rollout.val, "validation")
    assert asked[1:] == [Phase.VALIDATION] * 15 and log.shown == [(4, 3)]
    assert full["val-core/all/acc/mean@4"] == full["val-core/aime_2025/acc/mean@4"] == pytest.approx(2 / 3)
    assert full["val-aux/aime_2025/acc/problems_6-10/mean@4"] == 1.0
    assert full["val-aux/aime_2025/acc/problems_11-15/mean@4"] == 0.0
    assert full["val-aux/reward/scored"] == 1.0

    asked.clear()
    quick = asyncio.run(validate_quickly(run, 6))
    assert asked[0] == ([1, 8, 14], replace(config.rollout.val, n=2), "validation")
    assert asked[1:] == [Phase.QUICK_VALIDATION] * 3 and log.shown == [(4, 3)]
    assert quick["val-quick/all/acc/mean@2"] == pytest.approx(2 / 3)
    assert {"val-quick/aime_2025/acc/pass@2", "val-quick/all/reward/mean@2", "val-quick/tool/use_rate"} <= set(quick)
    assert all(name.startswith("val-quick/") for name in quick) and not quick.keys() & full.keys()

    files = {
        path.relative_to(config.trainer.run_dir).as_posix(): path for path in config.trainer.run_dir.rglob("*.parquet")
    }
    assert set(files) == {"validation/step_000004.parquet", "validation_quick/step_000006.parquet"}
    stored = read_trajectories(files["validation_quick/step_000006.parquet"])
    assert [(t.group_id, t.index) for t in stored] == [(group, index) for group in (1, 8, 14) for index in (0, 1)]

    groups = {"all": [], "aime_2025": ["problems_1-5", "problems_6-10", "problems_11-15"]}
    assert (full | quick).keys() <= set(validation_metrics(config.rollout, config.trainer, groups)), (
        "what early stopping may name"
    )


# ---- what early stopping and the best checkpoints may name


def asked_for(metric: str, *overrides: str) -> None:
    check(f"trainer.early_stopping.metric={metric}", *overrides)
    check("trainer.keep_best=1", f"trainer.best_metric={metric}", *overrides)


def check(*overrides: str) -> None:
    config = load_config(None, list(overrides))
    check_named_metrics(config.trainer, config.data, config.rollout)


QUICKLY = ("trainer.quick_test_freq=2", "rollout.quick_val.n=2")


@pytest.mark.parametrize("metric", [
    "val-core/all/acc/mean@30", "val-core/all/acc/pass@8",
    "val-core/math-ai/aime25/acc/maj@16/mean",
    "val-aux/all/reward/best@30/mean", "val-aux/num_turns/mean", "val-aux/tool/use_rate/search",
    "val-aux/qa/f1/mean@30", "val-aux/aime/acc/problems_1-5/mean@30", "val-quick/all/acc/mean@2",
    "val-quick/qa/f1/std@2", "val-aux/code/self_correction_rate", "val-quick/code/purpose/verification",
])  # fmt: skip
def test_before_there_are_files_any_data_source_may_come(metric: str) -> None:
    asked_for(metric, *QUICKLY)


def refusals() -> Iterator[tuple[str, str]]:
    yield "val-core/all/acc/mean@4", r"the nearest are val-core/all/acc/mean@30"
    yield "val-core/all/accuracy/mean@30", r"the nearest are .*val-core/all/acc/mean@30"
    yield "val-core/all/acc/best@30", r"the nearest are .*val-core/all/acc/best@30/mean"
    yield "val-aux/all/acc/mean@30", r"the nearest are .*val-core/all/acc/mean@30"
    yield "val-quick/all/acc/mean@30", r"the nearest are .*val-quick/all/acc/mean@2"
    yield "val-core/aime/f1/mean@30", "is no metric of this run's validations"
    yield "val-aux/code/pas_rate", r"the nearest are val-aux/code/pass_rate"
    yield "actor/pg_loss", r"they have val-core/all/acc/mean@30, .*val-aux/num_turns/mean"


@pytest.mark.parametrize(("metric", "words"), refusals())
def test_unknown_names_are_refused_with_the_nearest(metric: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        asked_for(metric, *QUICKLY)
    assert str(caught.value).startswith(f"trainer.early_stopping.metric={metric} is no metric of this run's valid")
    with pytest.raises(ConfigError, match=rf"^trainer\.best_metric={metric} is no metric"):
        check("trainer.keep_best=1", f"trainer.best_metric={metric}", *QUICKLY)


def test_the_files_tell_sources_and_their_groups(tmp_path: Path) -> None:
    file = tmp_path / "aime2025.jsonl"
    file.write_text("".join(f'{{"problem": "question {row}", "answer": "{row}"}}\n' for row in range(15)))
    files = f"data.val_files={file}"
    for metric in ("val-core/aime_2025/acc/mean@30", "val-aux/aime_2025/acc/problems_6-10/mean@30",
                   "val-aux/aime_2025/f1/mean@30"):  # fmt: skip
        asked_for(metric, files)
    for metric, near in (
        ("val-core/aime_2024/acc/mean@30", "val-core/aime_2025/acc/mean@30"),
        ("val-aux/aime_2025/acc/problems_5-9/mean@30", "val-aux/aime_2025/acc/problems_1-5/mean@30"),
        ("val-aux/gsm8k/f1/mean@30", "the nearest are"),
    ):
        with pytest.raises(ConfigError, match=near):
            asked_for(metric, files)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.early_stopping.metric=val-quick/all/acc/mean@4"], "trainer.quick_test_freq=0 asks for none"),
        (["trainer.early_stopping.metric=val-core/all/acc/mean@30", "trainer.test_freq=0"], "set test_freq"),
        (["trainer.quick_test_freq=10", "trainer.test_freq=5"], "no quick one would ever run"),
    ],
)
def test_settings_under_which_nothing_would_happen_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, overrides)
