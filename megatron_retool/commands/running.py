"""What commands that start processes share: their configuration, and coroutines that a signal stops."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape

from conversion.files.checksums import verify_files
from conversion.files.directory import FORMAT_NAME
from megatron_retool.commands.settings import config_file
from megatron_retool.config import Config, load_config
from megatron_retool.interruption import end_at_once, interrupts
from megatron_retool.runs.checkpoints import how_to_go_on
from megatron_retool.runs.demo_base import with_demo_base
from megatron_retool.runs.leave import REQUEUE, LeaveRequest

Result = TypeVar("Result")

LEFT = {REQUEUE: "asked to leave by SIGUSR1, or it hung: the same command resumes from the last checkpoint"}
"""Exit status of commands that train."""


def on_base(config: Config, options: argparse.Namespace) -> Config:
    """``config``, which the command line names; the demo's with the base that the run starts from.

    Raises:
        ConfigError: the base that demo.base names is not there.
    """

    def reload(base: list[str]) -> Config:
        return load_config(config_file(options), [*base, *options.overrides])

    return with_demo_base(config, reload)


def train(config: Config, console: Console, leave: LeaveRequest) -> int:
    """The RL loop; 0 when it is finished, REQUEUE when it was asked to leave or ended because it hung."""
    with interrupts(end_at_once, how_to_go_on=lambda: how_to_go_on(config.trainer)):
        from megatron_retool.cluster.hang_watchdog import RunHung
        from megatron_retool.loop.train import train as loop

    try:
        return 0 if run_async(loop(config, console, leave)) else REQUEUE
    except RunHung as error:
        console.print("[bold red]error:[/]", escape(str(error)), highlight=False)
        return REQUEUE


def run_async[Result](coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run to the end. SIGINT and SIGTERM cancel the coroutine, whose clean-up stops every process."""

    async def guarded() -> Result:
        task = asyncio.ensure_future(coroutine)
        loop = asyncio.get_running_loop()
        with interrupts(lambda: loop.call_soon_threadsafe(task.cancel)):
            try:
                return await task
            except asyncio.CancelledError:
                raise KeyboardInterrupt from None

    return asyncio.run(guarded())


def is_checkpoint(directory: Path) -> bool:
    """Whether it is one of a run's checkpoints, or Megatron-Core's weights without one."""
    return any((place / FORMAT_NAME).is_file() for place in (directory, directory / "learner"))


def with_exported_model(config: Config, target: Path, say: Callable[[str], None]) -> Config:
    """``config``; where model.path is a run's checkpoint, with the Hugging Face model that is made of it in ``target``.

    Raises:
        DistCheckpointError, DamagedError: the checkpoint is incomplete or damaged.
    """
    source = Path(config.model.path)
    if not is_checkpoint(source):
        return config
    verify_files(source, contents=False)  # before the import, which takes seconds
    from conversion.mcore_to_hf import export

    say(f"exporting {source}")
    tokenizer = config.model.tokenizer_path
    export(source, target, families=config.model.families, require_tokenizer=tokenizer is None)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(target)))
