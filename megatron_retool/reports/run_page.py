"""The report of a run: the viewer's page in one file, under a summary, for whoever was not there when it ran.

It answers what the model learnt, how long it took and what is odd, lets its reader look into the newest step's
responses, and needs neither this machine nor a server. The plots of ``reports/run.py`` lie beside it as PNG files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_retool.reports.problems import TABLE
from megatron_retool.reports.run import draw_plots
from run_files.atomic_files import write_text
from run_viewer.export import export

PAGE_NAME = "index.html"
MOST_TOKENS = 20_000
"""Response tokens in a report, some megabytes: it is sent by mail. ``megatron-retool view --export`` takes more."""


@dataclass(frozen=True)
class RunReport:
    """
    Attributes:
        page: index.html's path.
        problems: sentences about what is damaged in the run and so is not in the report.
    """

    page: Path
    problems: Sequence[str]


def write_report(run_dir: str | Path, summary: str = "") -> RunReport:
    """report/index.html and, beside it, plots.html with its PNG files and the table of problems.

    A run that cannot be exported, as one without config.yaml, has the plots in index.html too, which says why.

    Args:
        summary: lines of "name: value", a table above the page.

    Raises:
        FileNotFoundError: there is no such run, or it has no metrics; the message says which.
    """
    run_dir = Path(run_dir)
    drawn = draw_plots(run_dir)
    plots = drawn.write_page(summary)
    page = plots.with_name(PAGE_NAME)
    beside = [plots.name, *([TABLE] if (plots.parent / TABLE).is_file() else [])]
    text = "\n".join([summary, f"beside this file: {', '.join(beside)}"]).strip()
    problems = list(drawn.problems)
    try:
        problems += export(run_dir.resolve(), page, most_tokens=MOST_TOKENS, summary=text).problems
    except (OSError, ValueError) as error:  # a run's end must not fail for its report
        problems.append(f"the page of the whole run could not be made: {error}")
        drawn.write_page(f"{summary}\n\n{problems[-1]}".strip())
        write_text(page, plots.read_text(encoding="utf-8"))
    return RunReport(page, list(dict.fromkeys(problems)))
