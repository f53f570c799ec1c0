"""Speed of each way to push weights into a running engine, against a plain copy in memory.

    python benchmarks/weight_sync.py [--hidden-size 1024] [--layers 6] [--rounds 5] [--bucket-mb 128]

A Qwen2 model of random weights runs in a real SGLang server on this machine; the fastest round of each method counts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_retool.config import EngineConfig
from sglang_rollout.engine.process import SGLangServer
from sglang_rollout.engine.weight_sync.base import Bucket
from sglang_rollout.engine.weight_sync.disk import DiskWeightSync
from sglang_rollout.engine.weight_sync.distributed import DistributedWeightSync
from sglang_rollout.engine.weight_sync.tensor import TensorWeightSync


def buckets(weights: list[tuple[str, torch.Tensor]], limit: int) -> Iterator[Bucket]:
    bucket: Bucket = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    yield bucket


def copy_seconds(weights: list[tuple[str, torch.Tensor]], rounds: int) -> float:
    targets = [torch.empty_like(tensor) for _, tensor in weights]
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        for target, (_, tensor) in zip(targets, weights, strict=True):
            target.copy_(tensor)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mb", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = Qwen2Config(
        vocab_size=8192,
        hidden_size=arguments.hidden_size,
        intermediate_size=4 * arguments.hidden_size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with tempfile.TemporaryDirectory() as directory:
        model = Qwen2ForCausalLM(config).float()
        model.save_pretrained(Path(directory) / "model")
        weights = [(name, tensor.detach()) for name, tensor in model.state_dict().items()]
        gigabytes = sum(tensor.nbytes for _, tensor in weights) / 1e9
        plain = copy_seconds(weights, arguments.rounds)
        print(f"{gigabytes:.2f} GB in {len(weights)} tensors; copy in memory {gigabytes / plain:.2f} GB/s")
        engine_config = EngineConfig(device="cpu", dtype="float32", max_total_tokens=4096)
        engine = SGLangServer(
            engine_config, model_path=Path(directory) / "model", log_file=Path(directory) / "engine.log"
        )
        engine.start()
        try:
            common: dict[str, Any] = {"timeout_seconds": 120}
            disk = {"directory": Path(directory) / "sync", "model_path": Path(directory) / "model"}
            for name, method, settings in (
                ("tensor", TensorWeightSync, common),
                ("distributed", DistributedWeightSync, common),
                ("disk", DiskWeightSync, {**common, **disk}),
            ):
                with method([engine.base_url], **settings) as sync:
                    seconds = min(
                        sync.push(buckets(weights, arguments.bucket_mb * 2**20), version).seconds
                        for version in range(1, arguments.rounds + 2)
                    )
                share = 100 * plain / seconds
                print(f"{name:12s} {seconds:.3f} s, {gigabytes / seconds:.2f} GB/s, {share:.0f} % of a copy")
        finally:
            engine.stop()


if __name__ == "__main__":
    main()
