"""A worker that is given up, and processes and files made to stay, harm nothing that lives on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sandboxes import Sandbox, as_ordinary_user, start
from test_attacks import command_lines

from code_interpreter import linux
from code_interpreter.filesystem import remove_directory
from code_interpreter.protocol import Outcome
from untrusted.process_tree import children


@contextlib.contextmanager
def running(isolation: str, **settings: object) -> Iterator[Sandbox]:
    sandbox = start(isolation, **settings)
    try:
        yield sandbox
    finally:
        sandbox.process.stop()


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "error", ["SystemExit(0)", "KeyboardInterrupt()", "RecursionError()", "MemoryError()", "OSError()"]
)
def test_forked_process_never_reaches_its_callers_finally(error: str) -> None:
    code = f"""
    import os
    from code_interpreter import linux
    def child(): raise {error}
    try:
        process = linux.fork(child)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    except BaseException:
        print("unwound", flush=True)
    finally:
        print("finally", flush=True)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout == "1\nfinally\n"
    assert os.waitpid(linux.fork(lambda: None), 0)[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("isolation", [pytest.param("rlimits", marks=pytest.mark.rare), "bubblewrap"])
def test_worker_that_wakes_after_it_was_given_up(isolation: str) -> None:
    with running(isolation, workers=1, wrapper=as_ordinary_user()) as sandbox:
        sandbox.check_alive()
        (warden,) = children()[sandbox.process.pid]
        (zygote,) = children()[warden]
        (worker,) = children()[zygote]
        answers: list[Outcome] = []

        def ask() -> None:
            answers.append(sandbox.run("import time; time.sleep(0.5)", run_timeout=1.0).outcome)

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.3)
        os.kill(worker, signal.SIGSTOP)
        thread.join()
        os.kill(worker, signal.SIGCONT)
        assert answers == [Outcome.SANDBOX_ERROR]
        until(lambda: worker not in children().get(zygote, []))
        sandbox.check_alive()


@pytest.mark.parametrize("wrapped", [False, True], ids=["root", "ordinary"])
def test_fork_bomb_ends_with_its_time_limit(wrapped: bool) -> None:
    mark = f"61.{uuid.uuid4().int % 10**12}"
    code = f"""
    import os, subprocess, time
    subprocess.Popen(["sleep", "{mark}"], start_new_session=True)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try: os.fork()
        except OSError: pass
    """
    with running("rlimits", workers=1, wrapper=as_ordinary_user() if wrapped else ()) as sandbox:
        result = sandbox.run(textwrap.dedent(code), run_timeout=1.5)
        assert result.outcome is Outcome.TIME_LIMIT_EXCEEDED, result
        sandbox.check_alive()
        assert [line for line in command_lines().values() if mark in line] == []
        assert _below(sandbox.process.pid) <= 3  # warden, zygote and worker


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_fork_bomb_does_not_outlive_the_server(number: signal.Signals) -> None:
    mark = f"61.{uuid.uuid4().int % 10**12}"
    code = f"""
    import os, subprocess, time
    subprocess.Popen(["sleep", "{mark}"])
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try: os.fork()
        except OSError: pass
    """
    with running("rlimits", workers=1, wrapper=as_ordinary_user()) as sandbox:
        ask = threading.Thread(target=_ignore_answer, args=(sandbox, textwrap.dedent(code)))
        ask.start()
        until(lambda: any(mark in line for line in command_lines().values()))
        (warden,) = children()[sandbox.process.pid]
        os.kill(sandbox.process.pid, number)
        ask.join()
        until(lambda: not any(mark in line for line in command_lines().values()))
        until(lambda: not Path(f"/proc/{warden}").exists())
        until(
            lambda: (
                not any("warden.py" in line and str(sandbox.process.pid) in line for line in command_lines().values())
            )
        )


def _ignore_answer(sandbox: Sandbox, code: str) -> None:
    with contextlib.suppress(OSError):
        sandbox.run(code, run_timeout=50.0)


def _below(root: int) -> int:
    known, queue, count = children(), [root], 0
    while queue:
        own = known.get(queue.pop(), [])
        count += len(own)
        queue += own
    return count


def test_removal_of_a_tree_made_to_resist(tmp_path: Path) -> None:
    top = tmp_path / "tree"
    top.mkdir()
    code = """
    import os
    for number in range(3_000):
        os.mkdir("d")
        open("f", "w").close()
        os.symlink("..", "l")
        previous = os.open(".", os.O_RDONLY)
        os.chdir("d")
        if number % 100 == 0: os.fchmod(previous, 0)
        os.close(previous)
    os.mkdir(b"\\xff" + b"n" * 200, 0)
    """
    kept = tmp_path / "kept"
    kept.write_text("outside")
    (top / "link").symlink_to(tmp_path)
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=top, check=True)
    assert not remove_directory(str(top), 0.0)
    assert remove_directory(str(top), 60)
    assert not top.exists() and kept.read_text() == "outside"
    assert remove_directory(str(top), 1.0), "nothing is there any more"


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["namespaces", "bubblewrap", "rlimits"])
def test_snippet_that_nests_directories_as_deep_as_it_can(isolation: str) -> None:
    nest = "import os\nwhile True:\n    os.mkdir('d'); os.chdir('d')"
    with running(isolation, workers=1, wrapper=as_ordinary_user()) as sandbox:
        began = time.monotonic()
        result = sandbox.run(nest, run_timeout=3.0)
        assert result.outcome is not Outcome.SANDBOX_ERROR, result
        assert time.monotonic() - began < 15
        sandbox.check_alive()
        (scratch,) = sandbox.scratch_directories()
        until(lambda: not list(scratch.glob("worker-0/*")), 60)
