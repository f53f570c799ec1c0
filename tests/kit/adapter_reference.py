"""What peft, or transformers with W + (alpha / rank) B A, makes of an adapted model in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conversion.model.adapter_map import factor_mappings, peft_tensor, target_of
from conversion.model.architecture import Architecture
from conversion.model.mapping import merge, shard
from conversion.model.weight_map import WeightMap
from megatron_retool.config import LoraConfig
from megatron_retool.parity.admission.recurrences import recurrent
from megatron_retool.parity.admission.requests import Request, shrunk_config
from megatron_retool.parity.admission.tiny_model import hf_log_probs, random_batch, random_model
from megatron_retool.parity.stored_tensors import stored_weights
from megatron_retool.planning.models import MODELS, model_of_each_family
from megatron_retool.trajectory import TrajectoryBatch
from tests.kit.tiny_models import hf_model

LENGTHS = [(5, 30), (9, 3), (4, 22), (13, 41), (6, 1), (8, 17)]
SETTINGS = LoraConfig(rank=4, alpha=8.0, seed=3)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj"]
SHRUNK = {"deepseek_v2": 2, "deepseek_v3": 2, "glm_moe_dsa": 2, "gpt_oss": 2} | dict.fromkeys(
    ("granitemoehybrid", "nemotron_h", "qwen3_next", "qwen3_5_text"), 4
)
"""Families whose model is that of the admission with so many layers."""
Tensors = dict[str, torch.Tensor]


def mini_batch() -> TrajectoryBatch:
    """A batch whose loss is the sum of its log-probs under random weights."""
    batch = random_batch(LENGTHS)
    weights = np.random.default_rng(5).normal(0, 1, batch.num_response_tokens)
    return batch.with_columns(loss_weights=weights * batch.loss_mask / batch.loss_mask.sum())


def random_factors(architecture: Architecture, settings: LoraConfig = SETTINGS) -> Tensors:
    """Every factor, none of them zero: float32 by the names of PEFT's files without their prefix."""
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for mapping in WeightMap(architecture):
        for factor in factor_mappings(mapping, settings.rank) if target_of(mapping) in settings.targets else ():
            shapes.setdefault(peft_tensor(factor.hf_names[0])[0], []).append(factor.hf_shapes[0])
    generator = torch.Generator().manual_seed(3)
    found = {}
    for name, parts in sorted(shapes.items()):
        shape = (sum(part[0] for part in parts), parts[0][1])
        scale = 1 / math.sqrt(shape[1]) if ".lora_A." in name else 0.1
        found[name] = torch.randn(shape, generator=generator) * scale
    return found


def small_model(family: str, **overrides: Any) -> Any:
    """A transformers model of a few layers, with random weights."""
    if family in SHRUNK:
        layers = overrides.pop("num_hidden_layers", SHRUNK[family])
        request = Request(family, MODELS[model_of_each_family()[family]], layers=layers)
        return random_model({**shrunk_config(request), **overrides})
    return hf_model(family, **{"num_hidden_layers": 2, **overrides})


def write_reference(family: str, directory: Path, **overrides: Any) -> None:
    """``directory``/hf, a model, and ``reference.pt``: log-probs of the mini-batch with and without random factors, the
    factors' gradients, and the merged weights."""
    model = small_model(family, **overrides)
    model.save_pretrained(directory / "hf")
    with recurrent(model):
        _write_reference(model, directory)


def _write_reference(model: Any, directory: Path) -> None:
    architecture = Architecture.from_pretrained(directory / "hf")
    factors, batch = random_factors(architecture), mini_batch()
    model = model.double()
    base = hf_log_probs(model, batch)[0].detach()
    known = {name.split(".")[-3] for name in factors} <= {*PROJECTIONS}
    adapted = _with_peft if known and not architecture.is_moe else _with_weights
    call, leaves, merged = adapted(model, factors)
    log_probs = hf_log_probs(call, batch)[0]
    (-(torch.from_numpy(batch.columns["loss_weights"]).double() * log_probs).sum()).backward()
    gradients = {name: leaf.grad.clone() for name, leaf in leaves.items()}
    mask = torch.from_numpy(batch.loss_mask)
    found = {
        "factors": factors,
        "log_probs": torch.where(mask, log_probs.detach(), 0.0).numpy(),
        "base": torch.where(mask, base, 0.0).numpy(),
        "gradients": gradients,
        "merged": merged(),
    }
    torch.save(found, directory / "reference.pt")


