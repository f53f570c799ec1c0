"""Steps that go wrong in every way, for the runner's tests."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from megatron_retool.doctor.outcome import Figure, Skipped, StepFailed
from megatron_retool.doctor.session import Session


def passes(session: Session) -> list[Figure]:
    return [Figure("speed", 3.0, "GB/s", at_least=1.0)]


def is_too_slow(session: Session) -> list[Figure]:
    return [Figure("speed", 0.5, "GB/s", at_least=1.0)]


def raises(session: Session) -> list[Figure]:
    raise ValueError("no such kernel")


def knows_why(session: Session) -> list[Figure]:
    raise StepFailed("the link is down", cure="plug it in")


def is_skipped(session: Session) -> list[Figure]:
    raise Skipped("there is no GPU")


def hangs(session: Session) -> list[Figure]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (session.directory / "child.pid").write_text(str(child.pid))
    print("waiting for the others", flush=True)
    time.sleep(600)
    return []


def crashes(session: Session) -> list[Figure]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return []


def leaves(session: Session) -> list[Figure]:
    os._exit(3)


class Service:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "serving").touch()

    def stop(self) -> None:
        (self.directory / "serving").unlink()


def serves(session: Session) -> tuple[list[Figure], Service]:
    return [], Service(session.directory)


def is_served(session: Session) -> list[Figure]:
    return [Figure("serving", float((session.directory / "serving").exists()), at_least=1)]


def is_alone(session: Session) -> list[Figure]:
    return [Figure("serving", float((session.directory / "serving").exists()), at_most=0)]
