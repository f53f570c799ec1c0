"""Steps that go wrong in every way, for the runner's tests."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from megatron_retool.parity.doctor.outcome import Skipped, StepFailed, StepFigure
from megatron_retool.parity.doctor.session import DoctorSession


def passes(session: DoctorSession) -> list[StepFigure]:
    return [StepFigure("speed", 3.0, "GB/s", at_least=1.0)]


def is_too_slow(session: DoctorSession) -> list[StepFigure]:
    return [StepFigure("speed", 0.5, "GB/s", at_least=1.0)]


def raises(session: DoctorSession) -> list[StepFigure]:
    raise ValueError("no such kernel")


def knows_why(session: DoctorSession) -> list[StepFigure]:
    raise StepFailed("the link is down", cure="plug it in")


def is_skipped(session: DoctorSession) -> list[StepFigure]:
    raise Skipped("there is no GPU")


def hangs(session: DoctorSession) -> list[StepFigure]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (session.directory / "child.pid").write_text(str(child.pid))
    print("waiting for the others", flush=True)
    time.sleep(600)
    return []


def crashes(session: DoctorSession) -> list[StepFigure]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return []


def leaves(session: DoctorSession) -> list[StepFigure]:
    os._exit(3)


class Service:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "serving").touch()

    def stop(self) -> None:
        (self.directory / "serving").unlink()


def serves(session: DoctorSession) -> tuple[list[StepFigure], Service]:
    return [], Service(session.directory)


def is_served(session: DoctorSession) -> list[StepFigure]:
    return [StepFigure("serving", float((session.directory / "serving").exists()), at_least=1)]


def is_alone(session: DoctorSession) -> list[StepFigure]:
    return [StepFigure("serving", float((session.directory / "serving").exists()), at_most=0)]
