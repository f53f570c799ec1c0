"""A real mixture of experts whose samples follow a table, and whose routing depends on the whole context.

As ``markov_policy``'s model, but embeddings, attention and experts also write a few dimensions that the output layer
does not read and the routers do.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.kit.markov_policy import VOCABULARY, Table, table_logits

HIDDEN = VOCABULARY + 32
LAYERS, EXPERTS, K = 3, 8, 2
GAP = 1e-3
"""Router logits that lie closer than this may be chosen between by rounding."""


def moe_model(tokenizer: PreTrainedTokenizerFast, table: Table, seed: int, floor: float = 1e-30) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(  # type: ignore[call-arg]
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=32,
        moe_intermediate_size=32,
        num_experts=EXPERTS,
        num_experts_per_tok=K,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    config.initializer_range = 0.15
    model = Qwen3MoeForCausalLM(config).float().eval()
    logits = table_logits(tokenizer, table, floor)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:VOCABULARY] = 0
            layer.mlp.experts.down_proj[:, :VOCABULARY] = 0
            # What is added stays small beside the one-hot part, which the last norm would shrink otherwise.
            layer.self_attn.o_proj.weight *= 0.03
            layer.mlp.experts.down_proj *= 0.01
            layer.mlp.gate.weight.normal_(0.0, 1.0)
            layer.mlp.gate.weight[:, :VOCABULARY] *= 0.1
        model.model.embed_tokens.weight[:, :VOCABULARY] = torch.eye(VOCABULARY)
        model.model.embed_tokens.weight[:, VOCABULARY:].normal_(0.0, 0.1)
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :VOCABULARY] = logits.T / HIDDEN**0.5
    return model


def buckets(model: Qwen3MoeForCausalLM, directory: Path, size: int = 20) -> list[list[tuple[str, torch.Tensor]]]:
    """The weights under their names on disk, where every expert has its own."""
    model.save_pretrained(directory)
    index = directory / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    weights = [item for file in sorted(files) for item in load_file(directory / file).items()]
    return [weights[start : start + size] for start in range(0, len(weights), size)]


def router_logits(model: Qwen3MoeForCausalLM, ids: list[int]) -> np.ndarray:
    """float32 [tokens, layers, experts] of one fresh forward pass."""
    with torch.no_grad():
        output = model(torch.tensor([ids]), output_router_logits=True)
    return torch.stack(list(output.router_logits), dim=1).numpy()


def differing(rows: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """bool [tokens]: rows that are not the model's choice, in more than what rounding may decide."""
    order = np.sort(logits, -1)
    close = (order[..., -K] - order[..., -K - 1]) < GAP
    chosen = np.sort(np.argsort(logits, -1)[..., -K:], -1)
    return ((np.sort(rows.astype(np.int64), -1) != chosen).any(-1) & ~close).any(-1)
