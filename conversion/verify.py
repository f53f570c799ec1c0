"""Whether a Hugging Face directory and a Megatron-Core checkpoint are the same model: their logits on random tokens.

    python conversion/verify.py --hf-dir Qwen2.5-32B --mcore-dir Qwen2.5-32B-mcore

Both run in float32, one after the other, in a process of their own; each has to fit into memory whole.

Exit status: 0 the same model, 1 another or an error, which one line on standard error says, 2 a wrong command line.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, which take seconds or are not there
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from megatron_retool.installation import require_packages
    from megatron_retool.interruption import end_when_interrupted

    require_packages("python conversion/verify.py")
    end_when_interrupted()
    from conversion.files.command_lines import refuse_early

    refuse_early("verify", __doc__)

import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conversion.files import command_lines
from conversion.files.directory import REPORT_NAME
from conversion.files.hf_checkpoint import HFCheckpoint
from conversion.files.quantized_checkpoint import open_source
from conversion.files.workers import run_alone
from conversion.model.architecture import Architecture
from conversion.model.attention_config import normalise_latents
from conversion.model.block_fp8 import (
    SCALE_SUFFIXES,
    are_powers_of_two,
    dequantize_blockwise,
    is_quantized,
    round_to_blocks,
)
from conversion.model.low_precision import quantization_of
from conversion.model.mapping import to_hf, to_mcore
from conversion.model.weight_map import WeightMap
from megatron_retool.errors import InputError, UserError
from megatron_retool.interruption import run_interruptible

NUM_SEQUENCES = 2
SEQUENCE_LENGTH = 48
RELATIVE_TOLERANCE = 1e-4
"""Of the largest logit. float32 round-off of a deep model stays well below it, a misplaced tensor far above."""


class VerificationError(InputError):
    """The two models compute different logits. The message says by how much."""


@dataclass(frozen=True)
class _Comparison:
    architecture: Architecture
    hf_dir: Path
    mcore_dir: Path
    dtype: torch.dtype | None
    fp8: bool
    dequantized: bool


def verify_logits(
    architecture: Architecture,
    hf_dir: str | Path,
    mcore_dir: str | Path,
    dtype: torch.dtype | None = None,
    tolerance: float | None = None,
    *,
    fp8: bool = False,
    dequantized: bool = False,
) -> float:
    """The largest absolute difference of the two models' logits over random tokens.

    Args:
        hf_dir: config and weights; with ``fp8``, block-quantised ones. The Megatron-Core model's weights are then
            quantised and dequantised too, so that the two stay equal. With ``dequantized`` they are what the
            Megatron-Core model was converted from, and both are compared in full precision.
        mcore_dir: distributed checkpoint of the same model.
        dtype: what one of the two was cast to: both are rounded to it before they run.
        tolerance: absolute; None: ``RELATIVE_TOLERANCE`` of the largest logit, or of 1 where that is smaller.

    Raises:
        VerificationError: the difference exceeds the tolerance or is not a number.
    """
    comparison = _Comparison(architecture, Path(hf_dir), Path(mcore_dir), dtype, fp8, dequantized)
    difference, largest = run_alone(_compare, comparison)
    if tolerance is None:
        tolerance = RELATIVE_TOLERANCE * max(largest, 1.0)
    if not difference <= tolerance:
        raise VerificationError(
            f"verification failed: the logits of {hf_dir} and {mcore_dir} differ by up to {difference:.3e}, tolerance "
            f"{tolerance:.3e} (largest logit {largest:.3g})"
        )
    return float(difference)


def _compare(comparison: _Comparison) -> tuple[float, float]:
    from transformers.utils.logging import disable_progress_bar

    # Of libraries about each other; this process does nothing else, and errors are raised all the same.
    warnings.simplefilter("ignore", FutureWarning)
    disable_progress_bar()
    comparison.architecture.declaration  # noqa: B018  (a family's file may make its classes known to transformers)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(comparison.architecture.vocab_size, (NUM_SEQUENCES, SEQUENCE_LENGTH), generator=generator)
    expected = _hf_logits(comparison, ids)
    result = _mcore_logits(comparison, ids)
    return float((expected - result).abs().max()), float(expected.abs().max())


@torch.no_grad()
def _hf_logits(comparison: _Comparison, ids: Tensor) -> Tensor:
    """float32 [NUM_SEQUENCES, SEQUENCE_LENGTH - 1, V]: the logits that predict every token but the first."""
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = comparison.architecture
    of_another_name = architecture.hf_config.get("model_type") != architecture.family
    if comparison.fp8 or comparison.dequantized or of_another_name:
        config = AutoConfig.for_model(**{**architecture.hf_config, "model_type": architecture.family})
        model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
        if comparison.fp8:
            tensors = dequantized(comparison.hf_dir)
        else:
            source = open_source(comparison.hf_dir)
            tensors = {name: source.read(name) for name in WeightMap(architecture).hf_names}
        model = model_class.from_pretrained(None, config=config, state_dict=tensors, dtype=torch.float32).eval()
    else:
        model = AutoModelForCausalLM.from_pretrained(
            comparison.hf_dir, dtype=torch.float32, trust_remote_code=False
        ).eval()
    normalise_latents(model)
    if comparison.dtype is not None:
        for parameter in model.parameters():  # a router's bias stays in float32
            parameter.copy_(parameter.to(comparison.dtype))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return model.to(device)(ids.to(device)).logits[:, :-1].float().cpu()


def dequantized(hf_dir: Path) -> dict[str, Tensor]:
    """Every tensor of a block-FP8 directory, the quantised ones as the float32 matrices that they stand for."""
    checkpoint = HFCheckpoint(hf_dir)
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors if not name.endswith(SCALE_SUFFIXES)}
    scales = {
        name: checkpoint.read(name + suffix)
        for name in tensors
        for suffix in SCALE_SUFFIXES
        if name + suffix in checkpoint.tensors
    }
    return {
        name: dequantize_blockwise(tensor, scales[name]) if name in scales else tensor
        for name, tensor in tensors.items()
    }


@torch.no_grad()
def _mcore_logits(comparison: _Comparison, ids: Tensor) -> Tensor:
    """The same of the Megatron-Core model, built as the learner builds it."""
    from megatron_retool.config import load_config
    from megatron_retool.learner import parallel
    from megatron_retool.learner.checkpoint.load import load_model_weights
    from megatron_retool.learner.model import build_model_chunks
    from megatron_retool.learner.packing import Packer
    from megatron_retool.learner.precision import acceleration_for
    from megatron_retool.learner.specs import build_transformer_config

    learner = load_config(overrides=["learner.dtype=float32"]).learner
    architecture = comparison.architecture
    layout = learner.layout(architecture)
    device = parallel.resolve_device(learner.device)
    acceleration = acceleration_for(learner)
    parallel.initialize(layout, device, seed=0)
    chunks = build_model_chunks(
        architecture, build_transformer_config(architecture, learner, layout, acceleration), acceleration
    )
    load_model_weights(chunks, architecture, comparison.mcore_dir)
    (model,) = chunks
    normalise_latents(model)
    if comparison.dtype is not None:
        for parameter in model.parameters():
            parameter.copy_(parameter.to(comparison.dtype))
    if comparison.fp8:
        _quantize_and_dequantize(model, architecture, power_of_two=_stored_powers_of_two(comparison.hf_dir))
    model.eval()

    packer = Packer(layout, ids.numel(), 0, 0, device, attention_buckets=acceleration.packs_attention(architecture))
    sequences, length = ids.shape
    logits = torch.empty(sequences * (length - 1), architecture.vocab_size)
    for micro_batch in packer.micro_batches(_batch(ids)):
        positions = torch.from_numpy(micro_batch.response_positions)[micro_batch.slots.cpu()]
        logits[positions] = model(micro_batch, logits=True)[:, : architecture.vocab_size].float().cpu()
    parallel.shutdown()
    return logits.view(sequences, length - 1, -1)


def _stored_powers_of_two(hf_dir: Path) -> bool:
    """Of which kind the scales of a block-FP8 directory are."""
    checkpoint = HFCheckpoint(hf_dir)
    return all(are_powers_of_two(checkpoint.read(name)) for name in checkpoint.tensors if name.endswith(SCALE_SUFFIXES))


def _quantize_and_dequantize(model: torch.nn.Module, architecture: Architecture, *, power_of_two: bool) -> None:
    from megatron_retool.learner.weights import global_parameters

    weight_map = WeightMap(architecture)
    for name, parameter in global_parameters([model]):
        # Vocabularies, which the model pads, are never quantised.
        if is_quantized(weight_map[name]):
            rounded = [
                round_to_blocks(tensor, power_of_two=power_of_two)
                for tensor in to_hf(weight_map[name], parameter).values()
            ]
            parameter.copy_(to_mcore(weight_map[name], rounded))


def _batch(ids: Tensor) -> Any:
    """One trajectory for each row: a prompt of one token, and the rest as the response."""
    import numpy as np

    from megatron_retool.trajectory import FinishReason, Trajectory, TrajectoryBatch

    length = ids.shape[1] - 1
    return TrajectoryBatch.from_trajectories(
        [
            Trajectory(
                prompt_ids=row[:1].numpy(),
                response_ids=row[1:].numpy(),
                loss_mask=np.ones(length, np.bool_),
                rollout_log_probs=np.zeros(length, np.float32),
                turn_ids=np.zeros(length, np.int16),
                weight_versions=np.zeros(length, np.int32),
                group_id=number,
                index=0,
                finish_reason=FinishReason.LENGTH,
            )
            for number, row in enumerate(ids)
        ]
    )


def _was_dequantized(mcore_dir: Path) -> bool:
    """Whether a checkpoint was converted from quantised weights, as its report says; the learner's have none."""
    report = mcore_dir / REPORT_NAME
    return report.is_file() and bool(json.loads(report.read_text(encoding="utf-8")).get("dequantized"))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status: 0 the same model, 1 with one line on standard error that says why."""
    options = command_lines.verify(arguments, __doc__)
    learner = options.mcore_dir / "learner"
    try:
        architecture = Architecture.from_pretrained(options.hf_dir, options.family, dequantized=True)
        hf_config = json.loads((options.hf_dir / "config.json").read_text(encoding="utf-8"))
        source = quantization_of(options.hf_dir, hf_config)
        exported = source is not None and source.is_block_fp8() and not _was_dequantized(options.mcore_dir)
        difference = verify_logits(
            architecture,
            options.hf_dir,
            learner if learner.is_dir() else options.mcore_dir,
            options.dtype and getattr(torch, options.dtype),
            options.tolerance,
            fp8=exported,
            dequantized=source is not None and not exported,
        )
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"the same model: the logits differ by at most {difference:.3e}")
    return 0


if __name__ == "__main__":
    sys.exit(run_interruptible(main))
