"""FP8 and NVFP4 checkpoints for inference.

``quantize_blockwise`` is DeepSeek-V3's scheme (arXiv:2412.19437, section 3.3.2): e4m3 weights with one float32 scale
for each 128 x 128 block, activations quantised by the engine as it runs.  SGLang and transformers read the checkpoints
that ``mcore_to_hf.py --fp8 blockwise`` makes with it.  ``export_with_modelopt`` makes per-tensor FP8 and NVFP4
checkpoints through nvidia-modelopt, which calibrates activation scales on sample tokens.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conversion.files.directory import new_directory
from conversion.files.hf_checkpoint import TensorSpec, copy_companions
from conversion.files.workers import run_jobs
from conversion.model.weight_map import Mapping, WeightMap

BLOCK = 128
E4M3_MAX = 448.0
SCALE_SUFFIX = "_scale_inv"
"""A weight's scales carry its name with this suffix: ``….q_proj.weight_scale_inv``."""


def is_quantized(mapping: Mapping) -> bool:
    """Whether the scheme quantises the parameter: linear layers, but not embedding, router and output layer.

    Both sides of every matrix have to be multiples of 128: transformers takes the block size from the ratio of the
    shapes and would otherwise scale with the wrong blocks, and engines refuse the checkpoint.
    """
    if mapping.tp_dim is None or mapping.layer is None or len(mapping.mcore_shape) != 2:
        return False
    return all(size % BLOCK == 0 for shape in mapping.hf_shapes for size in shape)


def quantized_names(weight_map: WeightMap) -> frozenset[str]:
    """Hugging Face names of the weights that the scheme quantises.

    Raises:
        ValueError: none, because the model's sizes are not multiples of 128.
    """
    names = frozenset(name for mapping in weight_map if is_quantized(mapping) for name in mapping.hf_names)
    if not names:
        architecture = weight_map.architecture
        raise ValueError(
            f"no linear layer can be quantised in {BLOCK} x {BLOCK} blocks: hidden_size={architecture.hidden_size} and "
            f"the other sizes of this {architecture.family} model are not multiples of {BLOCK}"
        )
    return names


def quantize_blockwise(weight: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Quantise a matrix in blocks of ``block`` x ``block``; blocks at the edges may be smaller.

    Args:
        weight: [out, in], any floating dtype.

    Returns:
        (quantised float8_e4m3fn [out, in], scale float32 [ceil(out / block), ceil(in / block)]) with
        ``weight = quantised * scale``, block by block: the scale is the block's largest magnitude / 448. An all-zero
        block has scale 1.
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % block, 0, -rows % block))
    blocks = padded.view(padded.shape[0] // block, block, padded.shape[1] // block, block)
    largest = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(largest > 0, largest / E4M3_MAX, torch.ones_like(largest))
    # Rounding in the division may land a hair above 448, which e4m3fn turns into NaN.
    scaled = (blocks / scale[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX)
    quantized = scaled.view(padded.shape)[:rows, :columns].to(torch.float8_e4m3fn).contiguous()
    return quantized, scale


def dequantize_blockwise(quantized: Tensor, scale: Tensor, block: int = BLOCK) -> Tensor:
    """The float32 matrix that ``quantize_blockwise``'s result stands for."""
    rows, columns = quantized.shape
    full = scale.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    return quantized.float() * full


def quantized_specs(spec: TensorSpec) -> list[TensorSpec]:
    """What one weight becomes in a block-FP8 checkpoint: the e4m3 weight and its scales."""
    rows, columns = spec.shape
    return [
        TensorSpec(spec.name, spec.shape, torch.float8_e4m3fn),
        TensorSpec(spec.name + SCALE_SUFFIX, (rows // BLOCK, columns // BLOCK), torch.float32),
    ]


def quantize_named(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """``quantize_blockwise`` under the names of a block-FP8 checkpoint.

    At a weight sync: for the names that ``quantized_names`` gives, and for no others.
    """
    quantized, scale = quantize_blockwise(weight)
    return [(name, quantized), (name + SCALE_SUFFIX, scale)]


def blockwise_quantization_config(weight_map: WeightMap) -> dict[str, Any]:
    """config.json's ``quantization_config``: the scheme, and the linear layers that stay as they are."""
    kept = {
        name.removesuffix(".weight")
        for mapping in weight_map
        if mapping.layer is not None and len(mapping.mcore_shape) == 2 and not is_quantized(mapping)
        for name in mapping.hf_names
    }
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", *sorted(kept)],
    }


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
