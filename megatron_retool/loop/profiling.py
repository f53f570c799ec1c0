"""The chosen steps of a run, recorded: which ranks are asked to, and what is made of their answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from megatron_retool.runs.profile_table import profile_page, short_table
from megatron_retool.runs.step_timer import StepTimer
from run_files.atomic_files import write_text
from sglang_rollout.engine.base import EngineClientError, ProfilingClient

if TYPE_CHECKING:
    from megatron_retool.cluster.deployment import Deployment


class StepProfiler:
    """Follows ``trainer.profiler``. In steps that it does not name, and without a tool, it does nothing."""

    def __init__(self, run: Deployment) -> None:
        self._run = run
        self._settings = run.config.trainer.profiler

    def is_due(self, step: int) -> bool:
        """Whether ``step`` is recorded."""
        return self._settings.tool != "none" and step in self._settings.steps

    async def begin(self, step: int) -> None:
        """Before the step: let the chosen ranks, and perhaps the engines, record it."""
        if not self.is_due(step):
            return
        await asyncio.gather(*(group.begin_profile(step) for group in self._run.models.values()))
        if self._settings.engines:
            await self._ask_engines("start_profile", step)

    async def end(self, step: int, timer: StepTimer) -> None:
        """After it: tables beside the traces, and the gist on the console."""
        if not self.is_due(step):
            return
        if self._settings.engines:
            await self._ask_engines("stop_profile", step)
        answers = await asyncio.gather(*(group.end_profile() for group in self._run.models.values()))
        ranks = [profile for answer in answers for profile in answer]
        page = self._run.config.trainer.run_dir / "profile" / f"step_{step:06d}.md"
        with self._run.write_errors.tolerated(page):
            page.parent.mkdir(parents=True, exist_ok=True)
            write_text(page, profile_page(step, timer.seconds, ranks, self._settings.top_operators))
        self._run.console.print(short_table(step, ranks))
        self._run.console.print(f"profile of step {step}: {page}", markup=False, highlight=False, soft_wrap=True)

    async def _ask_engines(self, call: str, step: int) -> None:
        """An engine that does not record is named, and the run continues."""
        urls, settings = self._run.engines.urls, self._settings
        directory = self._run.config.trainer.run_dir.absolute() / "profile" / "engines"

        async def ask(index: int, url: str) -> None:
            async with self._run.engines.engine.client(url) as made:
                client = cast(ProfilingClient, made)  # checked before the run began
                if call == "stop_profile":
                    await client.stop_profile()
                else:
                    name = f"step_{step:06d}_engine{index}"
                    await client.start_profile(directory, name, settings.record_shapes, settings.with_stack)

        answers = await asyncio.gather(*(ask(i, url) for i, url in enumerate(urls)), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, EngineClientError):
                self._run.console.print(
                    f"no profile of an engine: {answer}", style="yellow", markup=False, highlight=False, soft_wrap=True
                )
            elif isinstance(answer, BaseException):
                raise answer
