"""How far the products of a recipe move a model's numbers: imitated in float32 on a CPU, against the model itself.

Two of the four layers of the doctor's tiny dense model compute every linear layer's three products with rounded
operands, as learner.fp8.recipe=tensorwise and nvfp4 have Transformer Engine do with the first and last layer in
bfloat16. Its recipes are: one scale a tensor, e4m3 forwards and e5m2 for gradients; and (arXiv:2509.25149) e2m1 in
blocks of 16 with e4m3 scales under one of the tensor, weights in blocks of 16 x 16, gradients rounded at random, and
a random Hadamard transform before the product that makes the weight's gradient. A text stands in a micro-batch's
place.

    python benchmarks/low_precision_products.py
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_retool.algorithms.log_prob_comparison import LogProbComparison
from megatron_retool.parity.doctor.model import DENSE, build, compute, mini_batch

BLOCK = 16
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3_MAX, E5M2_MAX = 448.0, 57344.0
ROUNDED_LAYERS = re.compile(r"model\.layers\.[12]\.")


def to_fp8(x: Tensor, dtype: torch.dtype, largest: float) -> Tensor:
    """``x`` as FP8 with one scale holds it."""
    scale = largest / x.abs().max().clamp_min(1e-30)
    return (x * scale).to(dtype).float() / scale


def to_e2m1(x: Tensor, at_random: bool) -> Tensor:
    """``x`` to the nearest value of e2m1, or at random to one of its two neighbours, by its distance from them."""
    magnitude = x.abs().clamp(max=6.0)
    below = (torch.bucketize(magnitude.contiguous(), E2M1, right=True) - 1).clamp(0, 6)
    low, high = E2M1[below], E2M1[below + 1]
    share = (magnitude - low) / (high - low)
    return x.sign() * torch.where(share > (torch.rand_like(share) if at_random else 0.5), high, low)


def to_nvfp4(x: Tensor, square: bool = False, at_random: bool = False) -> Tensor:
    """``x`` [rows, columns] as NVFP4 holds it, with a scale for 16 columns, or for 16 rows of 16 columns."""
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    largest = blocks.abs().amax((1, 3) if square else 3, keepdim=True)
    of_tensor = x.abs().max().clamp_min(1e-30) / (6 * E4M3_MAX)
    scales = (largest / 6 / of_tensor).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float() * of_tensor
    result = torch.where(scales > 0, to_e2m1(blocks / scales.clamp_min(1e-30), at_random) * scales, 0.0)
    return result.view(padded.shape)[:rows, :columns]


def hadamard(seed: int = 0) -> Tensor:
    """A random Hadamard matrix [16, 16]: orthogonal, its rows' signs drawn."""
    matrix = torch.ones(1, 1)
    while len(matrix) < BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(0, 2, (BLOCK,), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1.0
    return matrix / BLOCK**0.5 * signs


def transformed(x: Tensor, matrix: Tensor) -> Tensor:
    """``x`` [tokens, features], 16 tokens at a time multiplied by ``matrix``."""
    blocks = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % BLOCK)).view(-1, BLOCK, x.shape[1])
    return (matrix @ blocks).reshape(-1, x.shape[1])


class Fp8Product(torch.autograd.Function):
    """A linear layer whose three products have FP8 operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x, weight = (to_fp8(each, torch.float8_e4m3fn, E4M3_MAX) for each in (x, weight))
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        gradient = to_fp8(gradient, torch.float8_e5m2, E5M2_MAX)
        return gradient @ weight, gradient.t() @ x


class Nvfp4Product(torch.autograd.Function):
    """A linear layer whose three products have NVFP4 operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return to_nvfp4(x) @ to_nvfp4(weight, square=True).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (x, weight), matrix = ctx.saved_tensors, hadamard()
        of_input = to_nvfp4(gradient, at_random=True) @ to_nvfp4(weight, square=True)
        left = to_nvfp4(transformed(gradient, matrix).t(), at_random=True)
        return of_input, left @ to_nvfp4(transformed(x, matrix).t()).t()


def numbers(product: Callable[[Tensor, Tensor], Tensor] | None) -> dict[str, Any]:
    """The model's log-probs, loss and gradients; None: in float32 throughout."""
    torch.manual_seed(0)
    model = build(DENSE)
    for name, module in model.named_modules():
        if product is not None and isinstance(module, torch.nn.Linear) and ROUNDED_LAYERS.match(name):
            module.forward = lambda x, weight=module.weight: product(x.flatten(0, -2), weight).view(*x.shape[:-1], -1)
    return compute(model, mini_batch(), DENSE)


def errors(found: dict[str, Any], exact: dict[str, Any]) -> tuple[float, float]:
    """Mean difference of log-probs in their spread, and of the worst tensor's gradient in its norm."""
    batch = mini_batch()
    sampled = batch.loss_mask
    ids = [0, *batch.response_ids[sampled].tolist()]
    log_probs = LogProbComparison(ids, found["log_probs"][sampled], exact["log_probs"][sampled]).relative
    gradients = exact["gradients"]
    apart = [(found["gradients"][name] - gradient).norm() / gradient.norm() for name, gradient in gradients.items()]
    return log_probs, float(np.max(apart))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    exact = numbers(None)
    fp8, nvfp4 = (errors(numbers(product.apply), exact) for product in (Fp8Product, Nvfp4Product))
    for what, of_fp8, of_nvfp4 in zip(("log-probs", "worst gradient"), fp8, nvfp4, strict=True):
        print(f"{what}: nvfp4 {of_nvfp4:.3f}, FP8 tensorwise {of_fp8:.3f}: ratio {of_nvfp4 / of_fp8:.2f}")


if __name__ == "__main__":
    main()
