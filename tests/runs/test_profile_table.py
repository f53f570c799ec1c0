"""The tables of a profiled step: shares, order, and what is said where there is nothing."""

from __future__ import annotations

import io

from rich.console import Console

from megatron_retool.runs.profile_table import OperatorTime, RankProfile, profile_page, short_table
from run_files.phases import Phase

OPERATORS = [OperatorTime("aten::add", 9, 100.0), OperatorTime("aten::mm", 2, 300.0), OperatorTime("a|b", 1, 0.0)]
SECONDS = {Phase.GENERATION: 1.5, Phase.UPDATE_ACTOR: 0.5, Phase.STEP: 2.0}


def test_page_has_the_phases_of_the_step_and_the_longest_operators_of_each_rank() -> None:
    ranks = [
        RankProfile(
            "learner rank 0", "step_000005_rank0.json.gz", {"old_log_prob": 0.1, "update_actor": 0.3}, OPERATORS
        ),
        RankProfile("learner rank 1", problem="it was not written: no room"),
    ]
    lines = profile_page(5, SECONDS, ranks, top=2).splitlines()
    assert lines[0] == "# Step 5" and "| gen | 1.500 | 75.0 % |" in lines and "| step |" not in " ".join(lines)
    assert "| update_actor | 0.300 | 75.0 % |" in lines and "Trace: `step_000005_rank0.json.gz`" in lines
    rows = [line for line in lines if line.startswith("| `")]
    assert rows == ["| `aten::mm` | 2 | 0.300 | 75.0 % |", "| `aten::add` | 9 | 0.100 | 25.0 % |"]
    assert "No trace: it was not written: no room" in lines


def test_time_on_the_device_decides_where_there_is_any() -> None:
    profile = RankProfile(
        "learner rank 0", operators=[OperatorTime("launch", 1, 900.0), OperatorTime("k", 1, 1.0, 50.0)]
    )
    device, operators = profile.top(1)
    assert device == "CUDA" and [each.name for each in operators] == ["k"]
    assert "| `k` | 1 | 0.001 | 0.1 % | 0.050 | 100.0 % |" in profile_page(1, {}, [profile], top=1).splitlines()
    assert RankProfile("x", operators=OPERATORS).top(1) == ("CPU", [OPERATORS[1]])


def test_console_shows_the_gist() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(short_table(5, [RankProfile("learner rank 0", "t", {"update_actor": 0.3}, OPERATORS)]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "profile of step 5" in text and "update_actor 0.30 s 100.0 %" in text and "aten::mm 0.3 ms CPU" in text
