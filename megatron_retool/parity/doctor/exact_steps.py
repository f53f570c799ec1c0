"""learner.match_engine=exact on this host: whether rows depend on their neighbours, and engine against learner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_retool.algorithms.settings import SamplingSettings
from megatron_retool.cluster.log_prob_check import as_batch, fixed_text
from megatron_retool.config import SamplingConfig
from megatron_retool.parity.doctor import model
from megatron_retool.parity.doctor.engine_steps import TEXT_TOKENS, ByteTokenizer, ask, engine_config, start_server
from megatron_retool.parity.doctor.learner_steps import make_learner
from megatron_retool.parity.doctor.outcome import StepFigure
from megatron_retool.parity.doctor.session import DoctorSession
from sglang_rollout.engine.base import GenerateRequest, StopConditions
from sglang_rollout.engine.client import SGLangClient

_ROWS, _HIDDEN, _HEADS, _GROUPS, _HEAD_SIZE = 200, 896, 14, 2, 64
_LATENT, _TURNED = 512, 64
_ROUNDED = 2**-7
"""Bound of the difference from float64, as a share of the largest number: two roundings to bfloat16."""
_PROMPT_TOKENS, _SAMPLED_TOKENS = 32, 64


def operators(session: DoctorSession) -> list[StepFigure]:
    """Each operator of ``exact.operators`` here, in bfloat16: a row's bits by itself and among others, and how far from
    float64."""
    figures = []
    for name, operator, reference, rows in _cases(torch.device(session.device)):
        result, exact = operator(slice(None)), reference()
        single = (0, rows // 2, rows - 1)
        by_itself = torch.cat([operator(slice(row, row + 1)) for row in single])
        apart = (result[list(single)].double() - by_itself.double()).abs().max()
        far = (result.double() - exact).abs().max() / exact.abs().max()
        figures.append(StepFigure(f"{name}: a row by itself, largest difference", float(apart), at_most=0.0))
        figures.append(StepFigure(f"{name}: against float64, of the largest", float(far), at_most=_ROUNDED))
    return figures


_Case = tuple[str, Callable[[slice], Tensor], Callable[[], Tensor], int]


def _cases(device: torch.device) -> Iterator[_Case]:
    """Name, the operator of some rows, what it should be in float64, and how many rows there are."""
    from megatron_retool.exact import operators as exact

    random = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=random).to(device, dtype)

    x, weight, gain = normal(_ROWS, _HIDDEN), normal(3 * _HIDDEN, _HIDDEN), normal(_HIDDEN)
    wide, gate_and_up, logits = x.double(), normal(_ROWS, 2 * _HIDDEN), 4 * normal(_ROWS, 128, dtype=torch.float32)
    gate, up = gate_and_up.double().chunk(2, -1)
    chosen = exact.top_experts(logits, 8)
    query, key, value = (normal(_ROWS, heads, _HEAD_SIZE) for heads in (_HEADS, _GROUPS, _GROUPS))
    places = torch.arange(_ROWS, device=device)
    starts, counts, scale = torch.zeros_like(places), places + 1, _HEAD_SIZE**-0.5
    q, k, v = (each.double().transpose(0, 1)[None] for each in (query, key, value))
    yield "matrix product", lambda r: exact.linear(x[r], weight), lambda: wide @ weight.double().t(), _ROWS
    yield (
        "RMSNorm",
        lambda r: exact.rms_norm(x[r], gain, 1e-6),
        lambda: F.rms_norm(wide, (_HIDDEN,), gain.double(), 1e-6),
        _ROWS,
    )
    yield "SwiGLU", lambda r: exact.silu_and_multiply(gate_and_up[r]), lambda: F.silu(gate) * up, _ROWS
    yield (
        "attention",
        lambda r: exact.attention(query[r], key, value, places, starts[r], counts[r], scale),
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(
            0, 1
        ),
        _ROWS,
    )
    latents, absorbed = normal(_ROWS, 1, _LATENT + _TURNED), normal(_ROWS, _HEADS, _LATENT + _TURNED)
    read, kept = absorbed.double().transpose(0, 1)[None], latents.double().transpose(0, 1)[None]
    yield (
        "latent attention",
        lambda r: exact.attention(absorbed[r], latents, latents, places, starts[r], counts[r], scale, width=_LATENT),
        lambda: F.scaled_dot_product_attention(
            read, kept, kept[..., :_LATENT], is_causal=True, scale=scale, enable_gqa=True
        )[0].transpose(0, 1),
        _ROWS,
    )
    yield from _cases_with_states(normal)
    yield (
        "experts' gates",
        lambda r: exact.expert_gates(logits[r], chosen[r], normalized=False),
        lambda: torch.zeros_like(logits, dtype=torch.double).scatter(
            1, chosen, logits.double().softmax(-1).gather(1, chosen)
        ),
        _ROWS,
    )
    yield "log-softmax", lambda r: exact.log_softmax(logits[r]), lambda: logits.double().log_softmax(-1), _ROWS
    yield "softmax", lambda r: exact.probabilities(logits[r]), lambda: logits.double().softmax(-1), _ROWS


def _cases_with_states(normal: Callable[..., Tensor]) -> Iterator[_Case]:
    """Of tokens that are each the first of a text: memories are empty before them."""
    from megatron_retool.exact import operators as exact

    window, weight, bias = normal(_ROWS, _HEADS, 4), normal(_HEADS, 4), normal(_HEADS)
    sums = (window.double() * weight.double()).sum(-1) + bias.double()
    yield "convolution", lambda r: exact.convolve(window[r], weight, bias)[..., 0], lambda: F.silu(sums), _ROWS
    query, key = (normal(_ROWS, _GROUPS, _HEAD_SIZE) for _ in range(2))
    value, steps = normal(_ROWS, _HEADS, _HEAD_SIZE), normal(_ROWS, _HEADS)
    shares = [x.double().repeat_interleave(_HEADS // _GROUPS, 1) for x in (query, key)]
    wide, betas = value.double(), exact.sigmoid(steps.float())

    def texts(r: slice) -> tuple[Tensor, Tensor, Tensor]:
        places = torch.arange(len(value[r]) + 1, device=value.device)
        states = value.new_zeros(len(places) - 1, _HEADS, _HEAD_SIZE, _HEAD_SIZE, dtype=torch.float32)
        return states, places[:-1], places

    unit = [F.normalize(x, dim=-1) for x in shares]
    yield (
        "delta rule",
        lambda r: exact.delta_rule(query[r], key[r], value[r], -betas[r], betas[r], *texts(r)),
        lambda: wide * (betas.double() * (unit[0] * unit[1]).sum(-1) * _HEAD_SIZE**-0.5).unsqueeze(-1),
        _ROWS,
    )
    rates, skip, shift = (normal(_HEADS, dtype=torch.float32) for _ in range(3))
    moved = F.softplus(steps.double() + shift.double())
    yield (
        "state space",
        lambda r: exact.state_space(value[r], steps[r], -rates.abs(), skip, shift, key[r], query[r], *texts(r)),
        lambda: wide * (moved * (shares[0] * shares[1]).sum(-1) + skip.double()).unsqueeze(-1),
        _ROWS,
    )


def engine(session: DoctorSession) -> list[StepFigure]:
    """A mixture of experts with learner.match_engine=exact: every prefilled and every sampled token, to the bit."""
    config = engine_config(session, model.EXPERTS, "learner.match_engine=exact", "learner.routing_replay=none")
    server = start_server(session, config.rollout, config.model, "engine_exact", exact=True)
    text = fixed_text(ByteTokenizer(), model.VOCABULARY, TEXT_TOKENS)
    prompt, whole, filtered = text[:_PROMPT_TOKENS], SamplingConfig(), SamplingConfig(temperature=0.8, top_p=0.9)

    async def score(client: SGLangClient) -> Any:
        return await client.score(text)

    async def sample(client: SGLangClient) -> Any:
        stop = StopConditions(end_of_sequence=False)
        return [
            await client.generate(GenerateRequest(prompt, _SAMPLED_TOKENS, sampling, stop, filtered_log_probs=True))
            for sampling in (whole, filtered)
        ]

    try:
        prefilled, sampled = ask(server.base_url, score), ask(server.base_url, sample)
    finally:
        server.stop()
    learner = make_learner(config)

    def figure(what: str, ids: list[int], theirs: Any, sampling: SamplingSettings) -> StepFigure:
        ours = learner.log_probs(as_batch(ids), sampling=sampling)["log_probs"]
        apart = float(np.abs(np.asarray(theirs, np.float32) - ours[-len(theirs) :]).max())
        return StepFigure(f"{what}, largest difference", apart, "nats", at_most=0.0)

    answers = [([*prompt, *each.output_ids], each.log_probs) for each in sampled]
    return [
        figure("prefilled tokens", text, prefilled, whole),
        figure("sampled tokens", *answers[0], whole),
        figure("tokens sampled with top_p", *answers[1], filtered),
    ]
