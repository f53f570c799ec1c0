"""The mismatch by operator: how much of it goes when one operator of engine and learner is made equal.

A real engine and the learner compute the same texts again and again, each time with other operators exchanged for those
of ``exact.operators``: none, all, each by itself, all but each. Two measures of an operator's part of the mean |d| then
stand side by side: what it takes away by itself, and what comes back without it. They differ where rounding of one
operator hides behind another's.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.table import Table
from safetensors.torch import load_file, save_file

from conversion.model.architecture import Architecture
from conversion.model.model_operators import operators_of
from megatron_retool.config import ConfigError, EngineConfig, LearnerConfig, ModelConfig
from megatron_retool.config.learner import check_operators
from megatron_retool.config.rollout import SamplingConfig
from megatron_retool.trajectory import TrajectoryBatch
from sglang_rollout.engine.base import GenerateRequest, StopConditions
from sglang_rollout.engine.client import SGLangClient
from sglang_rollout.engine.process import SGLangServer
from sglang_rollout.engine.weight_sync.quantization import Rounding

Texts = list[list[int]]
Scores = npt.NDArray[np.float64]

_MATRICES = {
    "kv_b_proj": "attention",
    "o_proj": "attention_output",
    "out_proj": "attention_output",
    "gate_proj": "mlp_up",
    "up_proj": "mlp_up",
    "gate_up_proj": "mlp_up",
    "down_proj": "mlp_down",
}
"""Operators of matrices outside experts, by their modules' names; any other is "qkv"."""


@dataclass(frozen=True)
class OperatorReport:
    """Mean |d| over the texts' tokens, in nats: with no operator exchanged, each by itself, and all but each.

    Attributes:
        ranges: of each operator, the 5th and the 95th percentile of what it takes away by itself, as shares of
            ``unmatched``, over texts that are drawn again.
    """

    tokens: int
    unmatched: float
    matched: float
    alone: dict[str, float]
    without: dict[str, float]
    ranges: dict[str, tuple[float, float]]


def model_directory(path: str) -> Path:
    """Raises ConfigError where it is no model directory."""
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{path} is no Hugging Face model directory: no config.json")
    return Path(path)


def table(found: OperatorReport) -> Table:
    """For a terminal."""
    title = (
        f"mean |d| of {found.tokens} tokens: {found.unmatched:.2e} nats; with all operators equal {found.matched:.2e}"
    )
    drawn = Table(title=title)
    for name in ("operator", "by itself takes away", "5 to 95 %", "missing from all leaves"):
        drawn.add_column(name, justify="left" if name == "operator" else "right")
    whole = max(found.unmatched, 1e-30)
    for name, alone in found.alone.items():
        low, high = found.ranges[name]
        drawn.add_row(
            name, f"{1 - alone / whole:.0%}", f"{low:.0%} to {high:.0%}", f"{found.without[name] / whole:.0%}"
        )
    return drawn


def write(found: OperatorReport, path: str) -> None:
    """The report as JSON."""
    Path(path).write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")


def report(
    model_path: Path,
    *,
    dtype: str,
    round_to: str | None,
    texts: int,
    tokens: int,
    seed: int,
    only: Sequence[str] = (),
    on_round: Callable[[int, int], object] = lambda done, of: None,
) -> OperatorReport:
    """Measure a model of a directory in the Hugging Face format.

    Args:
        dtype: of engine and learner.
        round_to: also round the engine's matrices (weight_sync.round_to); an exchanged operator's stay whole.
        texts: sampled from the engine, each from one token of the vocabulary on.
        tokens: of each.
        only: these operators; empty: all that the model has.
        on_round: called with the number of engines that have been asked, and of all.

    Raises:
        ConfigError: the model has operators that are not known, or the machine has a GPU.
        EngineStartError: an engine did not start.
    """
    architecture = Architecture.from_pretrained(model_path)
    check_operators(architecture)
    present = operators_of(architecture)
    if unknown := [each for each in only if each not in present]:
        raise ConfigError(f"{', '.join(unknown)}: this model's operators are {', '.join(present)}")
    names, everything = tuple(only) or present, frozenset(present)
    rounds = [frozenset[str](), everything, *({each} for each in names), *(everything - {each} for each in names)]
    differences: list[Scores] = []
    with tempfile.TemporaryDirectory() as directory, _OneRank(model_path, dtype) as learner:
        place = Path(directory)
        drawn: Texts = []
        for number, exchanged in enumerate(map(frozenset, rounds)):
            served = _rounded(model_path, place / f"model_{number}", round_to, exchanged)
            with _engine(served, dtype, exchanged, place / f"engine_{number}.log") as engine:
                drawn = drawn or asyncio.run(_sample(engine.base_url, architecture.vocab_size, texts, tokens, seed))
                engine_scores = asyncio.run(_score(engine.base_url, drawn))
            differences.append(np.abs(learner.scores(drawn, exchanged) - engine_scores))
            on_round(number + 1, len(rounds))
    means = [float(each.mean()) for each in differences]
    count = len(names)
    return OperatorReport(
        tokens=differences[0].size,
        unmatched=means[0],
        matched=means[1],
        alone=dict(zip(names, means[2 : 2 + count], strict=True)),
        without=dict(zip(names, means[2 + count :], strict=True)),
        ranges=dict(zip(names, _ranges(differences[0], differences[2 : 2 + count], seed), strict=True)),
    )


