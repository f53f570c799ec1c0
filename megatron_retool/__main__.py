"""`megatron-retool COMMAND …`, or `python -m megatron_retool COMMAND …`: megatron_retool/commands has the commands."""

from __future__ import annotations

import gc
import sys

from megatron_retool.installation import require_packages
from megatron_retool.interruption import end_when_interrupted


def main(arguments: list[str] | None = None) -> int:
    """Run the command that ``arguments`` (default: the process's) name.

    Returns:
        The exit status: 0 done, 1 an error, which was printed, INTERRUPTED, or what the command says.

    Raises:
        SystemExit: help was printed, the command line is not understood, or packages are missing.
    """
    require_packages("megatron-retool")
    from rich.console import Console
    from rich.markup import escape

    from megatron_retool.commands.command_line import parse
    from megatron_retool.errors import FAULT, UserError
    from megatron_retool.interruption import INTERRUPTED, stopped
    from megatron_retool.scratch import scratch_directory
    from untrusted import clipped

    console = Console(soft_wrap=not sys.stdout.isatty(), emoji=False)  # a path such as own.py:Notes is no emoji
    try:
        run, options = parse(sys.argv[1:] if arguments is None else arguments)
        with scratch_directory():
            return run(options, console)
    except (KeyboardInterrupt, Exception) as error:
        if stopped(error):
            return INTERRUPTED
        cause = root_cause(error)
        fault = not isinstance(cause, UserError | OSError)
        if fault:
            console.print_exception(max_frames=12)
        told = clipped(str(cause)) if isinstance(cause, ValueError | OSError) else str(cause)
        console.print("[bold red]error:[/]", escape(told or type(cause).__name__), highlight=False)
        if fault:
            console.print(FAULT, highlight=False)
        return 1


def root_cause(error: BaseException) -> BaseException:
    """The error itself; for one that was raised in a Ray actor, what the actor raised."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def console_script() -> int:
    """The process's own entry, which may replace its standard output."""
    require_packages("megatron-retool")
    end_when_interrupted()  # before the other imports, which take their time
    # By its usual measure the collector walks through torch's modules again and again: a quarter of the imports' time.
    gc.set_threshold(100_000)
    from megatron_retool.runs.write_errors import print_to_full_disks

    print_to_full_disks()
    return main()


if __name__ == "__main__":
    sys.exit(console_script())
