"""The converters' command lines, and what can be said against one before torch is imported, which takes seconds.

What is not found here is found by the conversion itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from conversion.files.checksums import verify_files
from conversion.files.directory import check_target, local_directory
from conversion.files.safetensors_headers import check_weight_files, weight_files
from conversion.model.architecture import Architecture
from conversion.model.block_fp8 import SCALES
from megatron_retool.errors import InputError, UserError

DTYPES = ("bfloat16", "float16", "float32")
MAX_FILE_BYTES = 5 * 10**9
"""Size of a safetensors file, as the hub recommends it."""
MODELOPT_SCHEMES = {"per-tensor": "fp8", "nvfp4": "nvfp4"}
"""What the commands call a scheme -> what ``export_with_modelopt`` does."""


def hf_to_mcore(arguments: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """Read hf_to_mcore.py's options (None: the process's own).

    Raises:
        SystemExit: help was printed (status 0), or the command line is not understood (2).
    """
    parser = _parser("hf_to_mcore.py", description)
    parser.add_argument("--hf-dir", required=True, help="Hugging Face model directory, or hub id owner/name")
    parser.add_argument("--mcore-dir", required=True, type=Path, help="directory to make")
    parser.add_argument(
        "--tp", type=_at_least_one, default=1, help="tensor parallel size of the layout that will read it"
    )
    parser.add_argument("--pp", type=_at_least_one, default=1, help="pipeline parallel size")
    parser.add_argument("--vpp", type=_at_least_one, default=1, help="virtual pipeline stages per rank")
    parser.add_argument("--ep", type=_at_least_one, default=1, help="expert parallel size")
    parser.add_argument("--without-predictors", action="store_true", help="leave out layers for multi-token prediction")
    _add_conversion_options(parser)
    return parser.parse_args(arguments)


def mcore_to_hf(arguments: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """Read mcore_to_hf.py's options; see ``hf_to_mcore``."""
    parser = _parser("mcore_to_hf.py", description)
    parser.add_argument("--mcore-dir", required=True, type=Path, help="checkpoint: converted, or saved by the learner")
    parser.add_argument("--hf-dir", required=True, type=Path, help="directory to make")
    parser.add_argument("--hf-config-dir", help="where config.json and tokenizer are; default: MCORE_DIR/hf")
    parser.add_argument(
        "--predictors-from",
        help="model directory, or what hf_to_mcore.py made of it, whose layers for multi-token prediction the export "
        "gets as they are; default: those that MCORE_DIR carries",
    )
    parser.add_argument(
        "--base-dir",
        help="where MCORE_DIR holds only adapters (LoRA), the model that they were trained on; default: where it was",
    )
    parser.add_argument(
        "--fp8",
        choices=("blockwise", *MODELOPT_SCHEMES),
        help="quantise the linear layers: in 128x128 blocks, or (per-tensor, nvfp4) through nvidia-modelopt",
    )
    parser.add_argument(
        "--fp8-scales",
        choices=SCALES,
        default="auto",
        help="of --fp8 blockwise, as weight_sync.fp8_scales; default: powers of two with a Blackwell GPU, else float32",
    )
    parser.add_argument(
        "--calibration", type=Path, help="text file, a sample a line: sets modelopt's activation scales"
    )
    parser.add_argument(
        "--max-file-bytes", type=_at_least_one, default=MAX_FILE_BYTES, help="size of a safetensors file"
    )
    _add_conversion_options(parser)
    options = parser.parse_args(arguments)
    if options.fp8 in MODELOPT_SCHEMES and (options.calibration is None or options.verify):
        parser.error(f"--fp8 {options.fp8} needs --calibration FILE, and does not go with --verify")
    if options.fp8 is not None and options.predictors_from is not None:
        parser.error("--predictors-from does not go with --fp8: layers for multi-token prediction are not quantised")
    if options.fp8_scales != "auto" and options.fp8 != "blockwise":
        parser.error(f"--fp8-scales {options.fp8_scales} belongs to --fp8 blockwise")
    return options


