"""Arguments that commands share, such as --config and overrides, and the part of help that lists the settings read."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Callable, Sequence

from megatron_retool.config import Config, load_config
from megatron_retool.config.tree import walk
from megatron_retool.errors import InputError
from megatron_retool.installation import shipped

DEMO_CONFIG = shipped("configs/demo_cpu.yaml")
_WIDTH = 80


def add_config(parser: argparse.ArgumentParser) -> None:
    """--config and overrides; ``load`` reads them."""
    parser.add_argument("--config", metavar="FILE", help="YAML file (default: configs/demo_cpu.yaml)")
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="settings in place of the file's")


def at_least(least: int) -> Callable[[str], int]:
    """The ``type`` of an option whose value is a whole number, ``least`` or more."""

    def whole_number(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return whole_number


def endpoint_key(url: str, key_variable: str | None) -> str | None:
    """The key in the environment variable of --key-variable; None: none is sent.

    Raises:
        InputError: there is no such variable, or --url is none.
    """
    key = None
    if key_variable is not None and not (key := os.environ.get(key_variable)):
        raise InputError(f"--key-variable {key_variable}: there is no such variable in the environment")
    if not url.startswith(("http://", "https://")):
        raise InputError(f"--url {url}: expected http://… or https://…")
    return key


def port_number(text: str) -> int:
    """The ``type`` of an option whose value is a port to listen on; 0 is a free one."""
    if not text.strip().isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: a whole number from 0 to 65535")
    return int(text)


def load(options: argparse.Namespace) -> Config:
    """The configuration that the command line names.

    Raises:
        ConfigError: the file or an override is wrong.
    """
    return load_config(config_file(options), options.overrides)


def config_file(options: argparse.Namespace) -> str:
    """The configuration that --config names, or the demo's."""
    return options.config or str(DEMO_CONFIG)


def settings_text(names: Sequence[str]) -> str:
    """The keys at and below ``names`` (dotted), by section, as indented lines.

    Raises:
        ValueError: a name is no setting.
    """
    sections: dict[str, list[str]] = {}
    known = [key for key, _, _ in walk(Config())]
    parents = {key.rpartition(".")[0] for key in known}
    for name in names:
        if name not in known:
            raise InputError(f"{name} is no setting")
        for key in known:
            if (key == name or key.startswith(f"{name}.")) and key not in parents:
                section, _, leaf = key.rpartition(".")
                leaves = sections.setdefault(section, [])
                if leaf not in leaves:
                    leaves.append(leaf)
    lines = []
    for section, leaves in sections.items():
        text = f"{section}: {', '.join(leaves)}"
        lines += textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
    return "\n".join(lines)
