"""The referee: transformers' model, one unpadded sequence at a time, in float32 or float64.

The same code in another number format, or with weights rounded to FP8, is the yardstick of what that format costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from conversion.model.architecture import Architecture
from conversion.model.attention_config import normalise_latents
from conversion.model.block_fp8 import quantized_names, round_to_blocks, takes_power_of_two
from conversion.model.weight_map import WeightMap
from megatron_retool.algorithms.sampling import is_unfiltered, kept_tokens
from megatron_retool.algorithms.settings import SamplingSettings
from megatron_retool.config import ModelConfig, RolloutConfig, WeightSyncConfig
from megatron_retool.learner.precision import DTYPES
from megatron_retool.parity.referee.stored_step import SampledResponse, StoredStep
from megatron_retool.routed_experts import is_missing
from sglang_rollout.engine.transformers_routing import forced_gates, routers
from sglang_rollout.engine.weight_sync.quantization import weight_conversion

REFEREE_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class NumberFormat:
    """dtype of weights and activations, and what the weights were rounded to before.

    Attributes:
        rounding: such as "int4 weights"; None: only the dtype.
        round: tensor of a Hugging Face name -> the same, rounded.
    """

    dtype: torch.dtype
    rounding: str | None = None
    round: Callable[[str, Tensor], Tensor] = field(default=lambda _, tensor: tensor, compare=False)

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.") + (f" with {self.rounding}" if self.rounding else "")


def engine_format(
    rollout: RolloutConfig, weight_sync: WeightSyncConfig, model: ModelConfig, architecture: Architecture
) -> NumberFormat:
    """What the run's engines computed in. Of engines that multiply in FP8 only the weights' part is known here."""
    name = rollout.engine.dtype
    dtype = DTYPES[architecture.dtype or "bfloat16" if name == "auto" else name]
    if weight_sync.round_to is not None:
        convert = weight_conversion(weight_sync, model, rollout)
        assert convert is not None
        return NumberFormat(
            dtype, f"{weight_sync.round_to} weights", lambda name, tensor: convert([(name, tensor)])[0][1]
        )
    if rollout.engine.quantization == "fp8":
        names = quantized_names(WeightMap(architecture))
        scales = weight_sync.fp8_scales

        def rounded(name: str, tensor: Tensor) -> Tensor:
            power_of_two = takes_power_of_two(scales, tensor.device)
            return round_to_blocks(tensor, power_of_two=power_of_two) if name in names else tensor

        return NumberFormat(dtype, "fp8 weights", rounded)
    return NumberFormat(dtype)


@dataclass(frozen=True)
class Reading:
    """What a model makes of the sampled tokens.

    Attributes:
        log_probs: float64 [n], of the distribution that rollouts are sampled from.
        hidden: float32 or float64 [watched tokens, stages, h]: embedding, each layer's output, final norm, at the input
            tokens that predict them; None where they are not asked for.
        experts: int64 [n, layers, k], what each layer's router chose at those input tokens; None without experts.
    """

    log_probs: npt.NDArray[np.float64]
    hidden: npt.NDArray[Any] | None = None
    experts: npt.NDArray[np.int64] | None = None


def stage_names(architecture: Architecture) -> list[str]:
    """Names of the places whose hidden states are compared."""
    return ["embedding", *(f"layer {number + 1}" for number in range(architecture.num_layers)), "final norm"]


def load_model(step: StoredStep, architecture: Architecture, number_format: NumberFormat, device: torch.device) -> Any:
    """transformers' model with the step's weights, which are those of the learner, rounded to its dtype."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    architecture.declaration  # noqa: B018  (a family's file may make its classes known to transformers)
    config = AutoConfig.from_pretrained(step.model_dir, trust_remote_code=False)
    tensors: dict[str, Tensor] = {}
    for name, tensor in step.weights.tensors(architecture):
        learners = tensor.to(DTYPES[step.config.learner.dtype])
        tensors[name] = number_format.round(name, learners).to(number_format.dtype)
    model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = model_class.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=number_format.dtype,
            attn_implementation="sdpa",
            experts_implementation="eager",
        )
    finally:
        if shows_progress:
            logging.enable_progress_bar()
    return normalise_latents(model).to(device).eval()


