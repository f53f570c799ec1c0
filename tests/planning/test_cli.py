"""The plan command and the straggler benchmark, as a user sees them."""

from __future__ import annotations

import io
import json
import runpy
from pathlib import Path

import pytest
from rich.console import Console

from megatron_retool.commands.command_line import parse
from megatron_retool.config import ConfigError, load_config, save_config
from megatron_retool.planning import scenarios
from megatron_retool.planning.cli import read_measurements
from megatron_retool.planning.hardware import parse_machines
from megatron_retool.planning.models import MODELS, preset, resolve_architecture
from run_files.phases import Phase

ROOT = Path(__file__).parents[2]
DENSE = "configs/retool_qwen2.5_32b_8xh200.yaml"


def run(*arguments: str, width: int = 200) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=width)
    plan, options = parse(["plan", *arguments])
    return plan(options, console), console.file.getvalue()  # type: ignore[attr-defined]


def test_a_plan_says_memory_time_and_layouts() -> None:
    code, text = run("--config", DENSE, "--gpus", "H200x8", "--steps", "30", "--val-prompts", "30")
    assert code == 0
    for part in ("32.8 B parameters", "optimizer states", "key-value cache", "CUDA graphs (they stay while it sleeps)",
                 "everything fits", "update_actor", "tokens/s and GPU", "30 steps:", "7 validations",
                 "suggested layouts", "TP 4 (SP)"):  # fmt: skip
        assert part in text, part
    assert "learner.tensor_model_parallel_size=" in text


def test_a_plan_that_does_not_fit_ends_with_1_and_a_cure() -> None:
    code, text = run("--config", DENSE, "--gpus", "H100x16", "--suggestions", "0")
    assert code == 1
    assert "does not fit:" in text
    assert "would fit with learner.world_size=16" in text


def test_overrides_and_options_change_the_plan() -> None:
    _, text = run(
        "--config", DENSE, "--gpus", "H200x8", "--suggestions", "0", "--model", "qwen2.5-7b", "--response-mean", "1000",
        "--clip-ratio", "0.001", "data.train_batch_size=64",
    )  # fmt: skip
    assert "qwen2.5-7b: 7.62 B parameters" in text
    assert "64 prompts x 16 = 1024 responses of 1000 tokens on average" in text


def test_a_simulation_compares_the_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenarios, "SIMULATED_RESPONSES", 1024)
    code, text = run(
        "--config", DENSE, "--gpus", "H200x8", "--suggestions", "0", "--simulate",
        "--sizes", "8,16", "--max-responses", "512",
    )  # fmt: skip
    assert code == 0
    assert "8 GPUs: 2 engines of TP 4, 512 responses" in text
    assert "16 GPUs: 4 engines of TP 4, 512 responses" in text
    for word in ("wait for", "rollout", "chronous,", "partial"):
        assert text.count(word) >= 2
    assert "A response of 16384 tokens takes" in text


@pytest.mark.slow
def test_tables_are_whole_at_80_columns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scenarios, "SIMULATED_RESPONSES", 256)
    save_config(load_config("configs/retool_qwen3_30b_a3b_2x8h100.yaml"), tmp_path / "config.yaml")
    row = {"step": 1, "response_length/mean": 900.0, **{phase.metric: 1234.5 for phase in Phase}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row))
    arguments = ("--run", str(tmp_path), "--gpus", "H100x16", "--suggestions", "3", "--simulate", "--sizes", "8")
    _, text = run(*arguments, "--max-responses", "256", width=80)
    tables = [line for line in text.splitlines() if not line.startswith("cluster.nodes=")]
    assert max(map(len, tables)) <= 80
    assert "…" not in text
    whole = ("old_log_prob", "update_actor", "measured", "colocated, ", " recomputation, ", "tokens/s", "step s",
             "wait for", "asyn-\n", "chronous,", "engines", "tokens/s/GPU", "16: TP ")  # fmt: skip
    flat = "\n".join(line.rstrip() for line in text.splitlines())
    for word in whole:
        assert word in flat, word


def test_the_demo_can_be_planned_before_its_model_exists() -> None:
    code, text = run(
        "--config", "configs/demo_cpu.yaml", "--response-mean", "56", "--clip-ratio", "0.001", "--simulate"
    )
    assert code == 0
    assert "2 x CPU" in text and "0.000657 B parameters" in text
    assert "suggested" not in text


