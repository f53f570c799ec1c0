"""Command line: python -m megatron_retool COMMAND [--config FILE] [dotted.key=value …]

Commands
    pipeline    train; where demo.enable is set, first make-demo, SFT and conversion, and at the end export and report
    train       the RL loop
    sft         supervised fine-tuning
    evaluate    validation of model.path alone
    make-demo   the demo's model, tokenizer and data
    plan        memory and time on given GPUs, before any is asked for (plan --help)
    report      plots of a run: report runs/<name>; of its mismatch: report mismatch runs/<name>
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape

from megatron_retool.config import Config, ConfigError, load_config
from megatron_retool.monitor.write_errors import print_to_full_disks
from megatron_retool.runs.leave import INTERRUPTED, REQUEUE, LeaveRequest

Result = TypeVar("Result")
COMMANDS = ("pipeline", "train", "sft", "evaluate", "make-demo", "plan", "report")


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m megatron_retool", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    parser.add_argument("--config", help="YAML file (default: configs/demo_cpu.yaml)")
    parser.add_argument("overrides", nargs="*", help="dotted.key=value, or the run's directory for report")
    console = Console(soft_wrap=not sys.stdout.isatty(), emoji=False)  # a path such as own.py:Notes is no emoji
    try:
        if arguments[:1] == ["plan"]:
            from megatron_retool.planning.cli import main as plan

            return plan(arguments[1:], console)
        return run_command(parser.parse_intermixed_args(arguments), console)
    except KeyboardInterrupt:
        console.print("[yellow]stopped; every process of the run has ended[/]")
        return INTERRUPTED
    except Exception as error:
        cause = root_cause(error)
        if not is_users_error(cause):
            console.print_exception(max_frames=12)
        console.print("[bold red]error:[/]", escape(str(cause) or type(cause).__name__), highlight=False)
        return 1


def run_command(options: argparse.Namespace, console: Console) -> int:
    if options.command == "report":
        from megatron_retool.reports.mismatch import write_mismatch_report
        from megatron_retool.reports.run import write_report

        kind = options.overrides[0] if len(options.overrides) == 2 else "run"
        writers: dict[str, Callable[[str], Path]] = {"run": write_report, "mismatch": write_mismatch_report}
        if kind not in writers or len(options.overrides) not in (1, 2):
            raise ConfigError("report takes the run's directory, runs/<experiment_name>, with the word mismatch before "
                              "it for the mismatch of engine and learner")  # fmt: skip
        console.print(f"wrote {writers[kind](options.overrides[-1])}")
        return 0

    config_file = options.config or Path(__file__).parents[1] / "configs" / "demo_cpu.yaml"
    config = load_config(config_file, options.overrides)
    from megatron_retool.loop.checks import check_directory, check_extensions, check_model, check_run

    if options.command == "make-demo":
        check_directory("demo.directory", Path(config.demo.directory))
    else:
        check_run(config)
    if options.command in ("pipeline", "train", "evaluate"):
        check_extensions(config)
    if options.command in ("train", "sft", "evaluate") or (options.command == "pipeline" and not config.demo.enable):
        check_model(config, learns=options.command != "evaluate")
    with LeaveRequest() as leave:
        if options.command == "make-demo":
            from megatron_retool.data.demo import make_demo

            make_demo(config)
        elif options.command == "sft":
            from megatron_retool.sft.launch import fine_tune

            return 0 if fine_tune(config, leave=leave) else REQUEUE
        elif options.command == "train":
            return train(config, console, leave)
        elif options.command == "evaluate":
            from megatron_retool.loop.validation import evaluate_model

            run_async(evaluate_model(config, console))
        else:
            from megatron_retool.pipeline import run_pipeline

            return run_pipeline(config, str(config_file), options.overrides, console, train, leave)
    return 0


def train(config: Config, console: Console, leave: LeaveRequest) -> int:
    """The RL loop; 0 when it is finished, REQUEUE when it was asked to leave or ended because it hung."""
    from megatron_retool.cluster.hang_watchdog import RunHung
    from megatron_retool.loop.train import train as loop

    try:
        return 0 if run_async(loop(config, console, leave)) else REQUEUE
    except RunHung as error:
        console.print("[bold red]error:[/]", escape(str(error)), highlight=False)
        return REQUEUE


def run_async(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run to the end. SIGINT and SIGTERM cancel the coroutine, whose clean-up stops every process."""

    async def guarded() -> Result:
        task = asyncio.ensure_future(coroutine)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    return asyncio.run(guarded())


def root_cause(error: BaseException) -> BaseException:
    """The error itself; for one that was raised in a Ray actor, what the actor raised."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def is_users_error(error: BaseException) -> bool:
    """Errors whose message alone tells what to do; a stack trace would only hide it."""
    return isinstance(error, (ValueError, OSError, RuntimeError))


if __name__ == "__main__":
    print_to_full_disks()
    sys.exit(main())
