"""Where the seconds of steps went: phases of every step, and one step's responses with their tool calls.

What a run's files do not have is named in ``lacks``; nothing is made up for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from run_files import METRICS_FILE
from run_files.parquet_files import list_groups, read_parquet
from run_files.phases import Phase
from run_files.steps import keys_of, step_path
from run_viewer.curves import number_or_none, read_curves
from run_viewer.row_names import response_name
from untrusted import load_own_json
from untrusted.errors import InputError

ORDER = (
    Phase.GENERATION, Phase.PHASE_SWITCH, Phase.OLD_LOG_PROB, Phase.REFERENCE, Phase.VALUES, Phase.ADVANTAGE,
    Phase.UPDATE_ACTOR, Phase.UPDATE_CRITIC, Phase.WEIGHT_SYNC,
)  # fmt: skip
"""A step's phases in the order in which they begin. Actor's and critic's updates run side by side."""
AFTER = (Phase.QUICK_VALIDATION, Phase.VALIDATION, Phase.SAVE_CHECKPOINT)
WITHIN = {Phase.REWARD: Phase.GENERATION}
_NO_TIMES = (
    "there is no {name}: when each phase began and the seconds of single learner ranks were not "
    "stored, and phases stand in the order of the loop"
)


def time_page(run_dir: Path) -> dict[str, Any]:
    """``/api/runs/R/time``: seconds of each phase over the steps; "step" is the whole up to the weight sync.

    Raises:
        FileNotFoundError: there is no such directory.
    """
    curves = read_curves(run_dir)
    columns = {phase.value: curves.column(phase.metric) for phase in (Phase.STEP, *ORDER, *WITHIN, *AFTER)}
    phases = {name: column for name, column in columns.items() if any(value is not None for value in column)}
    return {"steps": list(curves.steps), "phases": phases, "problems": list(curves.problems)}


def step_time_page(run_dir: Path, step: int) -> dict[str, Any]:
    """``/api/runs/R/time/N``: a step's phases and the responses that were generated for it.

    ``spans`` are the phases as they began, ``ranks`` the seconds of the learner's and critic's ranks in their own part
    of the updates; both are empty where the run did not store them. Seconds of responses count from the first beginning
    that the step's file has. Those with ``start`` None are of a run that did not store it. ``waiting``, ``generation``
    and ``tools`` are sums over the response.

    Raises:
        FileNotFoundError: the step has neither metrics nor rollouts.
    """
    curves, lacks = read_curves(run_dir), list[str]()
    problems = list(curves.problems)
    row = next((row for number, row in zip(curves.steps, curves.rows, strict=True) if number == step), None)
    folder = run_dir / "rollouts"
    path, times = step_path(folder, step), step_path(folder, step, "times")
    if row is None and not path.is_file():
        raise FileNotFoundError(f"{run_dir} has neither metrics nor rollouts of step {step}")
    if row is None:
        problems.append(f"{METRICS_FILE} has no row of step {step}")
    phases = []
    for phase in (Phase.STEP, *ORDER, *WITHIN, *AFTER):
        seconds = number_or_none((row or {}).get(phase.metric))
        if seconds is not None:
            within = WITHIN.get(phase, None if phase in (Phase.STEP, *AFTER) else Phase.STEP)
            phases.append({"name": phase.value, "start": None, "seconds": seconds, "within": within})
    responses: list[dict[str, Any]] = []
    if path.is_file():
        try:
            responses = _responses(path, lacks)
        except ValueError as error:
            problems.append(str(error))
    else:
        problems.append(f"{path} is not there: the step's responses were not stored, or were moved")
    spans, ranks = _times(times, problems)
    if not spans:
        lacks.insert(0, _NO_TIMES.format(name=times.name))
    ratio = number_or_none((row or {}).get("perf/slowest_rank_ratio"))
    return {
        "number": step,
        "phases": phases,
        "spans": spans,
        "ranks": ranks,
        "responses": responses,
        "slowest_rank_ratio": ratio,
        "lacks": lacks,
        "problems": problems,
    }


def _times(path: Path, problems: list[str]) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    """Of each time that a phase ran its name, beginning and seconds; and the seconds of each rank by role."""
    if not path.is_file():
        return [], {}
    try:
        result = load_own_json(path.read_bytes())
        spans = [
            {"name": str(name), "start": float(start), "seconds": float(seconds)}
            for name, start, seconds in result["phases"]
        ]
        return spans, {str(role): [float(one) for one in seconds] for role, seconds in result["ranks"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        problems.append(f"{path} is damaged: {error}")
        return [], {}


def _responses(path: Path, lacks: list[str]) -> list[dict[str, Any]]:
    table = read_parquet(path, ["group_id", "index", "finish_reason", "tool_calls"], ["segment", "timing"])
    tokens = [
        (int(end - start), int((turn_ids[start:end] >= 0).sum()))
        for columns in list_groups(path, ["turn_ids"])
        for offsets, turn_ids in columns.values()
        for start, end in zip(offsets[:-1], offsets[1:], strict=True)
    ]
    result: list[dict[str, Any]] = []
    for place, ((group_id, *rest), row) in enumerate(zip(keys_of(table, path), table.to_pylist(), strict=True)):
        timing = _parsed(row.get("timing"), dict, path, place) or {}
        calls = _parsed(row["tool_calls"], list, path, place) or []
        result.append(
            {
                "group": group_id,
                "index": response_name(*rest),
                "finish_reason": row["finish_reason"],
                "tokens": tokens[place][0],
                "sampled": tokens[place][1],
                "start": timing.get("started"),
                "end": timing.get("ended"),
                "engine": timing.get("engine"),
                **{name: timing.get(name) for name in ("generation", "tools", "waiting")},
                "calls": [
                    {key: call.get(key) for key in ("name", "status", "seconds", "position")}
                    | {"start": call.get("started")}
                    for call in calls
                ],
            }
        )
    _say_what_lacks(result, path, lacks)
    begins = [response["start"] for response in result if response["start"] is not None]
    if begins:
        origin = min(begins)
        every_call: list[dict[str, Any]] = [call for response in result for call in response["calls"]]
        for timed in (*result, *every_call):
            for key in ("start", "end"):
                if timed.get(key) is not None:
                    timed[key] -= origin
    return result


def _say_what_lacks(found: list[dict[str, Any]], path: Path, lacks: list[str]) -> None:
    of = len(found)
    for keys, said in (
        (("generation",), "seconds of generation, tools and waiting"),
        (("start", "end"), "when they began and ended"),
        (("engine",), "which engine served them"),
    ):
        without = sum(any(response[key] is None for key in keys) for response in found)
        if without:
            lacks.append(f"{path.name}: {without} of {of} responses do not have {said}: older runs did not store it")


def _parsed(text: str | None, kind: type, path: Path, place: int) -> Any:
    if text is None:
        return None
    try:
        result = load_own_json(text)
    except ValueError as error:
        raise InputError(f"{path}, row {place}: {error}") from error
    items = result if isinstance(result, list) else [result]
    if not isinstance(result, kind) or not all(isinstance(item, dict) for item in items):
        raise InputError(f"{path}, row {place}: expected a JSON {kind.__name__}, found {text[:60]!r}")
    return result
