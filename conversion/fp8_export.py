"""FP8 and NVFP4 checkpoints for inference.

``mcore_to_hf.py --fp8 blockwise`` makes checkpoints of ``model.block_fp8``'s scheme.  ``export_with_modelopt`` makes
per-tensor FP8 and NVFP4 checkpoints through nvidia-modelopt, which calibrates activation scales on sample tokens.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from conversion.files.directory import new_directory
from conversion.files.hf_checkpoint import TensorSpec, copy_companions
from conversion.files.workers import run_jobs
from conversion.model.block_fp8 import BLOCK, Form


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
        raise ValueError(f"scheme {scheme!r} is not one of {', '.join(MODELOPT_FORMATS)}")
    samples = [list(ids) for ids in calibration]
    if not samples:
        raise ValueError("calibration holds no sample: activation scales cannot be set")
    if importlib.util.find_spec("modelopt") is None:
        raise RuntimeError("per-tensor FP8 and NVFP4 need nvidia-modelopt: pip install nvidia-modelopt")
    with new_directory(Path(target), overwrite=overwrite) as temporary:
        job = _ModeloptJob(Path(hf_dir), temporary, MODELOPT_FORMATS[scheme], tuple(tuple(ids) for ids in samples))
        # modelopt patches Megatron-Core and transformers where it is imported: that stays in a process of its own.
        run_jobs(_run_modelopt, [job], lambda _: None)
        written = {path.name for path in temporary.iterdir()}
        copy_companions(Path(hf_dir), temporary, keep=lambda name: name not in written)


@dataclass(frozen=True)
class _ModeloptJob:
    hf_dir: Path
    target: Path
    quantization: str
    samples: tuple[tuple[int, ...], ...]


def _run_modelopt(job: _ModeloptJob, _: Callable[[int], None]) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job.hf_dir, dtype="auto").eval()
    if torch.cuda.is_available():
        model = model.cuda()

    def forward(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for ids in job.samples:
                model(torch.tensor([ids], device=next(model.parameters()).device))

    mtq.quantize(model, getattr(mtq, job.quantization), forward)
    export_hf_checkpoint(model, export_dir=str(job.target))


def read_calibration(path: str | Path, hf_dir: str | Path, max_tokens: int = 512) -> list[list[int]]:
    """Token ids of a text file's lines, one sample a line, cut at ``max_tokens``.

    Raises:
        ValueError: the file does not exist or has no text.
    """
    from transformers import AutoTokenizer

    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"calibration file {path} cannot be read: {error}") from error
    tokenizer = AutoTokenizer.from_pretrained(hf_dir)
    samples = [ids[:max_tokens] for line in lines if (ids := tokenizer(line)["input_ids"])]
    if not samples:
        raise ValueError(f"calibration file {path} has no text: one sample a line is expected")
    return samples
