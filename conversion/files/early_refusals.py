"""What can be said against a converter's command line before it imports torch, which takes seconds.

What is not found here is found by the conversion itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from conversion.files.checksums import verify_files
from conversion.files.directory import check_target, local_directory
from conversion.files.safetensors_headers import check_weight_files, weight_files
from conversion.model.architecture import Architecture


def refuse_hf_to_mcore(arguments: Sequence[str]) -> None:
    """End the process with one line where hf_to_mcore.py's model or target cannot be used.

    Raises:
        SystemExit: with status 1.
    """

    def check(options: argparse.Namespace) -> None:
        source = Path(options.hf_dir)
        if not source.is_dir():
            if source.exists():
                local_directory(options.hf_dir)  # which says what it is
            return
        if options.mcore_dir is not None:
            check_target(Path(options.mcore_dir).absolute(), [source], overwrite=options.overwrite)
        Architecture.from_pretrained(source, options.family, dequantized=True)
        check_weight_files(source)
        weight_files(source)
        if not options.no_checksums:
            verify_files(source, contents=False)

    _refuse(arguments, "hf_dir", check)


def refuse_mcore_to_hf(arguments: Sequence[str]) -> None:
    """End the process with one line where mcore_to_hf.py's checkpoint or target cannot be used.

    Raises:
        SystemExit: with status 1.
    """

    def check(options: argparse.Namespace) -> None:
        source = Path(options.mcore_dir)
        if not source.is_dir():
            raise FileNotFoundError(f"{source} {'is a file' if source.exists() else 'does not exist'}")
        if options.hf_dir is not None:
            check_target(Path(options.hf_dir).absolute(), [source], overwrite=options.overwrite)
        if not options.no_checksums:
            verify_files(source, contents=False)

    _refuse(arguments, "mcore_dir", check)


def _refuse(arguments: Sequence[str], source: str, check: Callable[[argparse.Namespace], None]) -> None:
    """Run ``check`` where the option ``source`` is given; the converter's own parser says what else is wrong."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--hf-dir", "--mcore-dir"):
        parser.add_argument(name)
    parser.add_argument("--family", action="append", default=[])
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--no-checksums", action="store_true")
    try:
        options, _ = parser.parse_known_args(arguments)
        if getattr(options, source) is not None:
            check(options)
    except argparse.ArgumentError:
        return
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
