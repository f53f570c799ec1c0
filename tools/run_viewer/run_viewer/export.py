"""The page in one file that opens without a server: its modules, Plotly, and the answers of chosen steps as JSON.

A browser does not load modules beside a file that was opened from the disk. So each module becomes a data: URL in an
import map, and its imports name the others without "./", which a data: URL would have no place for. The answers are
those of the server, by path; api.js takes them from the file.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from run_files.atomic_files import atomic_write
from run_files.parquet_files import UnreadableFile
from run_files.steps import stored_steps
from run_viewer.curves import curves_page, read_curves
from run_viewer.run_directories import ALONE, run_directory, runs_below
from run_viewer.runs_table import run_page, runs_page
from run_viewer.server import PAGE, plotly_file
from run_viewer.step_pages import response_page, step_page
from run_viewer.timeline import step_time_page, time_page
from run_viewer.tokenizers import Tokenizers

MOST_TOKENS = 200_000
"""Response tokens in a file, about 150 bytes each; responses past them are only in the lists of their steps."""


@dataclass(frozen=True)
class Exported:
    """
    Attributes:
        size: bytes of the file.
        left_out: responses of the steps that are not in it.
        problems: sentences about files of the runs that are damaged; what they would show is not in it.
    """

    size: int
    responses: int
    left_out: int
    problems: Sequence[str]


def export(
    root: Path, file: Path, steps: Sequence[int] = (), most_tokens: int = MOST_TOKENS, summary: str = ""
) -> Exported:
    """Write the runs in ``root`` and, of each, the responses of ``steps`` that it has stored.

    Args:
        steps: none: of a single run its newest, of several runs no step.
        summary: lines of "name: value", a table above the page.

    Raises:
        FileNotFoundError: ``root`` holds no run, or none of its runs has one of ``steps``.
    """
    names = runs_below(root)
    if not names:
        raise FileNotFoundError(f"{root} holds no run: a run is a folder with a config.yaml")
    answers: dict[str, Any] = {"runs": runs_page(root)}
    room = _Room(most_tokens)
    tokenizers = Tokenizers()
    for name in names:
        run_dir = run_directory(root, name)
        base = f"runs/{ALONE if name == '.' else quote(name, safe=_UNESCAPED)}"
        stored = stored_steps(run_dir / "rollouts")
        wanted = [step for step in stored if step in steps] or (stored[-1:] if not steps and len(names) == 1 else [])
        page = run_page(run_dir, name)
        answers[base] = page | {"steps": wanted, "links": []}
        answers[f"{base}/metrics"] = curves_page(run_dir, read_curves(run_dir).names)
        answers[f"{base}/time"] = time_page(run_dir)
        decode, problem = tokenizers.of_run(run_dir)
        for step in wanted:
            _add_step(answers, base, run_dir, step, decode, problem, room)
    if steps and not any("/steps/" in path for path in answers):
        raise FileNotFoundError(f"no run in {root} has stored step {', '.join(map(str, steps))}")
    file.parent.mkdir(parents=True, exist_ok=True)
    text = page_text(answers, summary)
    with atomic_write(file) as handle:
        handle.write(text.encode())
    pages = [answer for answer in answers.values() if "problems" in answer]
    problems = dict.fromkeys(problem for page in pages for problem in page["problems"])
    return Exported(len(text.encode()), room.taken, room.left_out, list(problems))


_UNESCAPED = "!'()*-._~"
"""What encodeURIComponent leaves as it is, beside letters and digits."""


@dataclass
class _Room:
    tokens: int
    taken: int = 0
    left_out: int = 0


def _add_step(
    answers: dict[str, Any], base: str, run_dir: Path, step: int, decode: Any, problem: str, room: _Room
) -> None:
    try:
        page = step_page(run_dir, step)
    except UnreadableFile as error:
        answers[base]["problems"].append(str(error))
        return
    answers[f"{base}/steps/{step}"] = page
    answers[f"{base}/time/{step}"] = step_time_page(run_dir, step)
    for group in page["groups"]:
        for response in group["responses"]:
            if response["tokens"] > room.tokens:
                room.left_out += 1
                continue
            key = f"{base}/steps/{step}/{group['group_id']}/{response['index']}"
            name = str(response["index"])
            answers[key] = response_page(run_dir, step, group["group_id"], name, decode, problem)
            room.tokens -= response["tokens"]
            room.taken += 1


def page_text(answers: dict[str, Any], summary: str = "") -> str:
    """The whole file. No text of a run can end the block that it lies in: "<" is written as an escape."""
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    data = json.dumps(answers, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    modules = {path.name: _module(path) for path in sorted(PAGE.glob("*.js"))}
    head = [
        f"<style>\n{(PAGE / 'style.css').read_text(encoding='utf-8')}</style>",
        f'<script type="application/json" id="exported">{data}</script>',
        f"<script>{plotly_file().read_text(encoding='utf-8').replace('</script', '<' + chr(92) + '/script')}</script>",
        f'<script type="importmap">{json.dumps({"imports": modules})}</script>',
        '<script type="module">import "app.js";</script>',
    ]
    page = re.sub(r"(?m)^<(?:link rel=\"stylesheet\"|script ).*\n", "", page)
    page = page.replace("</head>", "\n".join(head) + "\n</head>")
    if summary:
        page = page.replace("<main", f"{_summary_table(summary)}\n<main", 1)
    return page


def _summary_table(summary: str) -> str:
    """Lines of the form "name: value" as a table of two columns."""
    lines = [map(html.escape, line.partition(": ")[::2]) for line in summary.splitlines() if line.strip()]
    rows = "".join(f'<tr><th scope="row">{name}</th><td>{value}</td></tr>' for name, value in lines)
    return f'<section id="summary" class="scroll"><table aria-label="summary">{rows}</table></section>'


def _module(path: Path) -> str:
    source = re.sub(r"(from \"|import\(`|import \")\./", r"\1", path.read_text(encoding="utf-8"))
    return "data:text/javascript;base64," + base64.b64encode(source.encode()).decode()
