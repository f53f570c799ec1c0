import json

import pytest
from rich.console import Console

from megatron_retool.config import load_config, save_config
from megatron_retool.reports.compare import compare_runs


def write_run(directory, name, accuracy, *overrides):
    run_dir = directory / name
    run_dir.mkdir()
    save_config(load_config(None, [f"trainer.experiment_name={name}", *overrides]), run_dir / "config.yaml")
    row = {"step": 2, "timing_s/step": 3.0, "val-core/all/acc/mean@4": accuracy}
    (run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return run_dir


def test_settings_that_differ_and_figures_stand_side_by_side(tmp_path):
    runs = [
        write_run(tmp_path, "plain", 0.5),
        write_run(tmp_path, "gspo", 0.625, "algorithm.policy_loss=gspo", "rollout.train.top_p=0.9"),
    ]
    console = Console(width=80, record=True)
    compare_runs(runs, console)
    words = [line.split() for line in console.export_text().splitlines() if line.strip()]
    assert ["setting", "plain", "gspo"] in words
    assert ["rollout.train.top_p", "1.0", "0.9"] in words
    assert [line[-1] for line in words if line[0] == "algorithm.policy_loss"] == ["gspo"]
    assert ["mean@4", "0.500", "0.625"] in words
    assert not any("experiment_name" in line[0] or line[0] == "trainer.seed" for line in words)


def test_what_is_no_run_is_named(tmp_path):
    run = write_run(tmp_path, "plain", 0.5)
    with pytest.raises(FileNotFoundError, match=r"nothing/config\.yaml does not exist: give directories of runs"):
        compare_runs([run, tmp_path / "nothing"], Console(quiet=True))
    (run / "metrics.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl is missing: there is nothing to compare"):
        compare_runs([run, run], Console(quiet=True))
