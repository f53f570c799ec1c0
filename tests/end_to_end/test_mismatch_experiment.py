"""The --quick form of a search: rounded engines, a cure that begins halfway, and a second call that finds all done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from megatron_retool.data.demo.problems import FAMILIES
from tests.end_to_end.conftest import ROOT, FinishedRun


@pytest.mark.rare
@pytest.mark.timeout(1800)
def test_quick_form_runs_and_is_not_run_twice(demo_run: FinishedRun, tmp_path):
    command = [
        sys.executable, "-m", "experiments.mismatch.collapse_search_dense", "--quick", "--base", str(demo_run.run_dir),
        "--output", str(tmp_path), f"reward.function={demo_run.run_dir.parent / 'reward.py'}:compute_score",
    ]  # fmt: skip

    def run() -> str:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run()
    directory = tmp_path / "quick" / "collapse_search_dense"
    rows = [json.loads(line) for line in (directory / "results.jsonl").read_text().splitlines()]
    # The cure has the steps after the other arm's checkpoint.
    assert [(row["arm"], row["seed"], row["steps"]) for row in rows] == [("int3", 0, 2), ("int3_then_token_tis", 0, 1)]
    for row in rows:
        assert row["max_k3_kl"] > 1e-5  # float32 on both sides gives 1e-12, FP8 1e-4
        assert row["max_grad_norm"] > 0 and row["float32_accuracy"] is not None
        assert row["float32_families"] and set(row["float32_families"]) <= set(FAMILIES)
        report = directory / f"{row['arm']}_seed0" / "report"
        figures = {(r["split"], r["category"]): r for r in json.loads((report / "mismatch.json").read_text())}
        assert figures["all", "all"]["mean_abs_difference"] > 1e-4
    assert (directory / "curves.png").exists() and "int3_then_token_tis" in (directory / "results.md").read_text()

    began = time.monotonic()
    assert run().count("done") == 2
    assert time.monotonic() - began < 60