def test_measurements_of_a_run_give_the_workload_and_stand_beside_the_prediction(tmp_path: Path) -> None:
    save_config(load_config("configs/demo_cpu.yaml"), tmp_path / "config.yaml")
    step = {
        "response_length/mean": 60.0, "response_length/clip_ratio": 0.0, "prompt_length/mean": 57.0, "tool/calls": 1.0,
        "tool/seconds_mean": 0.02, "dynamic_sampling/generated_groups": 20.0, "dynamic_sampling/kept_groups": 16.0,
        "timing_s/gen": 2.0, "timing_s/old_log_prob": 0.5, "timing_s/update_actor": 1.5, "timing_s/step": 4.5,
    }  # fmt: skip
    rows = [
        {"step": 0, "val-core/demo/acc/mean@4": 0.2},
        {"step": 1, **step, "timing_s/gen": 50.0},
        *({"step": number, **step, "timing_s/gen": seconds} for number, seconds in ((2, 1.9), (3, 2.0), (4, 9.0))),
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    measured = read_measurements(tmp_path / "metrics.jsonl")
    assert measured["gen"] == 2.0  # the median without the first step
    _, text = run("--run", str(tmp_path))
    assert "responses of 60 tokens on average" in text
    assert "measured" in text and "4.5" in text and "%" in text


def test_every_predicted_phase_stands_beside_the_one_that_a_run_times(tmp_path: Path) -> None:
    save_config(load_config(DENSE), tmp_path / "config.yaml")
    step = {"response_length/mean": 900.0, "prompt_length/mean": 90.0, "tool/calls": 1.0}
    row = {"step": 1, **step, **{phase.metric: 1000.0 + number for number, phase in enumerate(Phase)}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row))
    _, text = run("--run", str(tmp_path), "--suggestions", "0")
    predicted = ("gen", "old_log_prob", "update_actor", "weight_sync", "phase_switch", "step")
    for phase in predicted:
        (line,) = [line for line in text.splitlines() if line.split("│")[1:2] and line.split("│")[1].strip() == phase]
        assert f"{1000 + list(Phase).index(Phase(phase))}" in line


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), ("{", "is not a file of JSON lines"), ('{"step": 0}\n', "has no training step")],
)
def test_unusable_measurements_are_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        run("--run", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("H100", "not of the form H100x16"),
        ("H100x0", "not of the form"),
        ("Z9x8", "Z9 is not one of A100, H100, H200, B200, L4, RTX4090, CPU"),
        ("H100x12", "12 GPUs do not fill whole nodes of 8"),
    ],
)
def test_machines_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_machines(text)


def test_machines() -> None:
    machines = parse_machines("h100x16")
    assert (machines.accelerator.name, machines.nodes) == ("H100", 2)
    assert parse_machines("H100x4").nodes == 1
    assert parse_machines("CPUx3").per_node == 3
    assert parse_machines("B200x144", per_node=72).nodes == 2


def test_models_are_found_by_directory_by_path_and_by_name(tmp_path: Path) -> None:
    config = load_config(DENSE)
    assert resolve_architecture(config.model, config.demo)[0] == "qwen2.5-32b"
    assert resolve_architecture(config.model, config.demo, "Qwen/Qwen3-30B-A3B-Instruct-2507")[0] == "qwen3-30b-a3b"
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3-8b"]))
    assert resolve_architecture(config.model, config.demo, str(tmp_path))[1] == preset("qwen3-8b")
    with pytest.raises(ConfigError, match="'gpt-5' has no config.json and is not one of the known models"):
        resolve_architecture(config.model, config.demo, "gpt-5")
    with pytest.raises(ConfigError, match="is not one of"):
        preset("gpt-5")


def test_the_straggler_benchmark_reports_both_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "straggler.py"))
    assert benchmark["main"](["--steps", "8", "--json"]) == 0
    outcomes = json.loads(capsys.readouterr().out)
    waiting, partial = outcomes["wait for all"], outcomes["partial rollout"]
    assert waiting["generation_seconds"] > 1.15 * partial["generation_seconds"]
    assert partial["step_seconds"] < waiting["step_seconds"]
    assert outcomes["over-sampling, rest dropped"]["dropped_share"] > 0.2
    assert outcomes["1 step off"]["stale_share"] == 1.0 > outcomes["partial rollout, asynchronous"]["stale_share"] > 0
    assert benchmark["main"](["--steps", "2"]) == 0
    assert "partial rollout: generation" in capsys.readouterr().out


def test_the_straggler_benchmark_compares_ways_to_refill(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "straggler.py"))
    assert benchmark["main"](["--steps", "4", "--kept-groups", "0.5", "--json"]) == 0
    outcomes = json.loads(capsys.readouterr().out)
    seconds = [
        outcomes[name]["step_seconds"]
        for name in ("refill in rounds", "continuous refill", "partial rollout", "partial rollout, over-sampling")
    ]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 1.1 * seconds[1]
    assert outcomes["continuous refill"]["stale_share"] == 0
