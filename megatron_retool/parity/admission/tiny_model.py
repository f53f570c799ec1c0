"""A transformers model with random weights, batches to read with it, and its tensors under a checkpoint's names."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conversion.model.attention_config import normalise_latents
from megatron_retool.errors import InputError
from megatron_retool.parity import batches
from megatron_retool.parity.admission.shrink import VOCAB_SIZE
from megatron_retool.parity.batches import sequences
from megatron_retool.trajectory import TrajectoryBatch

MOST_PARAMETERS = 20_000_000
"""Of a model with small sizes."""
Copies = Sequence[tuple[int, int, int]]
"""(row, other, tokens), see ``with_copies``."""


def random_model(config: Any) -> Any:
    """A float32 model of ``config`` (a transformers configuration, or config.json's mapping), norms and biases random
    too.

    Raises:
        ValueError: transformers does not know the model type, or the model is large.
    """
    from transformers import AutoModelForCausalLM

    config = transformers_config(config)
    config._attn_implementation = config._experts_implementation = "eager"  # whose FLOPs torch can count
    count = sum(parameter.numel() for parameter in without_memory(config).parameters())
    if count > MOST_PARAMETERS:
        raise InputError(
            f"the copy of this {config.model_type} model with small sizes still has {count:,} parameters: a size has "
            "another name than those that are made small"
        )
    torch.manual_seed(20)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False).float().eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("bias", "sinks")):
                tensor.normal_(0.0, 0.3)
            elif "norm" in name and name.endswith("weight"):  # around 1, or around 0 where 1 is added to it
                tensor.add_(torch.empty_like(tensor).normal_(0.0, 0.2))
            elif name.endswith("A_log"):  # of decays: memories of many tokens, where transformers' begin with a few
                tensor.sub_(3.0)
    return normalise_latents(model)


def without_memory(config: Any) -> Any:
    """The model of ``random_model`` with shapes alone, whatever its size.

    Raises:
        ValueError: transformers does not know the model type.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(transformers_config(config), trust_remote_code=False)


def transformers_config(config: Any) -> Any:
    """The configuration of config.json's mapping, with transformers' own values for what it lacks.

    Raises:
        ValueError: transformers does not know the model type.
    """
    from transformers import AutoConfig

    if not isinstance(config, Mapping):
        return config
    # The code that auto_map names is not run, and there is no question whether to.
    fields = {key: value for key, value in config.items() if key not in ("model_type", "dtype", "auto_map")}
    return AutoConfig.for_model(config["model_type"], **fields)


def converted(directory: Path) -> Path:
    """Where the Megatron-Core weights of the model in ``directory`` lie."""
    return directory.with_name(f"{directory.name}_mcore")


def save_model(model: Any, directory: Path, hf_config: Mapping[str, Any] | None = None) -> Path:
    """Weights and config.json; the latter as ``hf_config`` has it, where transformers writes it in another way."""
    model.save_pretrained(directory)
    if hf_config is not None:
        architectures = {"architectures": [type(model).__name__]}
        (directory / "config.json").write_text(json.dumps({**hf_config, **architectures}, indent=1))
    return directory


def random_batch(lengths: list[tuple[int, int]], seed: int = 0, vocab_size: int = VOCAB_SIZE) -> TrajectoryBatch:
    """Trajectories of the given (prompt, response) lengths with tool tokens between sampled ones."""
    rng = np.random.default_rng(seed)
    prompts, responses = (np.array(x, np.int32) for x in zip(*lengths, strict=True))
    total = int(responses.sum())
    mask = rng.random(total) < 0.8
    batch = batches.random_batch(rng, prompts, responses, vocab_size, mask)
    return dataclasses.replace(batch, rollout_log_probs=np.where(mask, -rng.random(total), 0).astype(np.float32))


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
        logits = model(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
        log_p = torch.log_softmax(logits, dim=-1)
        log_probs.append(log_p.gather(-1, ids[len(prompt) :, None]).squeeze(-1))
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)
