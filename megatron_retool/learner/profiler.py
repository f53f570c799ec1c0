"""What one rank does in chosen steps, recorded by torch.profiler, or by Nsight Systems, which the rank runs under.

    recorder = StepRecorder(settings, directory, "learner", rank=0)
    recorder.begin(5)
    with recorder.phase("update_actor"):    # a range of that name in the trace
        ...
    profile = recorder.end()

Recording begins with the first phase from ``first_phase`` on, and ends with the step or the first phase after
``last_phase``. What a rank does is asked of it call by call, so that between phases there is nothing to see.
"""

from __future__ import annotations

import gzip
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.autograd import DeviceType

from megatron_retool.config import ProfilerConfig
from megatron_retool.config.profiler import LEARNER_PHASES
from megatron_retool.runs.profile_table import OperatorTime, RankProfile
from run_files.atomic_files import atomic_write

_PYTHON_FRAME = re.compile(r"\(\d+\): |^<built-in |^nn\.Module: ")
"""Names of what with_stack adds to the operators."""


def is_recorded(settings: ProfilerConfig, phase: str) -> bool:
    """Whether ``phase`` lies from first_phase to last_phase."""
    place = LEARNER_PHASES.index
    return place(settings.first_phase) <= place(phase) <= place(settings.last_phase)


class ProfilerTool(Protocol):
    """What records from ``start`` to ``stop``."""

    def start(self) -> None:
        """Begin to record."""

    def stop(self) -> None:
        """End recording."""

    def range(self, name: str) -> AbstractContextManager[None]:
        """Name what happens inside."""

    def profile(self, rank: str, name: str, phases: dict[str, float]) -> RankProfile:
        """What was recorded, as files of ``name`` with an ending of its own.

        Raises:
            OSError: there is no room for it.
        """


class TorchTool:
    """torch.profiler; the trace is Chrome's JSON, packed, for chrome://tracing or ui.perfetto.dev."""

    def __init__(self, settings: ProfilerConfig, directory: Path) -> None:
        self._directory = directory
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities,
            record_shapes=settings.record_shapes,
            profile_memory=settings.with_memory,
            with_stack=settings.with_stack,
        )

    def start(self) -> None:
        """Begin to record."""
        self._profiler.start()

    def stop(self) -> None:
        """End recording."""
        self._profiler.stop()

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Name what happens inside."""
        with torch.profiler.record_function(name):
            yield

    def profile(self, rank: str, name: str, phases: dict[str, float]) -> RankProfile:
        """Write the trace, and return the operators that took longest."""
        trace = f"{name}.json.gz"
        self._directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            plain = Path(scratch) / "trace.json"
            self._profiler.export_chrome_trace(str(plain))
            with (
                open(plain, "rb") as source,
                atomic_write(self._directory / trace) as target,
                gzip.GzipFile(filename="", fileobj=target, mode="wb", compresslevel=5) as packed,
            ):
                shutil.copyfileobj(source, packed)
        # Kernels are rows of their own besides, whose time is that of the operators which launch them.
        operators = [
            OperatorTime(event.key, event.count, event.self_cpu_time_total, event.self_device_time_total)
            for event in self._profiler.key_averages()
            if event.device_type == DeviceType.CPU and event.key not in phases and not _PYTHON_FRAME.search(event.key)
        ]
        return RankProfile(rank, trace, phases, operators)


class NsightTool:
    """Starts and stops what `nsys profile --capture-range=cudaProfilerApi` records of this process, and writes."""

    def __init__(self) -> None:
        self._cuda: Any = torch.cuda

    def start(self) -> None:
        """Begin the range that nsys records."""
        self._cuda.cudart().cudaProfilerStart()

    def stop(self) -> None:
        """Wait for the GPU, and end the range that nsys records."""
        self._cuda.synchronize()
        self._cuda.cudart().cudaProfilerStop()

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Name what happens inside by an NVTX range."""
        self._cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            self._cuda.nvtx.range_pop()

    def profile(self, rank: str, name: str, phases: dict[str, float]) -> RankProfile:
        """Where nsys writes the rank's report."""
        return RankProfile(rank, f"{rank.replace(' ', '_')}_*.nsys-rep (written by nsys)", phases)


class StepRecorder:
    """Records one rank, one step at a time.

    Args:
        directory: the run's profile/.
        role: "learner" or "critic".
    """

    def __init__(self, settings: ProfilerConfig, directory: Path, role: str, rank: int) -> None:
        self._settings = settings
        self._directory = directory
        self._rank = f"{role} rank {rank}"
        self._suffix = f"rank{rank}" if role == "learner" else f"{role}_rank{rank}"
        self._tool: ProfilerTool | None = None
        self._step = 0
        self._state = "off"  # then waiting, recording, over
        self._phases: dict[str, float] = {}

    def begin(self, step: int) -> None:
        """Record what follows, as part of ``step``."""
        self._tool = NsightTool() if self._settings.tool == "nsys" else TorchTool(self._settings, self._directory)
        self._step, self._state, self._phases = step, "waiting", {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A range of this name in what is recorded, where it is."""
        wanted = is_recorded(self._settings, name)
        if self._tool is not None and self._state == "waiting" and wanted:
            self._tool.start()
            self._state = "recording"
        elif self._tool is not None and self._state == "recording" and not wanted:
            self._tool.stop()
            self._state = "over"
        if self._tool is None or self._state != "recording":
            yield
            return
        began = time.perf_counter()
        try:
            with self._tool.range(name):
                yield
        finally:
            self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - began

    def end(self) -> RankProfile:
        """End the step; what was recorded of it. A trace that the disk has no room for is said, and harms nothing."""
        tool, self._tool, state, self._state = self._tool, None, self._state, "off"
        if tool is None or state in ("off", "waiting"):
            return RankProfile(self._rank, problem="none of the phases to record came in this step")
        if state == "recording":
            tool.stop()
        try:
            return tool.profile(self._rank, f"step_{self._step:06d}_{self._suffix}", self._phases)
        except OSError as error:
            return RankProfile(self._rank, phases=self._phases, problem=f"it was not written: {error}")
