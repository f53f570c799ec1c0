"""A task agent that is a program: a process of its own, with limits of time, memory and processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_retool.installation import ROOT
from megatron_retool.rewards.worker import plain_json
from megatron_retool.rollout_rows import AgentOutcome as Outcome
from sglang_rollout.task_agents.client import ClientSettings
from sglang_rollout.task_agents.outcome import MESSAGE_CHARACTERS, AgentEnd
from sglang_rollout.task_agents.usage import Usage, UsageWatch
from untrusted import load_json, without_surrogates
from untrusted.process_tree import descendants

_END_SECONDS = 5.0
MOST_RESULT_BYTES = 1 << 20


@dataclass(frozen=True)
class ProgramLimits:
    """What one program may use; see rollout.agent_limits. ``left``: seconds that it still has; asked again then."""

    left: Callable[[], float]
    memory_mb: int
    processes: int


async def run_program(
    command: Sequence[str], task: Mapping[str, Any], client: ClientSettings, limits: ProgramLimits, watch: UsageWatch
) -> AgentEnd:
    """Start ``command`` and wait for it.

    It finds the model's address in the environment (``ClientSettings.environment``), its task as JSON in the file
    TASK_FILE, an empty directory of its own as the working directory, and may write its reward as JSON (a number, or a
    mapping with one under "reward") to RESULT_FILE. It runs as the same user on the same machine as the run's driver.
    """
    with tempfile.TemporaryDirectory(prefix="task-agent-", ignore_cleanup_errors=True) as directory:
        place = Path(directory)
        files = {"TASK_FILE": place / "task.json", "RESULT_FILE": place / "result.json"}
        files["TASK_FILE"].write_text(json.dumps(task, default=plain_json), encoding="utf-8")
        work = place / "work"
        work.mkdir()
        environment = {**os.environ, **client.environment(), **{name: str(path) for name, path in files.items()}}
        # A proxy of the machine does not lead to the run's own addresses.
        own = "localhost,127.0.0.1"
        for name in ("NO_PROXY", "no_proxy"):
            environment[name] = ",".join(filter(None, [environment.get(name), own]))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _LAUNCH, str(os.getpid()), *command),
            cwd=work,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        said = asyncio.create_task(_last_words(process.stdout))
        try:
            exceeded = await _ended(process, limits, watch)
        finally:
            await _end(process)
            said.cancel()
            words = (await asyncio.gather(said, return_exceptions=True))[0]
        text = without_surrogates(words) if isinstance(words, str) else ""
        if exceeded is not None:
            return exceeded
        if process.returncode:
            return AgentEnd(Outcome.CRASH, f"exit status {process.returncode}: …{text}")
        return _result(files["RESULT_FILE"])


# The program's own PYTHONPATH stays as it is.
_LAUNCH = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
    "from sglang_rollout.task_agents.launch import main; sys.exit(main(sys.argv[1:]))"
)


async def _ended(process: asyncio.subprocess.Process, limits: ProgramLimits, watch: UsageWatch) -> AgentEnd | None:
    """None once the program has ended by itself; else why it must."""

    def beyond(usage: Usage) -> bool:
        return usage.memory_bytes > limits.memory_mb << 20 or usage.processes > limits.processes

    waiting = asyncio.create_task(process.wait())
    exceeding = asyncio.create_task(watch.until(process.pid, beyond))
    try:
        done: set[asyncio.Task[Any]] = set()
        while not done and (seconds := limits.left()) > 0:
            done, _ = await asyncio.wait({waiting, exceeding}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        exceeding.cancel()
    if waiting in done:
        return None
    if exceeding in done:
        usage = exceeding.result()
        message = (
            f"{usage.memory_bytes >> 20} MiB in {usage.processes} processes; rollout.agent_limits allows "
            f"{limits.memory_mb} MiB and {limits.processes}"
        )
        return AgentEnd(Outcome.RESOURCES, message)
    return AgentEnd(Outcome.TIMEOUT)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the guard and so all that the program started."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
    try:
        await asyncio.wait_for(process.wait(), _END_SECONDS)
    except TimeoutError:
        for pid in [*descendants(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await process.wait()


async def _last_words(stream: asyncio.StreamReader | None) -> str:
    """The end of what the program printed; all of it is read, so that it never waits for a reader."""
    kept = b""
    assert stream is not None
    try:
        while piece := await stream.read(1 << 16):
            kept = (kept + piece)[-MESSAGE_CHARACTERS // 2 :]
    except asyncio.CancelledError:
        pass
    return kept.decode(errors="replace")


def _result(file: Path) -> AgentEnd:
    try:
        if file.stat().st_size > MOST_RESULT_BYTES:
            return AgentEnd(Outcome.BAD_RESULT, f"RESULT_FILE has more than {MOST_RESULT_BYTES} bytes")
        return AgentEnd.returned(load_json(file.read_bytes()))
    except FileNotFoundError:
        return AgentEnd(Outcome.FINISHED)
    except (OSError, ValueError) as error:
        return AgentEnd(Outcome.BAD_RESULT, f"RESULT_FILE: {error}"[:MESSAGE_CHARACTERS])