def fp8_export(arguments: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """Read fp8_export.py's options; see ``hf_to_mcore``."""
    parser = _parser("fp8_export.py", description)
    parser.add_argument("--hf-dir", required=True, type=Path, help="full-precision Hugging Face directory")
    parser.add_argument("--target", required=True, type=Path, help="directory to make")
    parser.add_argument("--scheme", required=True, choices=sorted(MODELOPT_SCHEMES))
    parser.add_argument("--calibration", required=True, type=Path, help="text file, a sample a line")
    _add_overwrite_option(parser)
    return parser.parse_args(arguments)


def verify(arguments: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """Read verify.py's options; see ``hf_to_mcore``."""
    parser = _parser("verify.py", description)
    parser.add_argument("--hf-dir", required=True, type=Path, help="Hugging Face directory; it may be quantised")
    parser.add_argument("--mcore-dir", required=True, type=Path, help="checkpoint: converted, or saved by the learner")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), help="what one of the two was cast to")
    _add_tolerance_and_family(parser)
    return parser.parse_args(arguments)


def _parser(command: str, description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=command, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _add_conversion_options(parser: argparse.ArgumentParser) -> None:
    """What both directions take."""
    parser.add_argument("--dtype", choices=DTYPES, help="cast to it; default: keep what is stored")
    parser.add_argument("--workers", type=_at_least_one, help="threads that convert; default: by size and cores")
    parser.add_argument("--verify", action="store_true", help="compare logits of both models on random tokens")
    parser.add_argument(
        "--allow-missing-tokenizer", action="store_true", help="convert only the weights where there is none"
    )
    parser.add_argument("--no-checksums", action="store_true", help="do not hold the source against its checksums")
    _add_tolerance_and_family(parser)
    _add_overwrite_option(parser)


def _add_tolerance_and_family(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tolerance", type=float, help="largest difference of the logits that is accepted")
    parser.add_argument(
        "--family",
        action="append",
        default=[],
        metavar="FILE.py:FAMILY",
        help="a model family of your own, or package.module:FAMILY; may be repeated",
    )


def _add_overwrite_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace an existing directory")


def _at_least_one(text: str) -> int:
    """An option's value that is a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def refuse_early(command: str, description: str | None) -> None:
    """End the process where its command line, or what that names, cannot be used by ``command`` (hf_to_mcore, ...).

    Raises:
        SystemExit: as the command's reader above, and with status 1 after one line that says what cannot be used.
    """
    reader, check = _COMMANDS[command]
    options = reader(None, description)
    try:
        check(options)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _check_hf_to_mcore(options: argparse.Namespace) -> None:
    source = Path(options.hf_dir)
    if not source.is_dir():
        if source.exists():
            local_directory(options.hf_dir)  # which says what it is
        return
    check_target(options.mcore_dir.absolute(), [source], overwrite=options.overwrite)
    check_model(source, options.family)
    if not options.no_checksums:
        verify_files(source, contents=False)


def _check_mcore_to_hf(options: argparse.Namespace) -> None:
    check_directory(options.mcore_dir)
    check_target(options.hf_dir.absolute(), [options.mcore_dir], overwrite=options.overwrite)
    if options.calibration is not None:
        calibration_texts(options.calibration)
    if not options.no_checksums:
        verify_files(options.mcore_dir, contents=False)


def _check_fp8_export(options: argparse.Namespace) -> None:
    check_directory(options.hf_dir)
    check_target(options.target.absolute(), [options.hf_dir], overwrite=options.overwrite)
    check_model(options.hf_dir, ())
    calibration_texts(options.calibration)


def _check_verify(options: argparse.Namespace) -> None:
    check_directory(options.hf_dir)
    check_directory(options.mcore_dir)
    check_model(options.hf_dir, options.family)


def check_directory(path: Path) -> None:
    """Raise FileNotFoundError where ``path`` is no directory."""
    if not path.is_dir():
        raise FileNotFoundError(f"{path} {'is a file' if path.exists() else 'does not exist'}")


def check_model(directory: Path, families: Sequence[str]) -> None:
    """Raise ValueError or OSError where config.json or the weights' headers cannot be used."""
    Architecture.from_pretrained(directory, families, dequantized=True)
    check_weight_files(directory)
    weight_files(directory)


def calibration_texts(path: Path) -> list[str]:
    """The lines of a calibration file that have text.

    Raises:
        ValueError: it cannot be read, or has no text.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"calibration file {path} cannot be read: {error}") from error
    if not lines:
        raise InputError(f"calibration file {path} has no text: one sample a line is expected")
    return lines


_Reader = Callable[[Sequence[str] | None, str | None], argparse.Namespace]
_COMMANDS: Mapping[str, tuple[_Reader, Callable[[Any], None]]] = {
    "hf_to_mcore": (hf_to_mcore, _check_hf_to_mcore),
    "mcore_to_hf": (mcore_to_hf, _check_mcore_to_hf),
    "fp8_export": (fp8_export, _check_fp8_export),
    "verify": (verify, _check_verify),
}