def _ranges(unmatched: Scores, alone: list[Scores], seed: int) -> Iterator[tuple[float, float]]:
    rows = np.random.default_rng(seed).integers(0, len(unmatched), (1000, len(unmatched)))
    whole = unmatched.mean(1)[rows].mean(1)
    for each in alone:
        shares = 1 - each.mean(1)[rows].mean(1) / np.maximum(whole, 1e-30)
        low, high = np.percentile(shares, [5, 95])
        yield float(low), float(high)


def _rounded(model: Path, target: Path, round_to: str | None, exchanged: Collection[str]) -> Path:
    """A copy of the model for an engine, with the matrices rounded that belong to no exchanged operator."""
    if round_to is None:
        return model
    shutil.copytree(model, target)
    rounding = Rounding(ModelConfig(path=str(model)), round_to)
    for file in sorted(target.glob("*.safetensors")):
        weights = load_file(file)
        for name in weights.keys() & rounding.names:
            if _operator_of_weight(name) not in exchanged:
                ((_, weights[name]),) = rounding([(name, weights[name])])
        save_file(weights, file, metadata={"format": "pt"})
    return target


def _operator_of_weight(name: str) -> str:
    return "experts" if ".experts." in name else _MATRICES.get(name.split(".")[-2], "qkv")


def _engine(model: Path, dtype: str, exchanged: Collection[str], log: Path) -> SGLangServer:
    config = EngineConfig(device="cpu", dtype=dtype, max_total_tokens=65536, max_running_requests=64)
    return SGLangServer(config, model_path=model, log_file=log, exact_operators=exchanged)


async def _sample(url: str, vocabulary: int, texts: int, tokens: int, seed: int) -> Texts:
    starts = np.random.default_rng(seed).integers(0, vocabulary, texts).tolist()
    sampling, stop = SamplingConfig(), StopConditions(end_of_sequence=False)
    async with SGLangClient(url) as client:
        requests = [
            GenerateRequest([start], tokens, sampling, stop, seed=seed + number) for number, start in enumerate(starts)
        ]
        result = await asyncio.gather(*(client.generate(request) for request in requests))
    return [[start, *each.output_ids] for start, each in zip(starts, result, strict=True)]


async def _score(url: str, texts: Texts) -> Scores:
    async with SGLangClient(url) as client:
        return np.array(await asyncio.gather(*(client.score(text) for text in texts)), np.float64)


class _OneRank:
    """The learner in this process, with one set of operators after another; a context."""

    def __init__(self, model_path: Path, dtype: str) -> None:
        self._path = model_path
        self._settings = LearnerConfig(dtype=dtype)

    def __enter__(self) -> _OneRank:
        from megatron_retool.learner import parallel

        self._architecture = Architecture.from_pretrained(self._path)
        self._layout, self._device = self._settings.layout(self._architecture), parallel.resolve_device("cpu")
        parallel.initialize(self._layout, self._device, 0)
        return self

    def __exit__(self, *_: object) -> None:
        from megatron_retool.learner import parallel

        parallel.shutdown()

    def scores(self, texts: Texts, exchanged: Collection[str]) -> Scores:
        """Log-probs of each text's tokens but the first: float64 [texts, tokens]."""
        import torch

        from conversion.model import flops
        from megatron_retool.learner.exact import place
        from megatron_retool.learner.model import build_model_chunks
        from megatron_retool.learner.packing import Packer
        from megatron_retool.learner.precision import acceleration_for
        from megatron_retool.learner.specs import build_transformer_config
        from megatron_retool.learner.weights import load_hf_weights

        acceleration = acceleration_for(self._settings)
        config = build_transformer_config(self._architecture, self._settings, self._layout, acceleration)
        (model,) = build_model_chunks(self._architecture, config, acceleration)
        load_hf_weights([model], self._architecture, self._path)
        place([model], self._architecture, exchanged)
        packer = Packer(
            self._layout,
            self._settings.max_tokens_per_micro_batch,
            0,
            0,
            self._device,
            quadratic_cost=flops.quadratic_cost(self._architecture),
        )
        result = np.zeros(sum(len(text) - 1 for text in texts))
        with torch.no_grad():
            for micro_batch in packer.micro_batches(_batch(texts)):
                places = micro_batch.response_positions[micro_batch.slots.numpy()]
                result[places] = model.eval()(micro_batch)[0].numpy()
        return result.reshape(len(texts), -1)


def _batch(texts: Texts) -> TrajectoryBatch:
    responses = np.concatenate([np.array(text[1:], np.int32) for text in texts])
    count, rows = len(responses), len(texts)
    return TrajectoryBatch(
        prompt_ids=np.array([text[0] for text in texts], np.int32),
        prompt_lengths=np.ones(rows, np.int32),
        response_ids=responses,
        response_lengths=np.array([len(text) - 1 for text in texts], np.int32),
        loss_mask=np.ones(count, np.bool_),
        rollout_log_probs=np.zeros(count, np.float32),
        weight_versions=np.zeros(count, np.int32),
        turn_ids=np.zeros(count, np.int32),
        group_ids=np.arange(rows),
        indices=np.zeros(rows, np.int32),
        rewards=np.zeros(rows, np.float32),
    )
