"""What becomes of an experiment's runs; a real one is in tests/end_to_end."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from experiments.mismatch import collapse_search_dense, experiment, ppo_and_arpo, results, runs, where_it_lives
from experiments.mismatch.arms import Arm, Experiment
from experiments.mismatch.runs import Run
from megatron_retool.commands.stages import Stages
from megatron_retool.config import Config, ConfigError, load_config
from megatron_retool.trajectory import FinishReason, Trajectory, write_trajectories

BASE_PARTS = ("data/model", "sft/COMPLETE", "sft_hf", "sft_mcore")
SEARCH = replace(collapse_search_dense.EXPERIMENT, name="search")


def make_base(directory: Path, **demo) -> Path:
    for name in BASE_PARTS:
        (directory / name).mkdir(parents=True)
    (directory / "data" / "manifest.json").write_text(json.dumps({"demo": demo}))
    return directory


def write_checkpoint(run_dir: Path, step: int) -> None:
    path = run_dir / "checkpoints" / f"global_step_{step}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "COMPLETE").touch()


def write_run(directory: Path, name: str, accuracies, first_step: int = 1) -> None:
    run_dir = directory / name
    run_dir.mkdir(parents=True, exist_ok=True)
    rows = [{"step": 0, "val-core/all/acc/mean@4": 0.2}]
    rows += [
        {
            "step": step, "rollout/acc/mean": a, "actor/grad_norm": 0.1 * step, "timing_s/step": 2.0,
            "rollout_corr/k3_kl": 2e-3 * step, "rollout_corr/masked_fraction": 0.02, "actor/skipped_updates": step % 2,
        }
        for step, a in enumerate(accuracies, first_step)
    ]  # fmt: skip
    rows[-1]["val-core/all/acc/mean@4"] = 0.7
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_checkpoint(run_dir, rows[-1]["step"])


def write_evaluation(directory: Path, accuracy_of_families: dict[str, list[float]]) -> None:
    (directory / "validation").mkdir(parents=True)
    trajectories = [
        Trajectory(
            prompt_ids=np.array([1], np.int32), response_ids=np.array([2], np.int32), loss_mask=np.array([True]),
            rollout_log_probs=np.array([-0.1], np.float32), turn_ids=np.array([0], np.int16),
            weight_versions=np.array([0], np.int32), group_id=index, index=0, finish_reason=FinishReason.STOP,
            reward=1.0, reward_info={"acc": accuracy}, extra_info={"family": family},
        )
        for index, (family, accuracy) in enumerate((f, a) for f, each in accuracy_of_families.items() for a in each)
    ]  # fmt: skip
    write_trajectories(trajectories, directory / "validation" / "step_000000.parquet")
    mean = float(np.mean([a for each in accuracy_of_families.values() for a in each]))
    (directory / "metrics.jsonl").write_text(json.dumps({"step": 0, "val-core/all/acc/mean@4": mean}) + "\n")


class Commands:
    """Stands in for the commands of megatron_retool: notes them, and leaves what they would leave."""

    def __init__(self, monkeypatch, fail: str = "") -> None:
        self.calls: list[tuple[str, Config, dict[str, str]]] = []
        self._fail = fail
        monkeypatch.setattr(runs, "call_command", self)
        monkeypatch.setattr(experiment, "write_mismatch_report", lambda run_dir: None)
        monkeypatch.setattr(results, "draw_curves", lambda *_: None)

    def __call__(self, arguments) -> int:
        command, option, file, *settings = arguments
        assert option == "--config"
        config = load_config(file, settings)
        self.calls.append((command, config, dict(setting.split("=", 1) for setting in settings)))
        if self._fail and self._fail in config.trainer.experiment_name:
            return 3
        if command == "train":
            steps = config.trainer.total_steps
            for step in range(config.trainer.save_freq, steps, config.trainer.save_freq):
                if config.trainer.keep_every and step % config.trainer.keep_every == 0:
                    write_checkpoint(config.trainer.run_dir, step)
            write_run(config.trainer.run_dir.parent, config.trainer.run_dir.name, [0.5] * steps)
        else:
            assert Path(config.model.path).name == "export"
            write_evaluation(config.trainer.run_dir, {"gcd": [1.0, 0.0], "arithmetic": [1.0]})
        return 0

    @property
    def names(self) -> list[tuple[str, str]]:
        return [(command, config.trainer.experiment_name) for command, config, _ in self.calls]


def search(tmp_path: Path, *arms: str, **options):
    base = tmp_path / "base"
    if not base.exists():
        make_base(base)
    return experiment.run_experiment(
        SEARCH, output=tmp_path, quick=False, base=base, arms=arms or None, console=Console(),
        **{"seeds": [1], "steps": 8, **options},
    )  # fmt: skip


def test_a_search_trains_evaluates_and_writes_its_tables_once(tmp_path, monkeypatch):
    commands = Commands(monkeypatch)
    rows = search(tmp_path, "int4", "float32", seeds=[1, 2])
    assert commands.names == [
        (command, name)
        for run in ("float32_seed1", "int4_seed1", "float32_seed2", "int4_seed2")
        for command, name in (("train", run), ("evaluate", "float32_step_8"))
    ]
    train, evaluate = commands.calls[2][1], commands.calls[3][1]
    assert train.weight_sync.round_to == "int4" and train.trainer.seed == 1 and train.trainer.at_end == ["export"]
    assert train.model.path == str(tmp_path / "base" / "sft_hf") and train.learner.optimizer.lr == 3e-4
    # Its own weights, in the same engine for every arm.
    assert evaluate.model.path == str(tmp_path / "search" / "int4_seed1" / "export")
    assert evaluate.weight_sync.round_to is None and evaluate.rollout.engine.dtype == "float32"
    assert evaluate.data.val_files == [str(tmp_path / "base" / "data" / "val.parquet")]
    assert [(row["arm"], row["seed"], row["float32_accuracy"]) for row in rows] == [
        ("float32", 1, pytest.approx(2 / 3)), ("float32", 2, pytest.approx(2 / 3)),
        ("int4", 1, pytest.approx(2 / 3)), ("int4", 2, pytest.approx(2 / 3)),
    ]  # fmt: skip
    assert rows[0]["float32_families"] == {"arithmetic": 1.0, "gcd": 0.5}
    text = (tmp_path / "search" / "results.md").read_text()
    assert "| int4 | 1.000 | 0.500 |" in text and "| float32: +0.000 |" in text
    stored = [json.loads(line) for line in (tmp_path / "search" / "results.jsonl").read_text().splitlines()]
    assert stored == rows

    again = search(tmp_path, "int4")
    assert len(commands.calls) == 8, "what exists is not run again"
    assert len(again) == 4, "the table has what other commands ran"


def test_a_cure_begins_with_the_other_arms_checkpoint(tmp_path, monkeypatch):
    commands = Commands(monkeypatch)
    search(tmp_path, "int3_then_token_tis", "int3")
    (_, first, _), _, (_, cured, _), _ = commands.calls
    checkpoint = tmp_path / "search" / "int3_seed1" / "checkpoints" / "global_step_4"
    assert first.trainer.keep_every == 4 and first.trainer.resume_mode == "auto"
    assert cured.trainer.resume_mode == "resume_path" and cured.trainer.resume_from_path == str(checkpoint)
    assert cured.algorithm.rollout_correction.mode == "truncate" and cured.weight_sync.round_to == "int3"
    # Once it has a checkpoint of its own it goes on from that.
    search(tmp_path, "int3_then_token_tis", "int3", steps=9)
    assert commands.names[-2] == ("train", "int3_then_token_tis_seed1")
    assert commands.calls[-2][1].trainer.resume_mode == "auto"

    with pytest.raises(RuntimeError, match="run the arm int3 with the same --steps and --seeds first"):
        search(tmp_path, "int3_then_token_tis", seeds=[2])
    with pytest.raises(ConfigError, match="int3_then_token_tis starts halfway and needs at least 2"):
        search(tmp_path, "int3_then_token_tis", steps=1)


def test_a_run_that_fails_does_not_end_the_others(tmp_path, monkeypatch):
    commands = Commands(monkeypatch, fail="int3_seed1")
    with pytest.raises(
        RuntimeError, match=r"int3_seed1: train ended with exit code 3; its logs are in .*int3_seed1/log"
    ):
        search(tmp_path, "int3", "int3_then_token_tis", "int4")
    assert [name for command, name in commands.names if command == "train"] == ["int4_seed1", "int3_seed1"]
    rows = (tmp_path / "search" / "results.jsonl").read_text().splitlines()
    assert [json.loads(row)["arm"] for row in rows] == ["int4"]


def test_two_commands_share_the_runs(tmp_path, monkeypatch):
    """What another command holds is left to it; what starts from that waits until it is there."""
    commands = Commands(monkeypatch)
    monkeypatch.setattr(experiment, "_WAIT_SECONDS", 0.05)
    directory = tmp_path / "search"
    held, release = threading.Event(), threading.Event()

    def other_command():
        with runs.lock(directory, "int3_seed1"), runs.lock(directory, "int4_seed1"):
            held.set()
            release.wait(20)
            write_run(directory, "int3_seed1", [0.5] * 8)
            write_checkpoint(directory / "int3_seed1", 4)
            write_evaluation(directory / "int3_seed1" / "float32_step_8", {"gcd": [1.0]})

    thread = threading.Thread(target=other_command)
    thread.start()
    assert held.wait(20)
    threading.Timer(0.5, release.set).start()
    rows = search(tmp_path, "int3", "int3_then_token_tis", "float32")
    thread.join()
    trained = [name for command, name in commands.names if command == "train"]
    assert trained == ["float32_seed1", "int3_then_token_tis_seed1"]
    assert [row["arm"] for row in rows] == ["float32", "int3", "int3_then_token_tis"]

    with runs.lock(directory, "int4_seed1"):
        console = Console(record=True, width=200)
        experiment._make_runs([Run(directory, Arm("int4", ()), 1, 8)], SEARCH, None, [], [], console)
    assert "another command makes int4_seed1" in console.export_text()


def test_runs_are_of_the_experiments_own_demo(tmp_path, monkeypatch):
    base = make_base(tmp_path / "base", variant="two_tools")
    commands = Commands(monkeypatch, fail="ppo")
    with pytest.raises(RuntimeError, match="ppo_seed0: train ended with exit code 3"):
        experiment.run_experiment(
            ppo_and_arpo.EXPERIMENT, output=tmp_path, quick=True, base=base, arms=["ppo"], console=Console()
        )
    ((command, config, settings),) = commands.calls
    assert command == "train" and config.demo.variant == "two_tools" and settings["trainer.at_end"] == "[]"
    assert config.tools.search.corpus == str(base / "data" / "corpus.parquet")
    assert config.algorithm.advantage == "gae" and config.reward.function == "math"


@pytest.mark.parametrize("chosen", [where_it_lives.EXPERIMENT, ppo_and_arpo.EXPERIMENT], ids=lambda e: e.name)
def test_the_quick_forms_base_is_made_of_less(chosen, tmp_path, monkeypatch):
    made = {}

    def fine_tune(config, stages, arguments):
        made["config"] = load_config(arguments[1], arguments[2:])
        make_base(config.trainer.run_dir, variant=config.demo.variant)

    monkeypatch.setattr(runs, "fine_tune", fine_tune)
    monkeypatch.setattr(Stages, "run", lambda *_, **__: None)
    base = runs.make_base(tmp_path, chosen, True, Console())
    config, whole = made["config"], load_config(chosen.config)
    assert base.sft_hf == config.trainer.run_dir / "sft_hf" and config.demo.sft_rows < whole.demo.sft_rows
    for stage, full in zip(config.sft.stages, whole.sft.stages, strict=True):
        assert stage.steps < full.steps and stage.optimizer == full.optimizer
        assert all(Path(file).parent == base.data for file in stage.train_files)


def test_results_tell_a_run_that_fell_from_one_that_learned(tmp_path):
    write_run(tmp_path, "up_seed0", [0.11 + 0.03 * i for i in range(20)])
    write_run(tmp_path, "down_seed0", [*(0.1 + 0.08 * i for i in range(10)), *([0.2] * 20)])
    arms = (Arm("up", ()), Arm("down", (), against="up"))
    described = Experiment("e", "Title", arms)
    up, down = rows = results.write_results(tmp_path, described, [Run(tmp_path, arm, 0, 20) for arm in arms])
    assert not up["degraded"] and up["final_accuracy"] == up["best_accuracy"] == pytest.approx(0.545)
    assert down["degraded"] and down["final_accuracy"] == pytest.approx(0.2)
    assert up["held_out_accuracy"] == 0.7 and up["max_grad_norm"] == 2.0 and up["seconds"] == 40.0
    assert (up["steps_with_large_gradient"], down["steps_with_large_gradient"]) == (10, 20)
    assert up["first_k3_kl"] == pytest.approx(1.1e-2) and up["last_k3_kl"] == pytest.approx(3.1e-2)
    assert up["max_k3_kl"] == 4e-2 and up["skipped_updates"] == 10 and up["max_training_ppl"] is None
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    text = (tmp_path / "results.md").read_text()
    line = "0.700 | 0.54 | 0.54 | 1.1e-02 | 3.1e-02 | 4.0e-02 | 10.0 | 2 | 2.0% | 10.0 |"
    assert f"| up | 1 | {line} 0/1 | – |" in text and f"| up | 0 | 20 | {line} 1 |" in text
    assert "1/1 | up: +0.000 |" in text and "by family" not in text
    console = Console(record=True, width=200)
    console.print(results.results_table(described, rows))
    printed = console.export_text()
    assert "up" in printed and "0/1" in printed and "1/1" in printed


def test_mistakes_are_named(tmp_path):
    def run(chosen=SEARCH, **options):
        experiment.run_experiment(chosen, output=tmp_path, quick=True, console=Console(), **options)

    with pytest.raises(ConfigError, match="'geo'; known are .*int3_geometric_mis"):
        run(arms=["geo"])
    with pytest.raises(ConfigError, match="nearest known key is 'learner.mini_batch_size'"):
        run(overrides=["learner.mini_batch_siz=8"])
    with pytest.raises(ConfigError, match="data/model does not exist"):
        run(base=tmp_path)
    with pytest.raises(ConfigError, match="made with demo.variant=two_tools; this experiment needs one_tool"):
        run(base=make_base(tmp_path / "two", variant="two_tools"))
    with pytest.raises(ConfigError, match="has a mixture of experts; this experiment needs a run of configs/demo_cpu"):
        run(base=make_base(tmp_path / "moe", num_experts=8))
