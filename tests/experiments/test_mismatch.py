"""The experiments' definitions and what becomes of their runs; a real run is in tests/end_to_end."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from experiments.mismatch import collapse_and_cure, dapo_ablation, experiment, ppo_and_arpo, top_p, where_it_lives
from megatron_retool.algorithms.rejection_rules import parse_rejection_rules
from megatron_retool.config import ConfigError, load_config

EXPERIMENTS = [module.EXPERIMENT for module in (collapse_and_cure, where_it_lives, top_p, dapo_ablation, ppo_and_arpo)]

BASE_PARTS = ("data/model", "sft/COMPLETE", "sft_hf", "sft_mcore")


@pytest.mark.parametrize("chosen", EXPERIMENTS, ids=lambda e: e.name)
def test_arms_are_valid_and_differ(chosen):
    configs = [load_config(chosen.config, [*chosen.common, *arm.overrides]) for arm in chosen.arms]
    assert all(a != b for i, a in enumerate(configs) for b in configs[:i])
    quick = [arm for arm in chosen.arms if arm.quick]
    assert quick
    for arm in quick:
        load_config(chosen.config, [*chosen.common, *arm.overrides, *experiment._QUICK])


def test_the_cures_are_those_of_the_literature():
    arms = {arm.name: arm for arm in collapse_and_cure.EXPERIMENT.arms}
    corrections = {
        name: load_config(experiment.CONFIG, arm.overrides).algorithm.rollout_correction for name, arm in arms.items()
    }
    uncorrected = corrections["uncorrected"]
    assert (uncorrected.mode, uncorrected.rejection, uncorrected.veto_threshold) == ("none", [], None)
    mis = corrections["sequence_mis"]
    assert (mis.level, mis.mode, mis.lower, mis.upper) == ("sequence", "mask", 0.5, 2.0)
    geometric = corrections["geometric_mis"]
    (rule,) = parse_rejection_rules(geometric.rejection)
    assert rule.name == "geometric_ratio" and geometric.veto_threshold == 1e-4 and geometric.mode == "truncate"
    for name, arm in arms.items():
        config = load_config(experiment.CONFIG, arm.overrides)
        mismatched = (config.rollout.engine.dtype, config.weight_sync.round_to)
        assert mismatched == (("float32", None) if name == "same_numbers" else ("bfloat16", "fp8"))


def test_branching_is_the_papers():
    """arXiv:2507.19849: alpha 0.5, beta 0.2, threshold 0.5, beam 2, half of the group to begin with."""
    arms = {arm.name: arm for arm in ppo_and_arpo.EXPERIMENT.arms}
    for name in ("arpo_soft", "arpo_hard"):
        rollout = load_config(ppo_and_arpo.EXPERIMENT.config, arms[name].overrides).rollout
        branching = rollout.branching
        assert (branching.branch_probability, branching.entropy_weight, branching.threshold) == (0.5, 0.2, 0.5)
        assert branching.timing == "after_tool_result" and branching.beam_size == 2
        assert 2 * branching.initial_rollouts == rollout.train.n
        assert rollout.multi_turn.tools == ["code_interpreter", "search"]


def test_runs_are_of_the_experiments_own_demo(tmp_path, monkeypatch):
    base = tmp_path / "base"
    for name in BASE_PARTS:
        (base / name).mkdir(parents=True)
    (base / "data" / "manifest.json").write_text('{"demo": {"variant": "two_tools"}}')
    commands = []
    monkeypatch.setattr(experiment, "_call", lambda arguments: commands.append(arguments) or 1)
    with pytest.raises(RuntimeError, match="ppo_seed0 ended with exit code 1"):
        experiment.run_experiment(
            ppo_and_arpo.EXPERIMENT, output=tmp_path, quick=True, base=base, arms=["ppo"], console=Console()
        )
    ((command, option, file, *settings),) = commands
    assert (command, option) == ("train", "--config") and file.endswith("configs/demo_two_tools_cpu.yaml")
    config = load_config(file, settings)
    assert config.tools.search.corpus == str(base / "data" / "corpus.parquet")
    assert config.algorithm.advantage == "gae" and config.reward.function == "math"


@pytest.mark.parametrize("chosen", [where_it_lives.EXPERIMENT, ppo_and_arpo.EXPERIMENT], ids=lambda e: e.name)
def test_the_quick_forms_base_is_made_of_less(chosen, tmp_path, monkeypatch):
    made = {}

    def fine_tune(config, stages, arguments):
        made["config"] = load_config(arguments[1], arguments[2:])
        data = Path(config.demo.directory)
        for name in BASE_PARTS:
            (config.run_dir / name).mkdir(parents=True)
        (data / "manifest.json").write_text(json.dumps({"demo": {"variant": config.demo.variant}}))

    monkeypatch.setattr(experiment, "fine_tune", fine_tune)
    monkeypatch.setattr(experiment.Stages, "run", lambda *_, **__: None)
    base = experiment.make_base(tmp_path, chosen.config, True, Console())
    config, whole = made["config"], load_config(chosen.config)
    assert base.sft_hf == config.run_dir / "sft_hf" and config.demo.sft_rows < whole.demo.sft_rows
    for stage, full in zip(config.sft.stages, whole.sft.stages, strict=True):
        assert stage.steps < full.steps and stage.optimizer == full.optimizer
        assert all(Path(file).parent == base.data for file in stage.train_files)


def write_run(directory, name, accuracies):
    run_dir = directory / name
    run_dir.mkdir(parents=True)
    rows = [{"step": 0, "val-core/all/acc/mean@4": 0.2}]
    rows += [
        {"step": step, "rollout/acc/mean": a, "actor/grad_norm": 1.0 + step, "timing_s/step": 2.0}
        for step, a in enumerate(accuracies, 1)
    ]
    rows[-1]["val-core/all/acc/mean@4"] = 0.7
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_results_tell_a_run_that_fell_from_one_that_learned(tmp_path):
    write_run(tmp_path, "up_seed0", [0.1 + 0.03 * i for i in range(20)])
    write_run(tmp_path, "down_seed0", [*(0.1 + 0.08 * i for i in range(10)), *([0.2] * 20)])
    up = experiment.summary(tmp_path, "e", "up", 0)
    down = experiment.summary(tmp_path, "e", "down", 0)
    assert not up["degraded"] and up["final_accuracy"] == up["best_accuracy"] == pytest.approx(0.535)
    assert down["degraded"] and down["final_accuracy"] == pytest.approx(0.2)
    assert up["held_out_accuracy"] == 0.7 and up["max_grad_norm"] == 21.0 and up["seconds"] == 40.0
    assert up["max_k3_kl"] is None
    arms = (experiment.Arm("up", ()), experiment.Arm("down", ()))
    described = experiment.Experiment("e", "Title", arms)
    assert experiment.draw_curves(tmp_path, described, ["up", "down"], 1).stat().st_size > 10_000
    console = Console(record=True, width=200)
    console.print(experiment.results_table(described, [up, down]))
    text = console.export_text()
    assert "up" in text and "0/1" in text and "1/1" in text


def test_mistakes_are_named(tmp_path):
    def run(**options):
        experiment.run_experiment(EXPERIMENTS[0], output=tmp_path, quick=True, console=Console(), **options)

    with pytest.raises(ConfigError, match="'geo'; known are .*geometric_mis"):
        run(arms=["geo"])
    with pytest.raises(ConfigError, match="data/model does not exist"):
        run(base=tmp_path)
    for name in BASE_PARTS:
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "data" / "manifest.json").write_text('{"demo": {"variant": "two_tools"}}')
    with pytest.raises(ConfigError, match="made with demo.variant=two_tools; this experiment needs one_tool"):
        run(base=tmp_path)
