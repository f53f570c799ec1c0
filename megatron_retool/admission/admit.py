"""The whole of an admission: which models, every check, and what it found."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conversion.model.architecture import Architecture
from conversion.model.block_fp8 import full_precision
from conversion.model.family import find_family, known_to_transformers
from conversion.model.hf_config import UnsupportedArchitecture, check_quantised_beside
from megatron_retool.admission import parity, single_checks
from megatron_retool.admission.engine_checks import engine_checks
from megatron_retool.admission.layouts import FEW, NAMED, Case, cases, process_groups
from megatron_retool.admission.missing_parts import known_parts, missing_parts
from megatron_retool.admission.outcome import Admission, Check, Verdict, judged
from megatron_retool.admission.ranks import run_ranks
from megatron_retool.admission.shrink import shrunk
from megatron_retool.admission.tiny_model import random_model, save_model, stored_weights, without_memory
from megatron_retool.planning.models import MODELS, model_of_each_family

_WHOLE = ("qwen3", "qwen3_moe")
"""Families that stand for the dense ones and those of experts: in every named layout, where a few do for the rest."""
_SAVER, _LOADER = "tp2 sp", "pp2"
_START_SECONDS, _TASK_SECONDS = 300.0, 60.0
"""After which a group of processes is given up, on a machine that others use too."""
_SAVING, _RESHARDING = "saved by tp2 sp", "saved by tp2 sp, loaded by pp2"


class NotAdmissible(ValueError):
    """No family covers the model. The message names the part that is missing."""


@dataclass(frozen=True)
class Request:
    """A model to examine.

    Attributes:
        name: what to call it.
        hf_config: config.json.
        source: its directory, where there is one: for the tokenizer.
        families: of model.families.
        layers: that the shrunk model has. Rounding errors grow with them: with gated delta nets, eight lose digits that
            are compared.
        names: of the layouts; None: all of these, and every product.
    """

    name: str
    hf_config: Mapping[str, Any]
    source: Path | None = None
    families: tuple[str, ...] = ()
    layers: int = 4
    names: tuple[str, ...] | None = FEW


@dataclass(frozen=True)
class _Job:
    """A request with its shrunk model on disk, for processes of a layout."""

    request: Request
    directory: Path
    architecture: Architecture
    cases: tuple[Case, ...]


def one_of_each_family() -> list[Request]:
    """A published model of every built-in family."""
    found = []
    for family, name in model_of_each_family().items():
        # Eight layers: virtual pipelines have a use for them.
        more: dict[str, Any] = {"layers": 8, "names": NAMED} if family in _WHOLE else {}
        found.append(Request(name, MODELS[name], **more))
    return found


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
    architectures = [_architecture(request) for request in requests]
    jobs, found = [], list[list[Check]]()
    for number, (request, architecture) in enumerate(zip(requests, architectures, strict=True)):
        on_progress(f"{request.name}: transformers")
        place = directory / f"{number}_{architecture.family}"
        jobs.append(_Job(request, place, architecture, tuple(cases(architecture, request.names))))
        found.append(_alone(jobs[-1]))
    layouts = _layouts(jobs, directory, on_progress)
    if engine:
        on_progress("SGLang")
    models = [(job.directory, job.architecture) for job in jobs]
    for answers in (layouts, engine_checks(models, directory / "engine", wanted=engine)):
        for checks, more in zip(found, answers, strict=True):
            checks += more
    return [
        Admission(job.architecture.family, job.request.name, dict(_shrunk(job.request)), tuple(checks))
        for job, checks in zip(jobs, found, strict=True)
    ]


def _shrunk(request: Request) -> dict[str, Any]:
    return known_to_transformers(shrunk(full_precision(request.hf_config), request.layers), request.families)


def _architecture(request: Request) -> Architecture:
    """Of the shrunk model.

    Raises:
        NotAdmissible: naming the missing part.
    """
    try:
        Architecture.from_hf_config(full_precision(request.hf_config), request.families)
        return Architecture.from_hf_config(_shrunk(request), request.families)
    except UnsupportedArchitecture as error:
        raise NotAdmissible(f"{request.name}: {error}{_advice(request)}") from None


def _advice(request: Request) -> str:
    """What the model has that no family of ours has, as a sentence to append; empty where its family refuses a key."""
    with contextlib.suppress(UnsupportedArchitecture):
        find_family(str(request.hf_config.get("model_type")), request.families)
        return ""
    names = _tensor_names(request)
    missing = missing_parts(request.hf_config, names)
    if missing:
        return f". Missing parts: {'; '.join(missing)}"
    if not names:
        return ". transformers builds no model of this config.json, so its parts are not known: see docs/extending.md"
    parts = ", ".join(f"*{part}" for part in known_parts(names))
    return f". Every part that its tensors show is there ({parts}): declare the family, see docs/extending.md"


def _tensor_names(request: Request) -> list[str]:
    try:
        return list(stored_weights(without_memory(_shrunk(request))))
    except Exception:  # transformers has not this model type either, or builds it from other keys
        return []


def _alone(job: _Job) -> list[Check]:
    """The checks of one process, which leave the job's directory ready for the others."""
    model = random_model(_shrunk(job.request))
    save_model(model, job.directory)
    architecture = job.architecture
    checks = [
        _guarded("weights", "names and shapes", single_checks.tensor_names, architecture, job.directory),
        _guarded("weights", "round trip", single_checks.round_trip, architecture, job.directory, job.request.families),
        _guarded("planner", "parameters", single_checks.planned_parameters, architecture, model),
        _guarded("planner", "FLOPs", single_checks.planned_flops, architecture, model),
        *single_checks.chat_template(job.request.source),
    ]
    parity.write_reference(model, architecture, job.directory)
    return checks


