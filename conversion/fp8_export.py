"""Per-tensor FP8 and NVFP4 checkpoints for inference, of a Hugging Face directory.

    python conversion/fp8_export.py --hf-dir export --target export-fp8 --scheme per-tensor --calibration samples.txt

nvidia-modelopt quantises, and calibrates activation scales on the samples.  FP8 in 128x128 blocks needs no calibration
and is made from a Megatron-Core checkpoint: mcore_to_hf.py --fp8 blockwise, which also takes this command's schemes.

Exit status: 0 done, 1 an error, which one line on standard error says, 2 the command line is not understood.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, which take seconds or are not there
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from megatron_retool.installation import require_packages
    from megatron_retool.interruption import end_when_interrupted

    require_packages("python conversion/fp8_export.py")
    end_when_interrupted()
    from conversion.files.command_lines import refuse_early

    refuse_early("fp8_export", __doc__)

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from conversion.files import command_lines
from conversion.files.companions import copy_companions
from conversion.files.directory import new_directory
from conversion.files.hf_checkpoint import TensorSpec
from conversion.files.workers import run_alone
from conversion.model.attention_config import normalise_latents
from conversion.model.block_fp8 import BLOCK, Form
from megatron_retool.errors import InputError, OperationError, UserError
from megatron_retool.interruption import run_interruptible


def quantized_specs(spec: TensorSpec, form: Form) -> list[TensorSpec]:
    """What one weight becomes in a block-FP8 checkpoint: the e4m3 weight and its scales."""
    rows, columns = spec.shape
    return [
        TensorSpec(spec.name, spec.shape, torch.float8_e4m3fn),
        TensorSpec(spec.name + form.suffix, (rows // BLOCK, columns // BLOCK), torch.float32),
    ]


MODELOPT_FORMATS = {"fp8": "FP8_DEFAULT_CFG", "nvfp4": "NVFP4_DEFAULT_CFG"}


def export_with_modelopt(
    hf_dir: str | Path,
    target: str | Path,
    scheme: str,
    calibration: Iterable[Sequence[int]],
    *,
    overwrite: bool = False,
) -> None:
    """Quantise a Hugging Face directory with nvidia-modelopt and write a checkpoint that engines load.

    Args:
        hf_dir: full-precision weights, config and tokenizer.
        scheme: "fp8" (per tensor) or "nvfp4".
        calibration: token ids of sample texts; a few hundred of them set the activation scales.

    Raises:
        RuntimeError: nvidia-modelopt is not installed.
        ValueError: ``scheme`` is unknown, or there is nothing to calibrate on.
    """
    if scheme not in MODELOPT_FORMATS:
        raise InputError(f"scheme {scheme!r} is not one of {', '.join(MODELOPT_FORMATS)}")
    samples = [list(ids) for ids in calibration]
    if not samples:
        raise InputError("calibration holds no sample: activation scales cannot be set")
    if importlib.util.find_spec("modelopt") is None:
        raise OperationError("per-tensor FP8 and NVFP4 need nvidia-modelopt: pip install nvidia-modelopt")
    with new_directory(Path(target), sources=[Path(hf_dir)], overwrite=overwrite) as temporary:
        job = _ModeloptJob(Path(hf_dir), temporary, MODELOPT_FORMATS[scheme], tuple(tuple(ids) for ids in samples))
        # modelopt patches Megatron-Core and transformers where it is imported: that stays in a process of its own.
        run_alone(_run_modelopt, job)
        written = {path.name for path in temporary.iterdir()}
        copy_companions(Path(hf_dir), temporary, keep=lambda name: name not in written)


@dataclass(frozen=True)
class _ModeloptJob:
    hf_dir: Path
    target: Path
    quantization: str
    samples: tuple[tuple[int, ...], ...]


def _run_modelopt(job: _ModeloptJob) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    model = normalise_latents(AutoModelForCausalLM.from_pretrained(job.hf_dir, dtype="auto", trust_remote_code=False))
    model = model.eval()
    if torch.cuda.is_available():
        model = model.cuda()

    def forward(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for ids in job.samples:
                model(torch.tensor([ids], device=next(model.parameters()).device))

    mtq.quantize(model, getattr(mtq, job.quantization), forward)
    export_hf_checkpoint(model, export_dir=str(job.target))


def read_calibration(path: Path, hf_dir: str | Path, max_tokens: int = 512) -> list[list[int]]:
    """Token ids of a text file's lines, one sample a line, cut at ``max_tokens``.

    Raises:
        ValueError: the file does not exist or has no text.
    """
    from transformers import AutoTokenizer

    lines = command_lines.calibration_texts(path)
    tokenizer = AutoTokenizer.from_pretrained(hf_dir, trust_remote_code=False)
    samples = [ids[:max_tokens] for line in lines if (ids := tokenizer(line)["input_ids"])]
    if not samples:
        raise InputError(f"calibration file {path} has no text: one sample a line is expected")
    return samples


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status: 0 done, 1 with one line on standard error that says why not."""
    options = command_lines.fp8_export(arguments, __doc__)
    try:
        if not (options.hf_dir / "config.json").is_file():
            raise FileNotFoundError(f"{options.hf_dir} is no Hugging Face directory: config.json is missing")
        samples = read_calibration(options.calibration, options.hf_dir)
        scheme = command_lines.MODELOPT_SCHEMES[options.scheme]
        export_with_modelopt(options.hf_dir, options.target, scheme, samples, overwrite=options.overwrite)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.target}: {options.scheme}, calibrated on {len(samples)} samples")
    return 0


if __name__ == "__main__":
    sys.exit(run_interruptible(main))
