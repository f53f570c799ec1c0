"""Which steps, ranks and engines are asked to record, what becomes of their answers, and what is refused beforehand."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from megatron_retool.cluster.checks import check_profiler
from megatron_retool.config import ConfigError, load_config
from megatron_retool.loop.profiling import StepProfiler
from megatron_retool.runs.profile_table import OperatorTime, RankProfile
from megatron_retool.runs.step_timer import StepTimer
from megatron_retool.runs.write_errors import WriteErrors
from run_files.phases import Phase
from sglang_rollout.engine.base import EngineFailed


class Group:
    def __init__(self, role: str, calls: list[Any]) -> None:
        self.role, self.calls = role, calls

    async def begin_profile(self, step: int) -> None:
        self.calls.append((self.role, step))

    async def end_profile(self) -> list[RankProfile]:
        self.calls.append((self.role, "end"))
        return [RankProfile(f"{self.role} rank 0", "t.json.gz", {"values": 0.1}, [OperatorTime("aten::mm", 1, 2.0)])]


def profiled(tmp_path: Path, calls: list[Any], *overrides: str) -> tuple[StepProfiler, Console]:
    config = load_config(None, [f"trainer.runs_dir={tmp_path}", "trainer.experiment_name=e", *overrides])
    console = Console(record=True, width=200)

    class Client:
        def __init__(self, url: str) -> None:
            self.url = url

        async def start_profile(self, directory: Path, name: str, record_shapes: bool, with_stack: bool) -> None:
            calls.append((name, directory.relative_to(tmp_path), record_shapes, with_stack))

        async def stop_profile(self) -> None:
            calls.append((self.url, "stop"))
            raise EngineFailed(self.url, "Profiling is not in progress", "/stop_profile")

    @asynccontextmanager
    async def client(url: str) -> Any:
        yield Client(url)

    run: Any = SimpleNamespace(
        config=config,
        console=console,
        models={"learner": Group("learner", calls), "critic": Group("critic", calls)},
        engines=SimpleNamespace(urls=["http://a"], engine=SimpleNamespace(client=client)),
        write_errors=WriteErrors(console),
    )
    return StepProfiler(run), console


def go_through(profiler: StepProfiler, steps: int) -> None:
    async def run() -> None:
        for step in range(1, steps + 1):
            timer = StepTimer()
            await profiler.begin(step)
            with timer.phase(Phase.STEP), timer.phase(Phase.GENERATION):
                pass
            await profiler.end(step, timer)

    asyncio.run(run())


def test_the_named_steps_are_recorded_and_no_others(tmp_path: Path) -> None:
    calls: list[Any] = []
    settings = ("trainer.profiler.tool=torch", "trainer.profiler.steps=[2,4]", "trainer.profiler.engines=true")
    profiler, console = profiled(tmp_path, calls, *settings)
    go_through(profiler, 5)
    assert [call for call in calls if call[0] in ("learner", "critic")] == [
        (role, what) for step in (2, 4) for what in (step, "end") for role in ("learner", "critic")
    ]
    started = [call for call in calls if str(call[0]).startswith("step")]
    assert started[0] == ("step_000002_engine0", Path("e/profile/engines"), False, False) and len(started) == 2
    assert sorted(path.name for path in (tmp_path / "e" / "profile").iterdir()) == ["step_000002.md", "step_000004.md"]
    page = (tmp_path / "e" / "profile" / "step_000002.md").read_text()
    assert "## critic rank 0" in page and "| gen |" in page and "`aten::mm`" in page
    text = console.export_text()
    assert "profile of step 4" in text and "no profile of an engine: engine http://a: /stop_profile" in text


def test_without_a_tool_nothing_is_asked(tmp_path: Path) -> None:
    calls: list[Any] = []
    profiler, console = profiled(tmp_path, calls, "trainer.profiler.steps=[1]")
    go_through(profiler, 2)
    assert calls == [] and console.export_text() == "" and not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["tool=torch"], r"steps, which names none"),
        (["tool=torch", "steps=[0]"], r"trainer\.profiler\.steps=\[0\] must be at least 1"),
        (["tool=torch", "steps=[1]", "first_phase=weight_sync", "last_phase=update_actor"], "comes after last_phase"),
        (["steps=[1]", "engines=true"], r"engines=true needs trainer\.profiler\.tool"),
        (["tool=nsys", "steps=[1]", "nsys_options={o: x}"], "nsys_options: o is set by the run"),
    ],
)
def test_settings_that_record_nothing_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, [f"trainer.profiler.{each}" for each in overrides])


def check(*overrides: str) -> None:
    config = load_config(None, [*(f"trainer.profiler.{each}" for each in overrides), "trainer.profiler.steps=[3]"])
    check_profiler(config.trainer, config.learner, config.cluster)


def test_what_is_missing_is_said_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check("tool=none", "ranks=[99]")
    check("tool=torch")
    with pytest.raises(ConfigError, match=r"ranks names rank 1, and the learner's are 0 to 0"):
        check("tool=torch", "ranks=[1]")
    with pytest.raises(ConfigError, match=r"tool=nsys records CUDA, and cluster\.gpus_per_node=0"):
        check("tool=nsys")
    on_gpus = load_config(None, ["trainer.profiler.tool=nsys", "trainer.profiler.steps=[3]", "cluster.gpus_per_node=1"])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs Nsight Systems, whose program nsys is not on PATH"):
        check_profiler(on_gpus.trainer, on_gpus.learner, on_gpus.cluster)
    (tmp_path / "nsys").write_text("#!/bin/sh\n")
    (tmp_path / "nsys").chmod(0o755)
    check_profiler(on_gpus.trainer, on_gpus.learner, on_gpus.cluster)
