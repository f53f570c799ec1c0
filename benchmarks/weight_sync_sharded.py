"""A weight sync of each rank's own parts (weight_sync.method=sharded) against one that gathers on rank 0 (distributed).

    python benchmarks/weight_sync_sharded.py                        # a dense model, TP 2, one engine
    python benchmarks/weight_sync_sharded.py --experts 8            # a mixture of experts, TP 2 and EP 2
    python benchmarks/weight_sync_sharded.py --engines 2

Two ranks of the real learner and real SGLang servers on this machine, weights by gloo; the fastest round of each method
counts, from the first tensor that is read to the engines' new version.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_retool.config import Config, EngineConfig, LearnerConfig, ModelConfig, OptimizerConfig
from megatron_retool.parity.ranks import run_ranks
from sglang_rollout.engine.key import engine_key, use_engine_key
from sglang_rollout.engine.process import SGLangServer

METHODS = ("distributed", "sharded")
VOCABULARY, HEADS, GROUPS = 8192, 16, 4


def save_model(directory: Path, hidden: int, layers: int, experts: int) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    if experts:
        more = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": hidden, "head_dim": 64}
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **more))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    model.float().save_pretrained(directory)


def pushes(model: Path, experts: bool, urls: list[str], key: str, rounds: int, bucket: int) -> dict[str, Any]:
    """Seconds of the fastest round, and bytes, by method; one rank's part."""
    from megatron_retool.learner.learner import Learner
    from sglang_rollout.engine.weight_sync.distributed import DistributedWeightSync
    from sglang_rollout.engine.weight_sync.sharded import ShardedWeightSync

    use_engine_key(key)
    torch.set_num_threads(1)
    layout = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1} if experts else {}
    settings = LearnerConfig(
        world_size=2, dtype="float32", tensor_model_parallel_size=2, sequence_parallel=True, **layout
    )
    learner = Learner(
        Config(model=ModelConfig(path=str(model)), learner=settings),
        optimizer=OptimizerConfig(),
        total_optimizer_steps=1,
        hf_dir=model,
    )
    rank, result, version = torch.distributed.get_rank(), dict[str, Any](), 0
    for method in METHODS:
        sends = method == "sharded" or rank == 0
        sync: Any = {"distributed": DistributedWeightSync, "sharded": ShardedWeightSync}[method]
        sync, times, sent = sync(urls, timeout_seconds=120) if sends else None, [], 0
        for _ in range(rounds + 1):
            version += 1
            torch.distributed.barrier()
            began = time.perf_counter()
            if method == "sharded":
                sent = sync.push(learner.own_parts(bucket), version).bytes
            else:
                buckets = learner.export_weights(bucket)
                if sync is not None:
                    sent = sync.push(buckets, version).bytes
                for _ in buckets:
                    pass
            torch.distributed.barrier()
            times.append(time.perf_counter() - began)
        of_ranks: list[Any] = [None] * 2
        torch.distributed.all_gather_object(of_ranks, sent)
        result[method] = {"seconds": min(times[1:]), "bytes": of_ranks}
        if sync is not None:
            sync.close()
    learner.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=0, help="of a mixture in each layer; 0: a dense model")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mb", type=int, default=128)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        save_model(model, options.hidden_size, options.layers, options.experts)
        engine = EngineConfig(device="cpu", dtype="float32", max_total_tokens=4096, threads=1)
        servers = [
            SGLangServer(engine, model_path=model, log_file=Path(directory) / f"engine_{number}.log")
            for number in range(options.engines)
        ]
        try:
            for server in servers:
                server.start()
            urls = [server.base_url for server in servers]
            bucket = options.bucket_mb * 2**20
            arguments = (model, options.experts > 0, urls, engine_key(), options.rounds, bucket)
            result = run_ranks(pushes, 2, Path(directory) / "ranks", *arguments)
        finally:
            for server in servers:
                server.stop()
    for method in METHODS:
        seconds, sent = result[method]["seconds"], [size / 1e9 for size in result[method]["bytes"]]
        print(f"{method:12s} {seconds:.3f} s; GB of each rank: {', '.join(f'{size:.2f}' for size in sent)}")
    ratio = result["sharded"]["seconds"] / result["distributed"]["seconds"]
    print(f"sharded takes {ratio:.2f} of distributed")


if __name__ == "__main__":
    main()
