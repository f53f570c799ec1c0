"""What transformers makes, in float64, of sequences whose targets are given: log-probs, losses, gradients, one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conversion.model.architecture import Architecture
from megatron_retool.parity.admission.shrink import VOCAB_SIZE
from megatron_retool.target_sequences import OptimizerStep, TargetSequence, TokenLoss
from tests.kit.adapter_reference import Tensors, _with_peft, _with_weights, random_factors, small_model

STEP = OptimizerStep(learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-4, weight_decay=0.1, grad_clip_norm=0.5)
CROSS_ENTROPY, PPO = TokenLoss("cross_entropy"), TokenLoss("ppo", {"clip_low": 0.7, "clip_high": 1.3})
GSPO = TokenLoss("gspo", {"clip_low": 0.9, "clip_high": 1.1})
WIDTHS = [(17, None), (9, 3), (31, 1), (1, None), (23, 2), (12, None)]
"""(tokens, targets of each) of the sequences for cross-entropy."""
PAIRS = [(14, None), (27, None), (6, None), (40, None), (3, None)]


def random_sequences(
    lengths: Sequence[tuple[int, int | None]], seed: int, vocab_size: int = VOCAB_SIZE
) -> list[TargetSequence]:
    """Sequences with targets that are not their own next tokens, and the columns of every loss."""
    rng = np.random.default_rng(seed)
    found = []
    for length, width in lengths:
        shape = (length,) if width is None else (length, width)
        columns = {
            "weights": rng.normal(0, 1, shape),
            "advantages": rng.normal(0, 1, shape) * (rng.random(shape) < 0.8),
            "rollout_log_probs": -np.log(vocab_size) + rng.normal(0, 0.3, shape),
            "sequence_ratio_mask": rng.random(shape) < 0.8,
        }
        columns = {name: column.astype(np.float32) for name, column in columns.items()}
        tokens = rng.integers(0, vocab_size, length)
        found.append(TargetSequence(tokens, rng.integers(0, vocab_size, shape), columns))
    return found


def target_log_probs(model: Callable[..., Any], sequence: TargetSequence) -> torch.Tensor:
    """float64 in the shape of the targets, with a gradient."""
    logits = model(torch.from_numpy(sequence.tokens)[None], use_cache=False).logits[0]
    targets = torch.from_numpy(sequence.targets.reshape(len(sequence.tokens), -1))
    return torch.log_softmax(logits, -1).gather(-1, targets).reshape(sequence.targets.shape)


def elementwise_loss(log_probs: torch.Tensor, sequence: TargetSequence, loss: TokenLoss) -> torch.Tensor:
    """The formulas of cross-entropy, PPO and GSPO, of one sequence."""
    column = {name: torch.from_numpy(values).double() for name, values in sequence.columns.items()}
    if loss.name == "cross_entropy":
        return -column["weights"] * log_probs
    log_ratio = log_probs - column["rollout_log_probs"]
    if loss.name == "gspo":
        mean = (log_ratio * column["sequence_ratio_mask"]).sum() / column["sequence_ratio_mask"].sum().clamp(min=1)
        log_ratio = mean.detach() + log_ratio - log_ratio.detach()
    ratio = log_ratio.exp()
    clipped = ratio.clamp(loss.arguments["clip_low"], loss.arguments["clip_high"])
    return -torch.minimum(ratio * column["advantages"], clipped * column["advantages"])


def write_target_reference(family: str, directory: Path) -> None:
    """``directory``/hf, a model, and ``targets.pt``: random factors, what two calls and one without a gradient answer,
    the gradients that the two leave, their norm, and the factors after ``STEP``."""
    model = small_model(family)
    model.save_pretrained(directory / "hf")
    architecture = Architecture.from_pretrained(directory / "hf")
    factors = random_factors(architecture)
    call, leaves, _ = (_with_weights if architecture.is_moe else _with_peft)(model.double(), factors)
    answers = []
    for lengths, seed, loss in ((WIDTHS, 1, CROSS_ENTROPY), (PAIRS, 2, PPO), (PAIRS, 3, GSPO)):
        sequences = random_sequences(lengths, seed)
        log_probs = [target_log_probs(call, sequence) for sequence in sequences]
        losses = [elementwise_loss(*each, loss) for each in zip(log_probs, sequences, strict=True)]
        answers.append({"log_probs": log_probs, "losses": losses})
    total = sum(each.sum() for answer in answers[:2] for each in answer["losses"])
    total.backward(inputs=list(leaves.values()))
    gradients = {name: leaf.grad.clone() for name, leaf in leaves.items()}
    norm = float(torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt())
    detached = [{key: [each.detach() for each in values] for key, values in answer.items()} for answer in answers]
    torch.save(
        {
            "factors": factors,
            "answers": detached,
            "gradients": gradients,
            "norm": norm,
            "stepped": adamw_step(factors, gradients, norm, STEP),
        },
        directory / "targets.pt",
    )


def adamw_step(factors: Tensors, gradients: Tensors, norm: float, step: OptimizerStep) -> Tensors:
    """Factors after torch's AdamW, in float64."""
    leaves = {name: torch.nn.Parameter(factor.double()) for name, factor in factors.items()}
    scale = min(1.0, step.grad_clip_norm / (norm + 1e-6)) if step.grad_clip_norm else 1.0
    for name, leaf in leaves.items():
        leaf.grad = gradients[name] * scale
    torch.optim.AdamW(
        leaves.values(),
        lr=step.learning_rate,
        betas=(step.beta1, step.beta2),
        eps=step.eps,
        weight_decay=step.weight_decay,
    ).step()
    return {name: leaf.detach() for name, leaf in leaves.items()}
