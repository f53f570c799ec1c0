"""Every page of a run that was trained for real, in a browser."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.end_to_end.conftest import FinishedRun
from tests.viewer.test_browser import CHROMIUM, CONTRAST, browser, served, tab, visit  # noqa: F401

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH (apt-get install chromium)")


def walk(tab, runs: Path, name: str) -> None:  # noqa: F811
    """Runs, the run, its time, a step and each response of its first group: no error, and the parquet's numbers."""
    (rollouts, *_) = sorted((runs / name / "rollouts").glob("step_??????.parquet"))
    step = int(re.findall(r"\d+", rollouts.name)[0])
    rows = pq.read_table(rollouts, columns=["group_id", "index", "reward", "response_ids"]).to_pylist()
    first = [row for row in rows if row["group_id"] == rows[0]["group_id"]]
    with served(runs) as address:
        for place in ("", f"run/{name}", f"run/{name}/time", f"run/{name}/time/{step}", f"run/{name}/step/{step}"):
            visit(tab, address, f"#/{place}")
            assert tab.locator("main [role=alert]").all_inner_texts() == [], place
            assert tab.evaluate(CONTRAST) == [], place
        assert f"of {len({row['group_id'] for row in rows})} groups, {len(rows)} responses" in tab.inner_text("#count")
        for row in first:
            visit(tab, address, f"#/run/{name}/step/{step}/{row['group_id']}/{row['index']}")
            assert tab.locator(".token").count() == len(row["response_ids"])
            (reward,) = re.findall(r"^reward (\S+)", tab.inner_text("[data-response]"), re.MULTILINE)
            assert float(reward) == pytest.approx(row["reward"], rel=5e-4), row


@pytest.mark.slow
def test_every_page_of_the_demo(demo_run: FinishedRun, tab, tmp_path: Path) -> None:  # noqa: F811
    """A copy: other tests begin runs beside the demo, and those have problems to name."""
    shutil.copytree(
        demo_run.run_dir, tmp_path / "runs" / "demo", ignore=shutil.ignore_patterns("checkpoints", "weight_sync")
    )
    walk(tab, tmp_path / "runs", "demo")
