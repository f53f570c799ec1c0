"""megatron-retool config from-verl FILE [--output OUT]: a verl configuration in our words

FILE is a verl YAML (a resolved Hydra configuration, or some of its keys) or a shell script that starts verl, such as
verl's examples. OUT (default: FILE's name with .yaml, in the working directory) is what `train --config OUT` reads.
What verl does where FILE is silent is written out where our default is another. docs/verl.md has the whole table.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path

import yaml
from rich.console import Console

from megatron_retool.config import ConfigError, load_config
from megatron_retool.from_verl.convert import Translation, read_source, translate
from megatron_retool.runs.files import write_text


def main(arguments: list[str], console: Console) -> int:
    """The command; ``arguments`` are those after "config", so that the first one is "from-verl".

    Returns:
        0 where the file that was written can be loaded, 1 where something in it has to be changed first.

    Raises:
        ConfigError: FILE cannot be read, is no verl configuration, or OUT exists.
    """
    options = _parse(arguments)
    source = Path(options.file)
    translation = translate(read_source(source), source.parent)
    output = Path(options.output or f"{source.stem}.yaml")
    if output.exists():
        raise ConfigError(f"{output} exists: name another file with --output, or remove it")
    write_text(output, written(translation, source.name))
    _print_lists(translation, console)
    try:
        load_config(output)
    except ConfigError as error:
        console.print(f"wrote {output}, which does not load yet: {error}", markup=False, highlight=False)
        return 1
    console.print(f"wrote {output}; it loads. Next: `plan --config {output}`", markup=False, highlight=False)
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megatron-retool config", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["from-verl"])
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--output", metavar="OUT")
    return parser.parse_args(arguments)


def written(translation: Translation, name: str) -> str:
    """The YAML's text, with what is left to decide above it."""
    lines = [f"# Translated from verl's {name} by `megatron-retool config from-verl`."]
    if translation.decisions:
        lines += ["# To decide:", *(f"# - {text}" for text in translation.decisions)]
    body = yaml.safe_dump(translation.tree(), sort_keys=False, allow_unicode=True, width=120)
    return "\n".join(lines) + "\n" + _with_readable_floats(body)


def _with_readable_floats(text: str) -> str:
    # YAML 1.1 needs the point of 1.0e-06; ours reads it as a number as well.
    return text.replace("e-06", "e-6").replace("e-05", "e-5")


def _print_lists(translation: Translation, console: Console) -> None:
    def show(title: str, lines: Iterable[str]) -> None:
        lines = list(lines)
        if lines:
            console.print(f"\n{title} ({len(lines)})", style="bold", highlight=False)
            for line in lines:
                console.print(f"  {line}", markup=False, highlight=False)

    settings = translation.settings
    show(
        "translated",
        (
            f"{key} -> " + ", ".join(f"{ours}={settings[ours]}" if ours in settings else ours for ours in row.ours)
            for key, row in translation.translated.items()
        ),
    )
    reasons: dict[str, list[str]] = {}
    for key, row in translation.missing.items():
        reasons.setdefault(row.note, []).append(key)
    show("no counterpart", (f"{', '.join(keys)}: {why}" for why, keys in reasons.items()))
    show("not verl's", translation.strange)
    show("to decide", translation.decisions)
    console.print(os.linesep, end="")
