"""The referee on a run on disk, with the real learner in one rank."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from conversion.files.checksums import DamagedError
from conversion.hf_to_mcore import convert
from megatron_retool.__main__ import main
from megatron_retool.config import load_config, save_config
from megatron_retool.learner import attention
from megatron_retool.loop.rollout_files import write_estimates
from megatron_retool.parity.referee.report import judge_step, write_referee_report
from megatron_retool.parity.referee.stored_step import find_step, sample_tokens
from megatron_retool.trajectory import TrajectoryBatch, read_trajectories, write_trajectories
from run_files.steps import read_estimates
from tests.parity.referee.judged_run import make_run

LAYERS = 3


def second_turn(trajectory):
    """An engine that is wrong in the second turn."""
    return np.where(trajectory.turn_ids == 1, 0.01, 0.0)


@pytest.fixture(scope="module")
def dense_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dense")
    return make_run(directory, "qwen2", engine=second_turn, num_hidden_layers=LAYERS)


def copied(run_dir: Path, directory: Path) -> Path:
    return Path(shutil.copytree(run_dir, directory / "run", ignore=shutil.ignore_patterns("report")))


def test_an_engine_that_is_off_is_named(dense_run, capsys):
    assert main(["report", "referee", str(dense_run)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    page = dense_run / "report" / "referee_step_000001.html"
    assert "the mismatch is the engine's (100 % of its square)" in output and "turn 1" in output
    assert "first layer in which the learner leaves the referee: none above rounding" in output
    result = json.loads(page.with_suffix(".json").read_text())
    total = result["splits"][0]
    assert result["referee"]["dtype"] == "float64" and result["weights"]["version"] == 0
    assert total["learner"]["mean_abs"] < 1e-6 < 1e-3 < total["engine"]["mean_abs"]
    assert [row["stage"] for row in result["layers"]] == ["embedding", "layer 1", "layer 2", "layer 3", "final norm"]
    assert all(row["median"] < 1e-5 for row in result["layers"])
    assert result["learner"]["stored_against_run_again"]["max_abs"] < 1e-5
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 3 and "<img src=" in text and "in one rank" in text


@pytest.mark.slow
def test_the_same_inputs_give_the_same_page(dense_run, tmp_path):
    pages = []
    for name in ("first", "second"):
        run_dir = copied(dense_run, tmp_path / name)
        page, result = write_referee_report(run_dir, tokens=60, seed=3)
        assert result["sample"]["tokens"] == 60
        pages.append((page.read_bytes(), page.with_suffix(".json").read_bytes()))
    assert pages[0] == pages[1]
    responses = [sample_tokens(find_step(dense_run), 60, seed)[0] for seed in (3, 4)]
    names = [[(r.trajectory.group_id, r.trajectory.index) for r in sample] for sample in responses]
    assert names[0] != names[1]


def test_a_learner_that_is_off_is_named_with_its_layer(dense_run, tmp_path, monkeypatch):
    """The learner of the run, and hence the one that is run again, rotates wrongly; the engine is right in turn 0."""
    run_dir = copied(dense_run, tmp_path)
    stored = run_dir / "rollouts" / "step_000001"
    trajectories = read_trajectories(stored.with_suffix(".parquet"))
    for trajectory in trajectories:
        trajectory.rollout_log_probs = (trajectory.rollout_log_probs - second_turn(trajectory)).astype(np.float32)
    estimates = read_estimates(stored.with_suffix(".learner.parquet"))
    columns = [estimates[t.key]["old_log_probs"] + 0.02 * t.loss_mask * (t.group_id == 2) for t in trajectories]
    batch = TrajectoryBatch.from_trajectories(trajectories).with_columns(old_log_probs=np.concatenate(columns))
    write_trajectories(trajectories, stored.with_suffix(".parquet"))
    write_estimates(batch, stored.with_suffix(".learner.parquet"))

    forward = attention.SwiGLUMLP.forward

    def wrong(self, hidden, *arguments, **keywords):
        output, bias = forward(self, hidden, *arguments, **keywords)
        return output * (1.01 if self.layer_number_for_test == 2 else 1.0), bias

    numbers = iter(range(1, LAYERS + 1))
    created = attention.SwiGLUMLP.__init__

    def numbered(self, *arguments, **keywords):
        created(self, *arguments, **keywords)
        self.layer_number_for_test = next(numbers)

    monkeypatch.setattr(attention.SwiGLUMLP, "__init__", numbered)
    monkeypatch.setattr(attention.SwiGLUMLP, "forward", wrong)
    result, _ = judge_step(run_dir)
    assert "the mismatch is the learner's" in result["verdict"][0]
    assert any("leaves the referee: layer 2" in sentence for sentence in result["verdict"])
    assert result["responses"][0]["group_id"] == 2 and result["responses"][0]["side"] == "learner"


def test_weights_of_a_later_step_come_from_the_checkpoint_before_it(dense_run, tmp_path):
    run_dir = copied(dense_run, tmp_path)
    step = run_dir / "rollouts" / "step_000001"
    trajectories = read_trajectories(step.with_suffix(".parquet"))
    for trajectory in trajectories:
        version = np.where(np.arange(len(trajectory.response_ids)) < 3, 2, 3)  # the first three are an older version's
        trajectory.weight_versions = np.where(trajectory.turn_ids >= 0, version, -1).astype(np.int32)
    write_trajectories(trajectories, run_dir / "rollouts" / "step_000004.parquet")
    shutil.copy(step.with_suffix(".learner.parquet"), run_dir / "rollouts" / "step_000004.learner.parquet")
    with pytest.raises(FileNotFoundError, match=r"step 4 was sampled .* --step can be one of step 1\..*save_freq=1"):
        find_step(run_dir, 4)
    assert find_step(run_dir).number == 1
    checkpoint = run_dir / "checkpoints" / "global_step_3"
    alone = run_dir / "checkpoints" / "weights_step_3"
    convert(dense_run.parent / "model", alone, require_tokenizer=False)
    assert find_step(run_dir).weights.path == alone
    checkpoint.mkdir()
    alone.rename(checkpoint / "learner")
    (checkpoint / "COMPLETE").touch()
    found = find_step(run_dir)
    assert found.number == 4 and found.weights.version == 3
    result, _ = judge_step(run_dir)
    assert result["sample"]["of_tokens"] == sum(t.loss_mask.sum() for t in trajectories) - 3 * len(trajectories)
    assert "the mismatch is the engine's" in result["verdict"][0]
    with pytest.raises(FileNotFoundError, match="those of steps 1, 4"):
        find_step(run_dir, 2)
    (file,) = (checkpoint / "learner").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedError, match=file.name):
        judge_step(run_dir)


def test_in_bypass_mode_the_learner_is_run_again(dense_run, tmp_path):
    run_dir = copied(dense_run, tmp_path)
    config = load_config(run_dir / "config.yaml", ["algorithm.rollout_correction.bypass_old_log_probs=true",
                                                   "algorithm.rollout_correction.mode=none"])  # fmt: skip
    save_config(config, run_dir / "config.yaml")
    result, _ = judge_step(run_dir)
    assert result["learner"]["old_log_probs"] == "run again" and "the engine's" in result["verdict"][0]


def test_what_filters_of_sampling_remove_is_removed():
    from megatron_retool.algorithms.settings import SamplingSettings
    from megatron_retool.parity.referee.referee_model import sampled_log_probs

    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    settings = SamplingSettings(top_p=0.7)
    kept = sampled_log_probs(logits, torch.tensor([1]), settings)
    assert kept.exp().item() == pytest.approx(0.3 / 0.8, rel=1e-6)
    at_the_edge = sampled_log_probs(logits, torch.tensor([2]), settings)
    assert at_the_edge.exp().item() == pytest.approx(0.15 / 0.95, rel=1e-6)


def test_a_choice_of_experts_is_told_from_other_errors(tmp_path):
    """The engine chose other experts in every fourth token, and is off by rounding otherwise."""
    run_dir = make_run(tmp_path, "qwen3_moe", experts=True, num_hidden_layers=LAYERS)
    page, result = write_referee_report(run_dir)
    routing, total = result["routing"], result["splits"][0]
    assert total["side"] == "engine" and total["engine"]["mean_abs"] > 1e-3 and not total["learner"]["beyond_format"]
    assert routing["share_of_squared_error"] == pytest.approx(1.0, abs=1e-4)
    assert routing["mean_abs_forced"] < 1e-6 < 1e-3 < routing["mean_abs_own"]
    assert [share > 0 for share in routing["by_layer"]] == [False, True, False]
    assert routing["tokens_with_other_experts"] == pytest.approx(0.25 * 5 / 6, abs=0.08)  # one pair of six is its own
    assert routing["learner_tokens_with_other_experts"] < 0.02
    assert "of the engine's squared error is routing" in result["verdict"][-1]
    assert not any(row["off"] for row in result["layers"])
    assert page.read_text().count("data:image/png;base64,") == 4


def test_a_replayed_choice_of_experts_is_nobodys_fault(tmp_path):
    settings = ["learner.routing_replay=rollout"]
    run_dir = make_run(tmp_path, "qwen3_moe", *settings, experts=True, replay=True, num_hidden_layers=LAYERS)
    result, _ = judge_step(run_dir)
    assert result["referee"]["experts_forced"] and result["splits"][0]["side"] == "neither"
    assert result["learner"]["stored_against_run_again"]["max_abs"] < 1e-5
    assert "without which" in result["verdict"][-1]
    assert result["routing"]["mean_abs_own"] > 1e-3 and not any(row["off"] for row in result["layers"])
