"""Parsing: `megatron-retool COMMAND …`, the list of commands, and each command's own help."""

from __future__ import annotations

import argparse
import difflib
import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import NoReturn

from rich.console import Console

from megatron_retool.commands import COMMANDS, Command, find_command
from megatron_retool.commands.settings import settings_text
from megatron_retool.interruption import INTERRUPTED

PROGRAM = "megatron-retool"
EXIT_STATUS = {
    0: "done",
    1: "an error, which the last line says",
    2: "the command line is not understood",
    INTERRUPTED: "stopped by Ctrl-C or SIGTERM",
}


def parse(words: list[str]) -> tuple[Callable[[argparse.Namespace, Console], int], argparse.Namespace]:
    """What to run for the words after the program's name, and its options.

    Raises:
        SystemExit: help was asked for and printed (status 0), or the words are not understood (2).
    """
    if not words or words[0] in ("-h", "--help", "help"):
        asked = bool(words)
        print(overview())
        raise SystemExit(0 if asked else 2)
    command, rest = find_command(words)
    if command is None:
        group = [command for command in COMMANDS if command.name.split()[0] == words[0]]
        if group and words[1:] in ([], ["-h"], ["--help"]):
            print(overview(group))
            raise SystemExit(0 if words[1:] else 2)
        names = [command.name for command in group or COMMANDS]
        nearest = difflib.get_close_matches(" ".join(words[:2] if group else words[:1]), names, n=1, cutoff=0.0)[0]
        argparse.ArgumentParser(PROGRAM, usage=f"{PROGRAM} COMMAND [arguments]").error(
            f"unknown command {' '.join(words[:2]) if group else words[0]!r}; the nearest is {nearest!r}, "
            f"`{PROGRAM} --help` lists all"
        )
    module = importlib.import_module(command.module)
    return module.run, parser_of(command, module).parse_intermixed_args(rest)


class _Parser(argparse.ArgumentParser):
    """Names the nearest option for one that it does not know."""

    def error(self, message: str) -> NoReturn:
        """Print usage, the message and the nearest option, and exit with status 2."""
        unknown = message.removeprefix("unrecognized arguments: ").split()
        first = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
        if first is not None and message.startswith("unrecognized"):
            known = [option for option in self._option_string_actions if option.startswith("--")]
            nearest = difflib.get_close_matches(first, known, n=1)
            message += f"; did you mean {nearest[0]}?" if nearest else f"; `{self.prog} --help` lists the options"
        super().error(message)


def parser_of(command: Command, module: ModuleType) -> argparse.ArgumentParser:
    """The command's parser, whose help ends with the settings that it reads and its exit statuses."""
    statuses: Mapping[int, str] = EXIT_STATUS | getattr(module, "EXIT_STATUS", {})
    settings = getattr(module, "SETTINGS", ())
    epilog = ""
    if settings:
        epilog = f"settings that it reads (megatron_retool/config has their meaning):\n{settings_text(settings)}\n\n"
    epilog += "exit status:\n" + "\n".join(f"  {status:<4} {text}" for status, text in sorted(statuses.items()))
    parser = _Parser(
        prog=f"{PROGRAM} {command.name}",
        description=module.__doc__,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    return parser


def overview(commands: list[Command] | None = None) -> str:
    """The list of commands: all, or those given."""
    shown = list(COMMANDS) if commands is None else commands
    width = max(len(command.name) for command in shown)
    lines = [f"  {command.name:<{width}}  {command.summary}" for command in shown]
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND [--config FILE] [dotted.key=value …]",
            "",
            "Reinforcement learning of tool use: Megatron-Core learner, SGLang engines.",
            "",
            "commands:",
            *lines,
            "",
            f"`{PROGRAM} COMMAND --help` has a command's arguments, settings and examples.",
        ]
    )
