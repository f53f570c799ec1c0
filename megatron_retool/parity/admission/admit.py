"""The whole of an admission: every check, and what it found."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conversion.model.architecture import Architecture
from megatron_retool.parity.admission import comparison, single_checks
from megatron_retool.parity.admission.engine_checks import engine_checks
from megatron_retool.parity.admission.layouts import Case, cases, process_groups
from megatron_retool.parity.admission.outcome import Admission, AdmissionVerdict, Check, judged
from megatron_retool.parity.admission.requests import Request, architecture_of, shrunk_config
from megatron_retool.parity.admission.tiny_model import random_model, save_model
from megatron_retool.parity.ranks import run_ranks

_SAVER, _LOADER = "tp2 sp", "pp2"
_START_SECONDS, _TASK_SECONDS = 300.0, 60.0
"""After which a group of processes is given up, on a machine that others use too."""
_SAVING, _RESHARDING = "saved by tp2 sp", "saved by tp2 sp, loaded by pp2"


@dataclass(frozen=True)
class _Job:
    """A request with its shrunk model on disk, for processes of a layout."""

    request: Request
    directory: Path
    architecture: Architecture
    cases: tuple[Case, ...]


def examine(
    requests: Sequence[Request],
    directory: Path,
    *,
    engine: bool = True,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[Admission]:
    """Every check of every request.

    Args:
        directory: for models, references and checkpoints.
        engine: also load the weights into SGLang's classes, and compute with them.
        on_progress: called with what comes next.

    Raises:
        NotAdmissible: before anything is computed, where a request's model is of no family, or its family refuses it.
    """
    architectures = [architecture_of(request) for request in requests]
    jobs, result = [], list[list[Check]]()
    for number, (request, architecture) in enumerate(zip(requests, architectures, strict=True)):
        on_progress(f"{request.name}: transformers")
        place = directory / f"{number}_{architecture.family}"
        jobs.append(_Job(request, place, architecture, tuple(cases(architecture, request.names))))
        result.append(_alone(jobs[-1]))
    layouts = _layouts(jobs, directory, on_progress)
    if engine:
        on_progress("SGLang")
    models = [(job.directory, job.architecture) for job in jobs]
    for answers in (layouts, engine_checks(models, directory / "engine", wanted=engine)):
        for checks, more in zip(result, answers, strict=True):
            checks += more
    return [
        Admission(job.architecture.family, job.request.name, dict(shrunk_config(job.request)), tuple(checks))
        for job, checks in zip(jobs, result, strict=True)
    ]


def _alone(job: _Job) -> list[Check]:
    """The checks of one process, which leave the job's directory ready for the others."""
    model = random_model(shrunk_config(job.request))
    save_model(model, job.directory)
    architecture = job.architecture
    checks = [
        _guarded("weights", "names and shapes", single_checks.tensor_names, architecture, job.directory),
        _guarded("weights", "round trip", single_checks.round_trip, architecture, job.directory, job.request.families),
        _guarded("planner", "parameters", single_checks.planned_parameters, architecture, model),
        _guarded("planner", "FLOPs", single_checks.planned_flops, architecture, model),
        *single_checks.chat_template(job.request.source),
    ]
    comparison.write_reference(model, architecture, job.directory)
    return checks


def _guarded(kind: str, name: str, check: Callable[..., Check], *arguments: Any) -> Check:
    try:
        return check(*arguments)
    except Exception as error:
        return Check(kind, name, AdmissionVerdict.FAIL, f"{type(error).__name__}: {error}")


# --- processes of a layout --------------------------------------------------------------------------------------------

_Task = tuple[int, str]
"""Number of a job, and name of one of its cases, ``_SAVING`` or ``_RESHARDING``."""


