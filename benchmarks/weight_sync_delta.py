"""What a weight sync of only the changes sends, beside whole weights, after steps of Adam's size.

    python benchmarks/weight_sync_delta.py                      # Qwen2.5-0.5B's shapes, learning rate 1e-6, bfloat16
    python benchmarks/weight_sync_delta.py --lr 1e-4 --dtype float32

Weights are normal with the deviation of a fresh model; every element of the float32 main weights moves by the learning
rate up or down, as in Adam's first step, the largest that it makes. It prints bytes and seconds of the sender for each
step, and the ratio to whole weights. No engine takes part: tests/sglang_rollout has those.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sglang_rollout.engine.weight_sync.delta import DeltaEncoder


def shapes(layers: int, hidden: int, intermediate: int, vocabulary: int) -> dict[str, tuple[int, int]]:
    result = {"embed": (vocabulary, hidden)}
    for layer in range(layers):
        result |= {
            f"{layer}.q": (hidden, hidden),
            f"{layer}.k": (128, hidden),
            f"{layer}.v": (128, hidden),
            f"{layer}.o": (hidden, hidden),
            f"{layer}.gate": (intermediate, hidden),
            f"{layer}.up": (intermediate, hidden),
            f"{layer}.down": (hidden, intermediate),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the engines")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--intermediate", type=int, default=4864)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    generator = torch.Generator().manual_seed(0)
    main_weights = {
        name: 0.02 * torch.randn(shape, generator=generator)
        for name, shape in shapes(options.layers, options.hidden, options.intermediate, options.vocabulary).items()
    }
    encoder = DeltaEncoder()
    whole = 0
    for step in range(options.steps + 1):
        if step:
            for weight in main_weights.values():
                weight += options.lr * (2 * torch.randint(0, 2, weight.shape, generator=generator) - 1)
        encoder.begin({step - 1})
        began, sent = time.perf_counter(), 0
        for name, weight in main_weights.items():
            sent += sum(part.nbytes for _, part in encoder.encode([(name, weight.to(dtype))]))
        seconds = time.perf_counter() - began
        encoder.end(step)
        whole = whole or sent
        print(
            f"step {step}: {sent / 1e6:8.1f} MB, {seconds:.2f} s, ratio {sent / whole:.4f} (changes to whole weights)"
        )


if __name__ == "__main__":
    main()
