"""Hugging Face models of a few thousand parameters, one for each family, and batches to read with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_retool.doctor.model import sequences, stored_names
from megatron_retool.trajectory import TrajectoryBatch

FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral")
Copies = Sequence[tuple[int, int, int]]
VOCAB_SIZE = 101  # no multiple of anything: the learner has to pad it

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}


def hf_model(family: str, **overrides: Any) -> Any:
    """A transformers model with random fp32 weights, biases and norms included."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    llama_rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    config_class, model_class, own = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
        "qwen3_moe": (
            Qwen3MoeConfig,
            Qwen3MoeForCausalLM,
            {
                "head_dim": 8,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "norm_topk_prob": True,
            },
        ),
        "llama": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": llama_rope, "tie_word_embeddings": True}),
        "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 16, "head_dim": 8}),
    }[family]
    torch.manual_seed(20)
    model = model_class(config_class(**{**_COMMON, **own, **overrides})).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "norm" in name:
                parameter.normal_(1.0, 0.2)
    return model


def save_model(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory


def random_batch(lengths: list[tuple[int, int]], seed: int = 0, vocab_size: int = VOCAB_SIZE) -> TrajectoryBatch:
    """Trajectories of the given (prompt, response) lengths with tool tokens between sampled ones."""
    rng = np.random.default_rng(seed)
    prompts, responses = (np.array(x, np.int32) for x in zip(*lengths, strict=True))
    total = int(responses.sum())
    loss_mask = rng.random(total) < 0.8
    return TrajectoryBatch(
        prompt_ids=rng.integers(0, vocab_size, int(prompts.sum())).astype(np.int32),
        prompt_lengths=prompts,
        response_ids=rng.integers(0, vocab_size, total).astype(np.int32),
        response_lengths=responses,
        loss_mask=loss_mask,
        rollout_log_probs=np.where(loss_mask, -rng.random(total), 0).astype(np.float32),
        turn_ids=np.where(loss_mask, 0, -1).astype(np.int16),
        weight_versions=np.zeros(total, np.int32),
        group_ids=np.zeros(len(lengths), np.int32),
        indices=np.arange(len(lengths), dtype=np.int32),
        rewards=np.zeros(len(lengths), np.float32),
    )


def with_copies(batch: TrajectoryBatch, copies: Copies) -> TrajectoryBatch:
    """The batch in which each ``row`` begins with ``tokens`` tokens of ``other``, for each (row, other, tokens)."""
    both = [np.concatenate(pair) for pair in sequences(batch)]
    for row, other, tokens in copies:
        both[row][:tokens] = both[other][:tokens]
    prompts = [ids[:length] for ids, length in zip(both, batch.prompt_lengths, strict=True)]
    responses = [ids[length:] for ids, length in zip(both, batch.prompt_lengths, strict=True)]
    return dataclasses.replace(batch, prompt_ids=np.concatenate(prompts), response_ids=np.concatenate(responses))


def hf_log_probs(model: Any, batch: TrajectoryBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log-probs and entropy of every response token, one sequence at a time and unpadded: float32 [T] with gradient."""
    log_probs, entropies = [], []
    for prompt, response in sequences(batch):
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1] / temperature
        log_p = torch.log_softmax(logits, dim=-1)
        log_probs.append(log_p.gather(-1, ids[len(prompt) :, None]).squeeze(-1))
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def stored_gradients(model: Any) -> dict[str, Tensor]:
    """Gradients under the names that a checkpoint on disk has (transformers fuses experts in memory)."""
    return {name: tensor for key, p in model.named_parameters() for name, tensor in stored_names(key, p.grad)}


def stored_weights(model: Any) -> dict[str, Tensor]:
    """Weights under the names that a checkpoint on disk has."""
    return {name: t for key, p in model.named_parameters() for name, t in stored_names(key, p.detach().clone())}