def _layouts(jobs: Sequence[_Job], directory: Path, on_progress: Callable[[str], None]) -> list[list[Check]]:
    wanted: list[tuple[Case, int, str]] = []
    loaders = set()
    for number, job in enumerate(jobs):
        applicable = {case.name: case for case in job.cases if not case.inapplicable}
        wanted += [(case, number, name) for name, case in applicable.items()]
        if {_SAVER, _LOADER} <= applicable.keys():
            wanted += [(applicable[_SAVER], number, _SAVING), (applicable[_LOADER], number, _RESHARDING)]
            loaders.add(process_groups(applicable[_LOADER]))
    tasks: dict[int, list[_Task]] = {}

    def place(task: tuple[Case, int, str]) -> tuple[bool, str]:
        """Process groups one after another; last those that load, when all is saved."""
        groups = process_groups(task[0])
        return groups in loaders, groups

    for case, number, name in sorted(wanted, key=place):
        tasks.setdefault(case.world, []).append((number, name))
    answers: dict[_Task, Any] = {}
    for world, todo in sorted(tasks.items()):
        on_progress(f"layouts of {world} process{'es' if world > 1 else ''}")
        answers |= _run(world, list(jobs), todo, directory / f"world{world}")
    return [_verdicts(number, job, answers) for number, job in enumerate(jobs)]


def _run(world: int, jobs: list[_Job], tasks: list[_Task], directory: Path) -> dict[_Task, Any]:
    """Figures, or a text that says what went wrong, of each task.

    All in one group of processes, which costs more to start than a task does. A rank that fails takes the group along:
    then each task gets a group of its own.
    """
    try:
        answers: dict[_Task, Any] = run_ranks(
            _in_rank, world, directory / "all", jobs, tasks, timeout=_START_SECONDS + _TASK_SECONDS * len(tasks)
        )
        return answers
    except RuntimeError as error:
        if len(tasks) == 1:
            return {tasks[0]: _last_line(str(error))}
    return {
        task: answer
        for number, task in enumerate(tasks)
        for answer in _run(world, jobs, [task], directory / str(number)).values()
    }


def _in_rank(jobs: list[_Job], tasks: list[_Task]) -> dict[_Task, Any]:
    answers: dict[_Task, Any] = {}
    for number, name in tasks:
        job = jobs[number]
        by_name = {case.name: case for case in job.cases}
        try:
            if name == _SAVING:
                result = comparison.save_checkpoint(by_name[_SAVER], job.directory, job.request.families)
            elif name == _RESHARDING:
                result = comparison.load_checkpoint(by_name[_LOADER], job.directory, job.request.families)
            else:
                result = comparison.compare(by_name[name], job.directory, job.request.families)
            answers[number, name] = result
        except Exception:
            if by_name.get(name) is None or by_name[name].world > 1:
                raise  # the other ranks wait
            answers[number, name] = _last_line(traceback.format_exc())
    return answers


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), text)


def _verdicts(number: int, job: _Job, answers: Mapping[_Task, Any]) -> list[Check]:
    checks = [
        Check("layout", case.name, AdmissionVerdict.NOT_APPLICABLE, case.inapplicable)
        if case.inapplicable
        else _verdict("layout", case.name, answers[number, case.name])
        for case in job.cases
    ]
    kind, name = "checkpoint", _RESHARDING
    if (number, name) in answers:
        saved = answers[number, _SAVING]
        checks.append(_verdict(kind, name, answers[number, name] if isinstance(saved, dict) else saved))
    else:
        checks.append(Check(kind, name, AdmissionVerdict.NOT_APPLICABLE, "these layouts were not asked for"))
    if job.architecture.is_moe:
        replay: dict[str, float] = {}
        for case in job.cases:
            answer = answers.get((number, case.name))
            for key, value in answer.items() if isinstance(answer, dict) else ():
                if key.startswith("replay: "):
                    replay[key] = max(value, replay.get(key, 0.0))
        verdict = judged("replay", "routing replay", replay, comparison.too_far(replay))
        checks.append(
            verdict if replay else Check("replay", "routing replay", AdmissionVerdict.FAIL, "no layout replayed")
        )
    else:
        checks.append(Check("replay", "routing replay", AdmissionVerdict.NOT_APPLICABLE, "no experts"))
    return checks


def _verdict(kind: str, name: str, answer: Any) -> Check:
    if not isinstance(answer, dict):
        return Check(kind, name, AdmissionVerdict.FAIL, str(answer))
    return judged(kind, name, answer, comparison.too_far(answer))
