"""POST /run_jupyter: cells with one state, what they display, what ends them, and what a hostile one may claim."""

from __future__ import annotations

import base64
import json
import os
from typing import Any

import pytest
from sandboxes import Sandbox, start

from code_interpreter.jupyter import read_cells
from code_interpreter.streams import Streams


def statuses(answer: dict[str, Any]) -> list[str]:
    return [cell["status"] for cell in answer["cells"]]


def test_cells_share_their_state_and_errors_end_one_cell_alone(sandbox: Sandbox) -> None:
    answer = sandbox.notebook(
        "word = 'hello'",
        "word",
        "print(word)\nimport sys\nn = sys.stderr.write('low')",
        "1 / 0",
        "x = (",
        "print(word)",
        files={"in.txt": base64.b64encode(b"given").decode()},
    )
    assert (answer["status"], answer["message"], answer["outcome"]) == ("Success", "", "finished")
    assert answer.keys() >= {"status", "message", "driver", "cells", "executor_pod_name", "files"}
    assert (answer["driver"]["status"], answer["driver"]["return_code"]) == ("Finished", 0)
    assert statuses(answer) == ["ok", "ok", "ok", "error", "error", "ok"]
    cells = answer["cells"]
    assert [cell["stdout"] for cell in cells] == ["", "", "hello\n", "", "", "hello\n"]
    assert cells[1]["display"] == [{"text/plain": "'hello'"}] and cells[2]["stderr"] == "low"
    (error,) = cells[3]["error"]
    assert (error["ename"], error["evalue"]) == ("ZeroDivisionError", "division by zero")
    assert any("1 / 0" in line or "/" in line for line in error["traceback"])
    (unfinished,) = cells[4]["error"]
    assert unfinished["ename"] == "SyntaxError" and "_IncompleteInputError" not in str(unfinished)
    assert all(cell["execution_time"] >= 0 for cell in cells)


def test_displays_files_and_commands(sandbox: Sandbox) -> None:
    answer = sandbox.notebook(
        "class Bold:\n    def _repr_html_(self): return '<b>x</b>'\n    def __repr__(self): return 'bold'",
        "display(Bold())\nprint('between')\nBold()",
        "_; 5",
        "None",
        "7;",
        "!echo from the shell; cat in.txt",
        "open('out.txt', 'w').write('kept');",
        files={"in.txt": base64.b64encode(b"given").decode()},
        fetch_files=["out.txt"],
    )
    cells = answer["cells"]
    assert cells[1]["display"] == [{"text/plain": "bold", "text/html": "<b>x</b>"}] * 2
    assert [cell["display"] for cell in cells[2:5]] == [[{"text/plain": "5"}], [], []]
    assert cells[5]["stdout"] == "from the shell\ngiven"
    assert base64.b64decode(answer["files"]["out.txt"]) == b"kept"


def test_figures_are_displayed_as_png(sandbox: Sandbox) -> None:
    answer = sandbox.notebook(
        "import matplotlib.pyplot as plt",
        "lines = plt.plot([1, 2])\nplt.show()",
        "plt.plot([2, 1])",
        "1",
    )
    shown = [[sorted(data) for data in cell["display"]] for cell in answer["cells"]]
    figure = ["image/png", "text/plain"]
    assert shown == [[], [figure], [["text/plain"], figure], [["text/plain"]]], answer
    assert base64.b64decode(answer["cells"][1]["display"][0]["image/png"]).startswith(b"\x89PNG")


def test_figures_with_matplotlib_imported_beforehand() -> None:
    running = start(workers=1, preimport=["matplotlib.pyplot"])
    try:
        answer = running.notebook("import matplotlib.pyplot as plt\nlines = plt.plot([1, 2])")
        assert [sorted(data) for data in answer["cells"][0]["display"]] == [["image/png", "text/plain"]], answer
        code = "import matplotlib.pyplot as plt\nplt.plot([1])\nprint(plt.get_backend().lower())"
        assert running.run(code).stdout == "agg\n"
    finally:
        running.process.stop()


