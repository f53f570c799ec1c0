"""Tiny models of the doctor, a batch, and what transformers computes of them on the CPU in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_retool.parity.batches import random_batch, sequences
from megatron_retool.parity.doctor.outcome import StepFigure
from megatron_retool.parity.doctor.session import DoctorSession
from megatron_retool.parity.stored_tensors import stored_gradients
from megatron_retool.trajectory import TrajectoryBatch

DENSE, EXPERTS = "dense", "experts"
KINDS = (DENSE, EXPERTS)
VOCABULARY, LAYERS, HEADS, GROUPS, NUM_EXPERTS, CHOSEN = 512, 4, 4, 2, 8, 2
MAX_TOKENS = 512
"""Of a packed micro-batch: two of them for the batch below, so that gradients are accumulated."""
_LENGTHS = ((17, 120), (9, 31), (40, 233), (13, 61), (6, 90), (28, 70), (3, 110), (11, 16))
_COMMON: dict[str, Any] = {
    # Multiples of 128, the largest block of an FP8 recipe.
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "bos_token_id": None,
    "eos_token_id": None,
}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    DENSE: ("qwen3", {}),
    EXPERTS: (
        "qwen3_moe",
        {
            "num_experts": NUM_EXPERTS,
            "num_experts_per_tok": CHOSEN,
            "moe_intermediate_size": 128,
            "norm_topk_prob": True,
        },
    ),
    # Every token goes through all experts: rounding chooses no others.
    "latent attention": (
        "deepseek_v3",
        {
            "q_lora_rank": 128,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
            "num_key_value_heads": HEADS,
            "n_routed_experts": CHOSEN,
            "num_experts_per_tok": CHOSEN,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 128,
            "first_k_dense_replace": 1,
        },
    ),
    "gated delta nets": (
        "qwen3_next",
        {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": CHOSEN,
            "num_experts_per_tok": CHOSEN,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        },
    ),
    "Mamba-2": (
        "granitemoehybrid",
        {
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 512,
        },
    ),
    "attention sinks": (
        "gpt_oss",
        {"num_local_experts": CHOSEN, "num_experts_per_tok": CHOSEN, "sliding_window": 64, "intermediate_size": 256},
    ),
}
OWN_ATTENTION = tuple(kind for kind in _MODELS if kind not in KINDS)
"""Models whose attention and states the learner computes itself, also beside Transformer Engine."""


def model_directory(session: DoctorSession, kind: str) -> Path:
    """Hugging Face directory of the model ``kind``."""
    return session.directory / "models" / kind


def reference_file(session: DoctorSession, kind: str) -> Path:
    """Of ``reference``: log_probs [T], loss, gradients by name, experts [sum (P + R), layers, k] or none."""
    return session.directory / f"reference_{kind}.pt"


def reference(session: DoctorSession) -> list[StepFigure]:
    """Make the models, and what the learner's figures are compared with."""
    figures = []
    for kind in KINDS:
        model = build(kind)
        model.save_pretrained(model_directory(session, kind))
        result = compute(model, mini_batch(), kind)
        torch.save(result, reference_file(session, kind))
        log_probs = result["log_probs"][mini_batch().loss_mask]
        spread = float(np.abs(log_probs - log_probs.mean()).mean())
        figures.append(StepFigure(f"{kind}: spread of log-probs", spread, "nats", at_least=0.3))
    return figures


def build(kind: str) -> Any:
    """A transformers model with random float32 weights, its norms included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    model_type, sizes = _MODELS[kind]
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**_COMMON, **sizes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.1)
            elif name.endswith("A_log"):  # of decays: memories of many tokens, where transformers' begin with a few
                parameter.sub_(3.0)
            # What bfloat16 holds: where the model is loaded in that, only arithmetic differs.
            parameter.copy_(parameter.to(torch.bfloat16))
    return model.float().eval()


def mini_batch() -> TrajectoryBatch:
    """Responses of unequal length with masked tokens, advantages and loss weights: the same in every process."""
    rng = np.random.default_rng(0)
    prompts, responses = (np.array(each, np.int32) for each in zip(*_LENGTHS, strict=True))
    total = int(responses.sum())
    mask = rng.random(total) < 0.8
    batch = random_batch(rng, prompts, responses, VOCABULARY, mask)
    return batch.with_columns(advantages=rng.normal(0, 1, total), loss_weights=mask / mask.sum())


def compute(model: Any, batch: TrajectoryBatch, kind: str) -> dict[str, Any]:
    """Log-probs, loss and gradients of the policy loss where the old policy is the model itself."""
    result, rows = [], []
    for prompt, response in sequences(batch):
        ids = np.concatenate([prompt, response])
        options = {"output_router_logits": True} if kind == EXPERTS else {}
        output = model(torch.from_numpy(ids.astype(np.int64))[None], **options)
        log_probs = output.logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        targets = torch.from_numpy(response.astype(np.int64))
        result.append(log_probs.gather(-1, targets[:, None])[:, 0])
        if kind == EXPERTS:
            rows.append(torch.stack([logits.topk(CHOSEN).indices for logits in output.router_logits], dim=1))
    log_probs = torch.cat(result)
    weighted = torch.from_numpy(batch.columns["loss_weights"] * batch.columns["advantages"])
    # The ratio to the old policy is 1, whose gradient is that of the log-probs.
    (-(weighted * log_probs).sum()).backward()
    mask = torch.from_numpy(batch.loss_mask)
    return {
        "log_probs": torch.where(mask, log_probs, 0.0).detach().numpy(),
        "loss": float(-weighted.sum()),
        "gradients": stored_gradients(model),
        "experts": torch.cat(rows).to(torch.uint8).numpy() if rows else None,
    }
