"""What real models take, as JSON on stdout; run as a process of its own, since it joins process groups.

Shards of published models are built on the meta device by one process that stands for any rank of a large job
(torch's fake process group), wrapped in Megatron's DDP, and measured.  Activations and a checkpoint are measured on a
small model that really runs.  Memory is limited, so that a model that misses the meta device ends this process alone.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from conversion.model.architecture import Architecture
from megatron_retool.config import Config, LearnerConfig, LoraConfig, OptimizerConfig, RecomputeConfig
from megatron_retool.learner import parallel
from megatron_retool.learner.adapters import attach
from megatron_retool.learner.learner import Learner
from megatron_retool.learner.model import build_model_chunks
from megatron_retool.learner.packing import Packer
from megatron_retool.learner.precision import Acceleration
from megatron_retool.learner.specs import build_transformer_config
from megatron_retool.planning.models import MODELS
from megatron_retool.trajectory import FinishReason, Trajectory, TrajectoryBatch

MEMORY_LIMIT = 6 * 2**30
FACTORIES = {"arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros"}

SMALL = {
    "model_type": "qwen2",
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 768,
    "vocab_size": 1000,
}
HALVES = SMALL | {"model_type": "nemotron_h", "head_dim": 32}
SMALL_MODELS = {
    "latent experts alone": HALVES
    | {
        "hybrid_override_pattern": "EE",
        "n_routed_experts": 8,
        "moe_intermediate_size": 192,
        "moe_latent_size": 96,
        "moe_shared_expert_intermediate_size": 256,
    },
    "MLP alone": HALVES | {"hybrid_override_pattern": "--"},
    "experts alone": HALVES
    | {
        "hybrid_override_pattern": "EE",
        "n_routed_experts": 8,
        "moe_intermediate_size": 128,
        "moe_shared_expert_intermediate_size": 256,
    },
    "qwen2": SMALL,
    "qwen3": SMALL | {"model_type": "qwen3", "head_dim": 32},
    "olmo2": SMALL | {"model_type": "olmo2"},
    "gemma3_text": SMALL | {"model_type": "gemma3_text", "head_dim": 32},
    "qwen3_moe": SMALL
    | {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "moe_intermediate_size": 192,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
}


class OnMeta(TorchFunctionMode):
    """Every new tensor lies on the meta device, whatever device the caller names."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") in FACTORIES:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def learner_config(settings: dict[str, Any]) -> LearnerConfig:
    """The section ``learner`` of a case."""
    return LearnerConfig(**{**settings, "lora": LoraConfig(**settings.get("lora", {}))})