def _guarded(kind: str, name: str, check: Callable[..., Check], *arguments: Any) -> Check:
    try:
        return check(*arguments)
    except Exception as error:
        return Check(kind, name, Verdict.FAIL, f"{type(error).__name__}: {error}")


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
                found = parity.save_checkpoint(by_name[_SAVER], job.directory, job.request.families)
            elif name == _RESHARDING:
                found = parity.load_checkpoint(by_name[_LOADER], job.directory, job.request.families)
            else:
                found = parity.compare(by_name[name], job.directory, job.request.families)
            answers[number, name] = found
        except Exception:
            if by_name.get(name) is None or by_name[name].world > 1:
                raise  # the other ranks wait
            answers[number, name] = _last_line(traceback.format_exc())
    return answers


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), text)


def _verdicts(number: int, job: _Job, answers: Mapping[_Task, Any]) -> list[Check]:
    checks = [
        Check("layout", case.name, Verdict.NOT_APPLICABLE, case.inapplicable)
        if case.inapplicable
        else _verdict("layout", case.name, answers[number, case.name])
        for case in job.cases
    ]
    kind, name = "checkpoint", _RESHARDING
    if (number, name) in answers:
        saved = answers[number, _SAVING]
        checks.append(_verdict(kind, name, answers[number, name] if isinstance(saved, dict) else saved))
    else:
        checks.append(Check(kind, name, Verdict.NOT_APPLICABLE, "these layouts were not asked for"))
    if job.architecture.is_moe:
        replay: dict[str, float] = {}
        for case in job.cases:
            answer = answers.get((number, case.name))
            for key, value in answer.items() if isinstance(answer, dict) else ():
                if key.startswith("replay: "):
                    replay[key] = max(value, replay.get(key, 0.0))
        verdict = judged("replay", "routing replay", replay, parity.too_far(replay))
        checks.append(verdict if replay else Check("replay", "routing replay", Verdict.FAIL, "no layout replayed"))
    else:
        checks.append(Check("replay", "routing replay", Verdict.NOT_APPLICABLE, "no experts"))
    return checks


def _verdict(kind: str, name: str, answer: Any) -> Check:
    if not isinstance(answer, dict):
        return Check(kind, name, Verdict.FAIL, str(answer))
    return judged(kind, name, answer, parity.too_far(answer))


def read_config(model: str) -> tuple[Mapping[str, Any], Path | None]:
    """config.json of a directory, of a file, or of a published model that ``planning.models`` knows; and the directory.

    Raises:
        NotAdmissible: there is none, or it is no JSON object.
    """
    path = Path(model)
    if model.lower() in MODELS:
        return MODELS[model.lower()], None
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotAdmissible(
            f"{model}: no directory with a config.json, no such file, and no published model that is known here"
        ) from None
    except (ValueError, RecursionError, UnicodeDecodeError) as error:
        raise NotAdmissible(f"{file} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise NotAdmissible(f"{file} holds a {type(found).__name__}, where a mapping with model_type, … is expected")
    directory = path if path.is_dir() else path.parent
    try:
        check_quantised_beside(directory, found)
    except UnsupportedArchitecture as error:
        raise NotAdmissible(str(error)) from None
    return found, directory
