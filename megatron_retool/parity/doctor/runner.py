"""A process for each step: what it finds, or how it ended, never touches the steps after it."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from megatron_retool.parity.doctor.catalogue import DoctorStep
from megatron_retool.parity.doctor.outcome import Skipped, StepFailed, StepOutcome, StepVerdict
from megatron_retool.parity.doctor.session import DoctorSession
from megatron_retool.scratch import current_scratch
from run_files.atomic_files import write_text
from untrusted.process_tree import descendants

LOG_LINES = 8
_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 10.0
_PRELOADED = ("megatron_retool.learner.learner", "megatron_retool.parity.doctor.model")
_GOES_ON = "; the end of its log:\n"


def run_steps(
    steps: Sequence[DoctorStep], session: DoctorSession, started: Callable[[DoctorStep], object]
) -> Iterator[StepOutcome]:
    """Run the steps one after another, each in a process of its own, which ends with this one.

    Args:
        started: told of each step before it runs.
    """
    # Steps end without goodbye: what their libraries leave of semaphores is removed without a word about it.
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"
    outcomes: dict[str, StepOutcome] = {}
    living: dict[str, BaseProcess] = {}
    names = {step.name for step in steps}
    try:
        for position, step in enumerate(steps):
            missing = [name for name in step.needs if name in names and outcomes[name].verdict is not StepVerdict.PASS]
            if missing:
                outcome = outcomes[step.name] = _without(step, outcomes[missing[0]])
                yield outcome
            else:
                started(step)
                outcome, process = run_step(step, session)
                if process is not None:
                    living[step.name] = process
                outcomes[step.name] = outcome
                yield outcome
            later = {name for each in steps[position + 1 :] for name in each.needs}
            for name in [name for name in living if name not in later]:
                _end(living.pop(name))
    finally:
        for process in living.values():
            _end(process)
        os.environ.pop("PYTHONWARNINGS")
        if before is not None:
            os.environ["PYTHONWARNINGS"] = before


def _without(step: DoctorStep, needed: StepOutcome) -> StepOutcome:
    how = f"was skipped: {needed.reason}" if needed.verdict is StepVerdict.SKIPPED else "failed"
    return StepOutcome(step.name, StepVerdict.SKIPPED, reason=f"needs {needed.step}, which {how}")


def run_step(step: DoctorStep, session: DoctorSession) -> tuple[StepOutcome, BaseProcess | None]:
    """Run one step.

    Returns:
        What became of it, and its process where that stays.
    """
    began = time.monotonic()
    answer, log = (session.directory / f"{step.name}.{kind}" for kind in ("json", "log"))
    answer.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    process: Any = _context(session.gpus).Process(target=_in_process, args=(step, session, answer, log))
    outcome = None
    try:
        process.start()
        deadline = began + step.timeout_seconds
        while not answer.exists() and time.monotonic() < deadline:
            if wait([process.sentinel], timeout=_POLL_SECONDS):
                break
        outcome = _outcome(step, answer, log, process)
        return _timed(outcome, began), process if step.stays and outcome.verdict is StepVerdict.PASS else None
    finally:
        if outcome is None or outcome.verdict is not StepVerdict.PASS or not step.stays:
            _end(process)


def _outcome(step: DoctorStep, answer: Path, log: Path, process: Any) -> StepOutcome:
    if answer.exists():
        return StepOutcome.from_json(json.loads(answer.read_text(encoding="utf-8")))
    process.join(0)
    if process.is_alive():
        reason = f"it hangs: no end within {step.timeout_seconds:.0f} s"
    elif process.exitcode is not None and process.exitcode < 0:
        reason = f"its process was ended by {signal.Signals(-process.exitcode).name}"
    else:
        reason = f"its process ended with exit code {process.exitcode} and without an answer"
    return StepOutcome(step.name, StepVerdict.FAIL, reason=reason + _tail(log), cure=step.cure)


def _timed(outcome: StepOutcome, began: float) -> StepOutcome:
    seconds = time.monotonic() - began
    return StepOutcome(outcome.step, outcome.verdict, seconds, outcome.reason, outcome.cure, outcome.figures)


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        if lines:
            return _GOES_ON + "\n".join(line[:200] for line in lines)
    return ""


def _end(process: BaseProcess) -> None:
    """End a step's process and all below it. An engine has a guard, which ends it when the step's process is gone."""
    if process.pid is None:
        return
    below = descendants(process.pid)
    process.terminate()
    process.join(_PATIENCE_SECONDS if process.is_alive() else None)
    for pid in (process.pid, *below):
        _kill(pid, group=pid == process.pid)
        if pid == process.pid:
            process.join()
            _wait_for(below)


def _wait_for(pids: Sequence[int]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _kill(pid: int, *, group: bool) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL) if group else os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)  # before it had a group of its own


def _context(gpus: int) -> Any:
    """Without GPUs processes are forked from one that has done the imports, which take seconds. CUDA, which imports
    may open, does not survive a fork."""
    if gpus:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    temporary = tempfile.tempdir
    try:
        # Its socket goes when Python ends, which is after the command's own temporary files have gone.
        scratch = current_scratch()
        tempfile.tempdir = str(scratch.parent) if scratch else temporary
        forkserver.ensure_running()
    finally:
        tempfile.tempdir = temporary
    return context


# --- in the step's process --------------------------------------------------------------------------------------------


def _in_process(step: DoctorStep, session: DoctorSession, answer: Path, log: Path) -> None:
    os.setsid()  # a group of its own, with the ranks that it starts
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    if not session.gpus:
        torch.set_num_threads(1)  # as learner and engines have; more wait for one another where cores are few
    keep: Any = None
    asked = threading.Event()
    if step.stays:
        signal.signal(signal.SIGTERM, lambda *_: asked.set())
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        module, _, name = step.check.partition(":")
        result = getattr(importlib.import_module(module), name)(session)
        figures, keep = result if step.stays else (result, None)
        outcome = StepOutcome.judged(step.name, figures, step.cure)
    except Skipped as skipped:
        outcome = StepOutcome(step.name, StepVerdict.SKIPPED, reason=str(skipped))
    except StepFailed as error:
        outcome = StepOutcome(step.name, StepVerdict.FAIL, reason=str(error), cure=error.cure or step.cure)
    except Exception as error:
        traceback.print_exc()
        outcome = StepOutcome(step.name, StepVerdict.FAIL, reason=f"{type(error).__name__}: {error}", cure=step.cure)
    sys.stdout.flush()
    write_text(answer, json.dumps(outcome.as_json()))
    if keep is not None:
        if outcome.verdict is StepVerdict.PASS:
            asked.wait()
        keep.stop()
    os._exit(0)  # threads of libraries may never end


def _end_with(sentinel: int) -> None:
    """The doctor may be killed: nothing of it is to stay."""
    wait([sentinel])
    os.killpg(0, signal.SIGKILL)