def _with_peft(model: Any, factors: Tensors) -> Any:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    config = PeftConfig(r=SETTINGS.rank, lora_alpha=SETTINGS.alpha, lora_dropout=0.0, target_modules=PROJECTIONS)
    adapted = get_peft_model(model, config).double().eval()
    leaves = {
        name.removeprefix("base_model.model.").replace(".default.", "."): parameter
        for name, parameter in adapted.named_parameters()
        if "lora_" in name
    }
    assert leaves.keys() == factors.keys()
    with torch.no_grad():
        for name, leaf in leaves.items():
            leaf.copy_(factors[name])
    return adapted, leaves, lambda: stored_weights(adapted.merge_and_unload())


def _with_weights(model: Any, factors: Tensors) -> Any:
    """peft has one A for gate and up of an expert: here each has its own, as an engine's adapters do."""
    leaves = {name: factor.double().requires_grad_() for name, factor in factors.items()}

    def delta(stem: str) -> torch.Tensor:
        product = leaves[f"{stem}.lora_B.weight"] @ leaves[f"{stem}.lora_A.weight"]
        return SETTINGS.alpha / SETTINGS.rank * product

    on_disk = any(stem.startswith("backbone.") for stem in leaves)  # Nemotron-H, whose modules are below "model."
    changed = {}
    for name, weight in model.named_parameters():
        stem = name.removesuffix(".weight")
        stem = stem.replace("model.", "backbone.", 1) if on_disk else stem
        if f"{stem}.lora_A.weight" in leaves:
            changed[name] = weight.detach() + delta(stem)
        elif name.endswith(("experts.gate_up_proj", "experts.up_proj", "experts.down_proj")):
            prefix, _, kind = stem.rpartition(".")
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            experts = [torch.cat([delta(f"{prefix}.{e}.{part}") for part in parts]) for e in range(len(weight))]
            changed[name] = weight.detach() + torch.stack(experts)

    def merged() -> Tensors:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(changed.get(name, weight))
        return stored_weights(model)

    return lambda *inputs, **options: torch.func.functional_call(model, changed, inputs, options), leaves, merged


@torch.no_grad()
def gather_factors(chunks: Any, value: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach) -> Tensors:
    """Whole factors (or gradients, by ``value``) on every rank, by the names of PEFT's files without their prefix.

    Raises:
        AssertionError: ranks differ in what all of them hold.
    """
    from megatron_retool.learner.adapters import adapters

    own: dict[str, Any] = {}
    for adapter in adapters(chunks):
        parameters = (*adapter.a, *adapter.b)
        for factor, parameter in zip(factor_mappings(adapter.mapping, adapter.rank), parameters, strict=True):
            split = factor.tp_dim is not None
            part = value(parameter).view(parameter.shape).clone()
            own[factor.mcore_name] = (factor, adapter.tp_rank if split else 0, part)
    world: list[dict[str, Any]] = [own] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(world, own)
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for name, (_, place, part) in (item for rank in world for item in rank.items()):
        held = parts.setdefault(name, {}).setdefault(place, part)
        assert torch.equal(held, part), f"ranks differ in {name}"
    found: dict[str, dict[int, torch.Tensor]] = {}
    for name, factor in {name: item[0] for rank in world for name, item in rank.items()}.items():
        peft_name, first = peft_tensor(factor.hf_names[0])
        found.setdefault(peft_name, {})[first] = merge(factor, [parts[name][i] for i in sorted(parts[name])])
    return {name: torch.cat([rows[first] for first in sorted(rows)]) for name, rows in found.items()}


@torch.no_grad()
def set_factors(learner: Any, tensors: Tensors) -> None:
    """Fill a learner's adapters from whole factors."""
    from megatron_retool.learner.adapters import adapters

    for adapter in adapters(learner.model_chunks):
        parameters = (*adapter.a, *adapter.b)
        for factor, parameter in zip(factor_mappings(adapter.mapping, adapter.rank), parameters, strict=True):
            name, first = peft_tensor(factor.hf_names[0])
            part = tensors[name][first : first + factor.hf_shapes[0][0]]
            parameter.copy_(shard(factor, part, adapter.tp_size, adapter.tp_rank))
    learner.optimizer.reload_model_params()
