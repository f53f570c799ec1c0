"""Layers of one decoding step of a CPU engine, beside its products and attention: compiled, against torch's operators.

    python benchmarks/layers.py [--requests 128]

The demo's shapes (hidden size 128, 4 heads and 2 KV heads of 32 features, MLP of 384, vocabulary of 512; float32), one
thread. The baselines are SGLang's own methods for a device that it has no kernels for: RMSNorm.forward_native, that of
rotary embedding and SiluAndMul, and sampling_from_probs_torch. Each pair alternates; the medians count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import silu

from sglang_cpu_engine import layers

HIDDEN, HEADS, KV_HEADS, SIZE, MLP, VOCABULARY, CONTEXT, EPSILON = 128, 4, 2, 32, 384, 512, 512, 1e-6


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x + residual
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + EPSILON) * weight, x


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    cos, sin = (each.unsqueeze(-2) for each in cos_sin.index_select(0, positions).chunk(2, dim=-1))
    first, second = x.view(len(x), -1, SIZE).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).reshape(x.shape)


def medians(calls: dict[str, Callable[[], Any]], rounds: int = 400) -> dict[str, float]:
    """Microseconds of a call; they take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    return {name: 1e6 * statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=128)
    requests = parser.parse_args().requests
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x, residual, weight = torch.randn(requests, HIDDEN), torch.randn(requests, HIDDEN), torch.randn(HIDDEN)
    query, key, _ = torch.randn(requests, (HEADS + 2 * KV_HEADS) * SIZE).split(
        [HEADS * SIZE, *[KV_HEADS * SIZE] * 2], -1
    )
    cos_sin, positions = torch.randn(CONTEXT, SIZE), torch.randint(CONTEXT, (requests,))
    gate_up = torch.randn(requests, 2 * MLP)
    probabilities = torch.softmax(3 * torch.randn(requests, VOCABULARY), dim=-1)
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "norm of a sum": (
            lambda: layers.add_rms_norm(x, residual, weight, EPSILON),
            lambda: add_rms_norm(x, residual, weight),
        ),
        "rotary embedding": (
            lambda: [layers.rotate(each, cos_sin, positions, SIZE, False) for each in (query, key)],
            lambda: [rotate(each, cos_sin, positions) for each in (query, key)],
        ),
        "activation": (
            lambda: layers.silu_and_mul(gate_up),
            lambda: silu(gate_up[..., :MLP]) * gate_up[..., MLP:],
        ),
    }
    for compiled, torchs in pairs.values():
        torch.testing.assert_close(compiled(), torchs(), rtol=1e-5, atol=1e-5)
    pairs["sampling"] = (lambda: layers.sample(probabilities), lambda: torch.multinomial(probabilities, 1))
    total = {"compiled": 0.0, "torch": 0.0}
    for name, (compiled, torchs) in pairs.items():
        result = medians({"compiled": compiled, "torch": torchs})
        for way, cost in result.items():
            # Three decoder layers: two norms each and the last one, the others once a layer, sampling once.
            total[way] += cost * {"norm of a sum": 7, "sampling": 1}.get(name, 3)
        print(f"{name}: compiled {result['compiled']:.0f} us, torch {result['torch']:.0f} us")
    ratio = total["compiled"] / total["torch"]
    print(f"a step of 3 decoder layers: {total['compiled']:.0f} us, {total['torch']:.0f} us: {ratio:.2f}")


if __name__ == "__main__":
    main()