@dataclass
class _Watch:
    """What hooks find of one sequence.

    Attributes:
        rows: int64, input tokens that predict sampled ones.
        watched: int64, those of them whose hidden states are wanted; None: none are.
        forced: [tokens, layers, k] experts to take in place of the router's choice; None: its own.
    """

    rows: Tensor
    watched: Tensor | None
    forced: npt.NDArray[Any] | None
    hidden: list[Tensor] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)


@torch.no_grad()
def read(
    model: Any,
    responses: Sequence[SampledResponse],
    sampling: SamplingSettings,
    *,
    architecture: Architecture,
    watched: npt.NDArray[np.bool_] | None = None,
    force_experts: bool = False,
    on_response: Callable[[], object] = lambda: None,
) -> Reading:
    """Log-probs, hidden states and experts of the sampled tokens.

    Args:
        watched: bool [n], the tokens whose hidden states are kept.
        force_experts: take the experts that the engine recorded, where it did.
    """
    log_probs, hidden, experts, first = [], [], [], 0
    for response in responses:
        trajectory = response.trajectory
        prompt, count = len(trajectory.prompt_ids), len(response.positions)
        last = prompt + int(response.positions[-1])
        ids = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])[: last + 1].astype(np.int64)
        rows = torch.from_numpy(prompt - 1 + response.positions).to(model.device)
        wanted = None if watched is None else rows[torch.from_numpy(watched[first : first + count]).to(rows.device)]
        watch = _Watch(rows, wanted, trajectory.routed_experts if force_experts else None)
        with _hooks(model, architecture, watch):
            inputs = torch.from_numpy(ids[:-1]).to(model.device)
            logits = model(inputs[None], use_cache=False, logits_to_keep=rows).logits[0]
        targets = torch.from_numpy(ids[prompt + response.positions]).to(model.device)
        log_probs.append(sampled_log_probs(logits, targets, sampling).cpu())
        if wanted is not None:
            hidden.append(torch.stack(watch.hidden, 1))
        if watch.experts:
            experts.append(torch.stack(watch.experts, 1))
        first += count
        on_response()
    return Reading(
        torch.cat(log_probs).numpy(),
        torch.cat(hidden).numpy() if hidden else None,
        torch.cat(experts).numpy() if experts else None,
    )


def sampled_log_probs(logits: Tensor, targets: Tensor, sampling: SamplingSettings) -> Tensor:
    """float64 [n]: log-probs of ``targets`` [n] under what ``sampling`` leaves of ``logits`` [n, V].

    The target itself is never filtered out, as on the learner's side.
    """
    scaled = logits.double() / sampling.temperature
    target = targets.unsqueeze(-1)
    if not is_unfiltered(sampling):
        kept = kept_tokens(logits.double(), sampling).scatter(-1, target, True)
        scaled = scaled.masked_fill(~kept, float("-inf"))
    return torch.log_softmax(scaled, -1).gather(-1, target).squeeze(-1)


@contextmanager
def _hooks(model: Any, architecture: Architecture, watch: _Watch) -> Iterator[None]:
    handles = []

    def keep(_: Any, __: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        kept = states.reshape(-1, states.size(-1))[watch.watched]
        watch.hidden.append((kept if kept.dtype == torch.float64 else kept.float()).cpu())

    if watch.watched is not None:
        decoder = model.base_model
        handles += [m.register_forward_hook(keep) for m in (decoder.embed_tokens, *decoder.layers, decoder.norm)]
    if architecture.is_moe:
        for layer, router in enumerate(routers(model)):
            handles.append(router.register_forward_hook(_routing_hook(architecture, watch, layer)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _routing_hook(architecture: Architecture, watch: _Watch, layer: int) -> Callable[..., Any]:
    def route(_: Any, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
        logits, scores, chosen = output
        replaced = None
        if watch.forced is not None:
            rows = watch.forced[: len(chosen)]
            known = torch.from_numpy(~is_missing(rows)).to(chosen.device)
            forced = torch.from_numpy(rows[:, layer].astype(np.int64)).to(chosen.device)
            chosen = torch.where(known[:, None], forced, chosen)
            gates = forced_gates(architecture, logits, chosen)
            replaced = logits, torch.where(known[:, None], gates.to(scores.dtype), scores), chosen
        watch.experts.append(chosen[watch.rows].cpu())
        return replaced

    return route
