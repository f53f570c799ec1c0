"""Recipes of the cookbook 0.6.1, unchanged, against `megatron-retool tinker`: Megatron-Core learns, SGLang samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.conftest import kill_driver
from tests.serving.processes import lines_until, start
from tests.tinker.cookbook import COOKBOOK, run_with_cookbook
from tests.tinker.served import NAME, make_model

RECIPES = {
    "supervised": ("sl_basic", []),
    "arithmetic": (
        "math_rl.train",
        ["env=arithmetic", "loss_fn=importance_sampling", "groups_per_batch=4", "group_size=4", "max_steps=2"],
    ),
    "stable_reinforce": (
        "math_rl.train",
        ["env=arithmetic", "groups_per_batch=2", "group_size=4", "max_steps=1"],
    ),
    "gsm8k": (
        "math_rl.train",
        [
            "env=gsm8k",
            "loss_fn=importance_sampling",
            "groups_per_batch=2",
            "group_size=2",
            "max_tokens=8",
            "max_steps=1",
        ],
    ),
    "preferences": ("preference.dpo.train", ["dataset=hhh", "batch_size=16", "max_steps=1"]),
    "distillation": (
        "distillation.on_policy_distillation",
        [
            "dataset=deepmath",
            "groups_per_batch=2",
            "group_size=2",
            "max_tokens=8",
            "max_steps=1",
            f"teacher_model={NAME}",
            "lora_rank=8",
        ],
    ),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not COOKBOOK.is_dir(), reason="the cookbook is not installed: bash scripts/setup.sh"),
]


CONTEXT = 32768
"""The recipes ask for answers of this length."""


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("cookbook") / "model", CONTEXT)


@pytest.fixture(scope="module")
def url(model_directory: Path, tmp_path_factory: pytest.TempPathFactory):
    words = [
        "tinker", str(model_directory), "--directory", str(tmp_path_factory.mktemp("kept")), "--port", "0",
        f"tinker.names={NAME}", "tinker.stable_reinforce=stand_in", "learner.dtype=float32",
        "rollout.engine.dtype=float32", "rollout.engine.max_total_tokens=65536",
        "rollout.engine.max_running_requests=16",
    ]  # fmt: skip
    process, marker = start(*words)
    try:
        yield lines_until(process, "TINKER_BASE_URL=").partition("TINKER_BASE_URL=")[2].split()[0]
    finally:
        kill_driver(process, marker)


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=() if name in ("supervised", "gsm8k") else pytest.mark.rare) for name in RECIPES],
)
def test_a_recipe_runs_to_its_end(url, model_directory, tmp_path, recipe):
    module, arguments = RECIPES[recipe]
    # The cookbook reads the tokenizer of its model from a directory of that name.
    (tmp_path / NAME).parent.mkdir()
    (tmp_path / NAME).symlink_to(model_directory)
    logs = tmp_path / "logs"
    command = ["-m", "tests.tinker.cookbook_recipe", f"tinker_cookbook.recipes.{module}"]
    run_with_cookbook([*command, f"model_name={NAME}", f"log_path={logs}", *arguments], tmp_path, url)
    steps = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
    assert steps
    checkpoints = [json.loads(line) for line in (logs / "checkpoints.jsonl").read_text().splitlines()]
    assert checkpoints[-1]["state_path"].startswith("tinker://")
