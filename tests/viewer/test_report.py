"""The report at a run's end: the page in one file under its summary, with the plots beside it."""

from __future__ import annotations

import json

from megatron_retool.__main__ import main
from megatron_retool.reports import run_page
from megatron_retool.reports.run import draw_plots
from megatron_retool.reports.run_page import write_report
from tests.viewer.two_runs import ROWS, make_run


def exported(page):
    block = page.read_text().partition('id="exported">')[2].partition("</script>")[0]
    return json.loads(block)


def test_the_report_is_the_page_of_the_run_under_its_summary(tmp_path):
    run_dir = make_run(tmp_path / "run")
    report = write_report(run_dir, "accuracy: <0.5>\nsteps: 2, median: 1 s")
    page = report.page
    assert not [problem for problem in report.problems if "tokenizer" not in problem]  # the run has none
    text = page.read_text()
    assert page == run_dir / "report" / "index.html" and '<th scope="row">accuracy</th><td>&lt;0.5&gt;</td>' in text
    assert '<th scope="row">steps</th><td>2, median: 1 s</td>' in text and "<pre" not in text.partition("<main")[0]
    answers = exported(page)
    (metrics,) = [answer for path, answer in answers.items() if path.endswith("/metrics")]
    assert metrics["metrics"]["rollout/acc/mean"] == [row.get("rollout/acc/mean") for row in ROWS]
    assert any(path.endswith("/steps/2/7/1") for path in answers)
    assert (page.parent / "plots.html").is_file() and (page.parent / "accuracy.png").stat().st_size > 5000


def test_a_run_that_cannot_be_exported_has_its_plots(tmp_path, monkeypatch):
    run_dir = make_run(tmp_path / "run")
    (run_dir / "config.yaml").unlink()
    drawn = []
    monkeypatch.setattr(run_page, "draw_plots", lambda directory: drawn.append(directory) or draw_plots(directory))
    made = write_report(run_dir, "summary")
    text = made.page.read_text()
    assert len(drawn) == 1, "drawing takes longer than everything else"
    assert "could not be made" in text and "could not be made" in made.problems[0] and 'src="accuracy.png"' in text


def test_the_command_writes_the_summary_too(tmp_path):
    run_dir = make_run(tmp_path / "run")
    assert main(["report", str(run_dir)]) == 0
    assert "step 2" in (run_dir / "report" / "index.html").read_text().partition("<main")[0].rpartition("summary")[2]
