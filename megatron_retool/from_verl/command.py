"""Translating a file of verl's: the YAML that is written, and the lists that are printed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import yaml
from rich.console import Console

from megatron_retool.config import ConfigError, load_config
from megatron_retool.from_verl.convert import Translation, read_source, translate
from run_files.atomic_files import write_text


def translate_file(source: Path, output: Path | None, console: Console) -> int:
    """Write ``source``, a verl configuration or script, as ours; by default under its name in the working directory.

    Returns:
        0 where the file that was written can be loaded, 1 where something in it has to be changed first.

    Raises:
        ConfigError: ``source`` cannot be read, is no verl configuration, or ``output`` exists.
    """
    translation = translate(read_source(source), source.parent)
    output = output or Path(f"{source.stem}.yaml")
    if output.exists():
        raise ConfigError(f"{output} exists: name another file with --output, or remove it")
    write_text(output, written(translation, source.name))
    _print_lists(translation, console)
    try:
        load_config(output)
    except ConfigError as error:
        console.print(f"wrote {output}, which does not load yet: {error}", markup=False, highlight=False)
        return 1
    console.print(
        f"wrote {output}; it loads. Next: `megatron-retool plan --config {output}`", markup=False, highlight=False
    )
    return 0


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