def transformers_parameters(model: str) -> int:
    """Parameters of the Hugging Face model, a tied head counted once."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(MODELS[model])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with OnMeta():
        found = AutoModelForCausalLM.from_config(config)
    assert all(p.device.type == "meta" for p in found.parameters())
    return sum(p.numel() for p in found.parameters())


def shard(model: str, learner: LearnerConfig, rank: int) -> dict[str, Any]:
    """Parameters of one rank, elements of DDP's buffers, and the elements that the distributed optimizer gives it."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    architecture = Architecture.from_hf_config(MODELS[model])
    layout = learner.layout(architecture)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    acceleration = Acceleration.detect()
    config = build_transformer_config(architecture, learner, layout, acceleration)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=learner.use_distributed_optimizer,
        overlap_grad_reduce=False,
    )
    with OnMeta():
        chunks = build_model_chunks(architecture, config, acceleration)
    model_parameters = sum(p.numel() for chunk in chunks for p in chunk.parameters())
    if learner.lora.rank:
        attach(chunks, architecture, learner.lora)
    with OnMeta():
        wrapped = [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]
    assert all(p.device.type == "meta" for chunk in chunks for p in chunk.parameters())
    buffers = [buffer for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    facts = {
        "parameters": model_parameters,
        "trained": sum(p.numel() for chunk in chunks for p in chunk.parameters() if p.requires_grad),
        "buffer_elements": sum(buffer.numel for buffer in buffers),
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "owned": None,
    }
    if learner.use_distributed_optimizer:
        ranges = [DistributedOptimizer._build_gbuf_range_map(buffer) for buffer in buffers]
        facts["owned"] = sum(
            r["param_map"][p]["param"].size
            for buffer in ranges
            for buckets in buffer.values()
            for r in buckets
            for p in r["param_map"]
        )
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return facts


def batch_of(responses: int, length: int) -> TrajectoryBatch:
    rng = np.random.default_rng(0)
    ones = np.ones(length)
    return TrajectoryBatch.from_trajectories(
        [
            Trajectory(
                prompt_ids=rng.integers(0, 1000, 32),
                response_ids=rng.integers(0, 1000, length),
                loss_mask=ones.astype(bool),
                rollout_log_probs=0 * ones,
                turn_ids=0 * ones,
                weight_versions=0 * ones,
                group_id=0,
                index=index,
                finish_reason=FinishReason.STOP,
            )
            for index in range(responses)
        ]
    )


def saved_bytes(architecture: Architecture, recompute: RecomputeConfig) -> int:
    """Bytes of the distinct storages that autograd keeps of a forward pass over 2048 tokens, parameters aside."""
    learner = LearnerConfig(dtype="bfloat16", max_tokens_per_micro_batch=2048, recompute=recompute)
    layout = learner.layout(architecture)
    parallel.initialize(layout, torch.device("cpu"), 0)
    acceleration = Acceleration.detect()
    config = build_transformer_config(architecture, learner, layout, acceleration)
    (model,) = build_model_chunks(architecture, config, acceleration)
    (micro_batch,) = Packer(layout, 2048, 0, 0, torch.device("cpu")).micro_batches(batch_of(4, 480))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.train()
        output = model(micro_batch)
    del output
    return sum(kept.values())


def layer_bytes(name: str, recompute: RecomputeConfig) -> int:
    """What one more layer adds."""
    architecture = Architecture.from_hf_config(SMALL_MODELS[name])
    counts = [saved_bytes(replace(architecture, num_layers=layers), recompute) for layers in (1, 2)]
    return counts[1] - counts[0]


def checkpoint_tensors(name: str, dtype: str) -> int:
    """Bytes of all tensors in a checkpoint that a learner wrote after one step."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    learner = Learner(
        Config(learner=LearnerConfig(dtype=dtype, max_tokens_per_micro_batch=2048)),
        optimizer=OptimizerConfig(),
        total_optimizer_steps=2,
        architecture=Architecture.from_hf_config(SMALL_MODELS[name]),
    )
    learner.sft_update(batch_of(2, 40))
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "learner"
        learner.save(target)
        metadata = FileSystemReader(next(target.rglob(".metadata")).parent).read_metadata()
    learner.close()
    return sum(
        int(np.prod(entry.size)) * torch.empty(0, dtype=entry.properties.dtype).element_size()
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and entry.size
    )


def main() -> None:
    request = json.loads(sys.stdin.read())
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
    facts: dict[str, Any] = {
        "transformers": {name: transformers_parameters(name) for name in request["transformers"]},
        "shards": [
            [shard(case["model"], learner_config(case["learner"]), rank) for rank in case["ranks"]]
            for case in request["shards"]
        ],
    }
    full = RecomputeConfig("full", "uniform", 1)
    facts["layers"] = {name: layer_bytes(name, RecomputeConfig()) for name in SMALL_MODELS}
    facts["recomputed_layer"] = layer_bytes("qwen2", full)
    facts["checkpoints"] = {
        f"{name} {dtype}": checkpoint_tensors(name, dtype)
        for name, dtype in (("qwen2", "bfloat16"), ("qwen3_moe", "bfloat16"), ("qwen2", "float32"))
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