def test_time_limits(sandbox: Sandbox) -> None:
    answer = sandbox.notebook("while True:\n    try: pass\n    except Exception: pass", "print(1)", cell_timeout=0.5)
    assert (answer["status"], statuses(answer)) == ("Success", ["timeout", "ok"]), answer
    assert answer["cells"][0]["error"][0]["evalue"] == "the cell ran longer than 0.5 s"
    stuck = sandbox.notebook("print(1)", "sum(range(10**18))", "print(2)", cell_timeout=0.5)
    assert (stuck["status"], stuck["driver"]["status"]) == ("Failed", "TimeLimitExceeded"), stuck
    assert statuses(stuck) == ["ok", "unfinished", "not_run"]
    total = sandbox.notebook("print('kept', flush=True)\nimport time; time.sleep(99)", "2", total_timeout=8)
    assert (total["status"], total["outcome"]) == ("Failed", "time_limit_exceeded")
    assert statuses(total) == ["unfinished", "not_run"] and total["cells"][0]["stdout"] == "kept\n"


def test_ends_of_the_process(sandbox: Sandbox) -> None:
    died = sandbox.notebook("print(1)", "import os; os._exit(4)", "print(2)")
    assert (died["status"], died["driver"]["status"], died["driver"]["return_code"]) == ("Failed", "Finished", 4)
    assert statuses(died) == ["ok", "unfinished", "not_run"]
    left = sandbox.notebook("import os\npid = os.fork()", "print('x')\nexit()", "print(2)")
    assert statuses(left) == ["ok", "ok", "not_run"] and left["cells"][1]["stdout"] == "x\n"


def test_long_output_of_a_cell_loses_its_middle(sandbox: Sandbox) -> None:
    answer = sandbox.notebook("print('a' * 3_000_000)", "print('end')")
    assert answer["truncated"] and "bytes left out" in answer["cells"][0]["stdout"]
    assert answer["cells"][1]["stdout"] == "end\n"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"cells": "print(1)"}, "cells"),
        ({"cells": [1]}, "cells"),
        ({"cells": ["1"] * 2000}, "cells"),
        ({"kernel": "julia"}, "kernel"),
        ({"total_timeout": 0}, "total_timeout"),
        ({"cell_timeout": -1}, "cell_timeout"),
        ({"files": {"/etc/x": "YQ=="}}, "files"),
    ],
)
def test_bad_requests_name_the_field(sandbox: Sandbox, fields: dict, named: str) -> None:
    status, body = sandbox.post({"cells": ["1"], **fields}, "/run_jupyter")
    assert (status, body["outcome"], body["status"], body["cells"]) == (422, "invalid_request", "SandboxError", [])
    assert body["message"].startswith(named)


def read(records: list[Any], stdout: bytes = b"", count: int = 2) -> Any:
    """What the server makes of these records."""
    streams = Streams.open({}, {}, b"", records=True)
    try:
        os.write(streams.stdout, stdout)
        lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in records]
        os.write(streams.records, b"\n".join(lines))
        return read_cells(streams, count, 100, 3.0)
    finally:
        streams.close()


def test_records_are_not_believed() -> None:
    mark = {"at": 1.0, "stdout": 0, "stderr": 0}
    cells, position, _ = read(
        [
            b"\xff\xfe",
            b"[" * 100_000,
            b"[1, 2]",
            {"display": {"text/plain": "before any cell"}},
            {"start": 1, **mark},
            {"start": 0, **mark, "stdout": -5},
            {"start": 0, **mark},
            b'{"display": {"application/json": [NaN, 1e999]}}',
            {"display": "text"},
            {"end": "splendid", **mark},
            {"end": "ok", "at": float("1e300"), "stdout": 10**30, "stderr": None},
            {"start": 7, **mark},
            {"start": 1, "at": "soon", "stdout": 2},
            {"end": "error", "at": 2.5, "stdout": 1},
        ],
        b"hello",
    )
    assert [cell.status for cell in cells] == ["ok", "error"] and position == (5, 0)
    assert cells[0].stdout == "hello" and cells[0].seconds == 0 and cells[1].stdout == ""
    assert cells[0].display == ({"application/json": ["NaN", "1e999"]},)
    json.dumps(cells[0].display, allow_nan=False)


def test_records_without_end_are_not_read() -> None:
    start = {"start": 0, "at": 0.0}
    cells, _, _ = read([start, *[b""] * 1_000_000, {"end": "ok"}])
    assert [cell.status for cell in cells] == ["unfinished", "not_run"]
