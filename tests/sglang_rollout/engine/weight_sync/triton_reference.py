"""Runs SGLang's own Triton kernels in Triton's interpreter and prints what they compute, as JSON. Run as a script.

The kernels are loaded from their files: importing sglang takes seconds and wants a platform.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

if __name__ == "__main__":
    # Not where a test imports the inputs: the processes that this one starts would inherit it and compile nothing.
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton


def kernels(name: str) -> ModuleType:
    root = Path(importlib.util.find_spec("sglang").origin).parent / "kernels" / "ops"
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), root / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hashed_tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(5),
        torch.randn(3, 8192),
        torch.randn(9001).bfloat16(),
        torch.randn(7, 3).half(),
        torch.randint(0, 255, (8195 * 4 + 3,), dtype=torch.uint8),
    ]


def tensor_hash(tensor: torch.Tensor) -> int:
    module = kernels("memory/gpu_tensor_hash")
    raw = tensor.reshape(-1).view(torch.uint8)
    raw = torch.cat([raw, raw.new_zeros(-raw.numel() % 4)])
    words, tile, seed = raw.view(torch.uint32), 8192, 0x243F6A88
    partial = torch.empty(triton.cdiv(words.numel(), tile), dtype=torch.uint64)
    module.hash_tiles32_kernel_blocked[(partial.numel(),)](
        words, partial, words.numel(), seed1=seed, seed2=((seed * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF,
        FM_C1=module.FMIX32_C1, FM_C2=module.FMIX32_C2, POS_A=module.POS_C1, POS_B=module.POS_C2,
        TILE=tile, BLOCK=256, USE_CG=False,
    )  # fmt: skip
    if partial.numel() > 1:
        total = torch.empty(1, dtype=torch.uint64)
        module.add_tree_reduce_u64_kernel[(1,)](partial, total, partial.numel(), CHUNK=1024)
        partial = total
    return module._final_splitmix64(int(partial.item()))


def murmur_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    seeds = torch.tensor([0, 42, 2**40 + 7, 2**63 - 1], dtype=torch.int64).to(torch.uint64)
    return seeds, torch.tensor([0, 5, 1000, 2**20]), torch.arange(300)


def murmur() -> list[list[int]]:
    module = kernels("sampling/murmur_hash")
    seeds, positions, columns = murmur_inputs()
    hashed = torch.empty((len(seeds), len(columns)), dtype=torch.uint32)
    module.murmur_hash32_kernel[(len(seeds), 1)](
        seeds, positions, columns, hashed, len(seeds), len(columns), BLOCK_SIZE=512
    )
    return hashed.tolist()


if __name__ == "__main__":
    json.dump({"hashes": [tensor_hash(tensor) for tensor in hashed_tensors()], "murmur": murmur()}, sys.stdout)
