"""What the referee does with a step's sample: learner, referee and yardsticks read it one after another."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console

from conversion.model.architecture import Architecture
from megatron_retool.config import ConfigError
from megatron_retool.learner.precision import DTYPES
from megatron_retool.parity.referee.attribution import (
    Judged,
    Routing,
    layer_rows,
    other_experts,
    relative_differences,
    response_rows,
    routing_statistics,
    split_rows,
)
from megatron_retool.parity.referee.learner_model import describe_layout, read_learner, replays_engine
from megatron_retool.parity.referee.referee_model import (
    REFEREE_DTYPES,
    NumberFormat,
    Reading,
    engine_format,
    load_model,
    read,
    stage_names,
)
from megatron_retool.parity.referee.stored_step import SampledResponse, StoredStep, batch_of
from megatron_retool.parity.referee.verdict import verdict
from megatron_retool.routed_experts import is_missing
from megatron_retool.runs.progress import progress_line
from sglang_rollout.engine.transformers_routing import routers

WATCHED_TOKENS = 512
"""Most tokens whose hidden states are compared."""


@dataclass(frozen=True)
class _Learner:
    """The learner run again, or why it was not."""

    reading: Reading | None
    reason: str = ""


class Referee:
    """One step's readings. Each model is gone before the next is loaded."""

    judged: Judged

    def __init__(
        self,
        step: StoredStep,
        responses: Sequence[SampledResponse],
        architecture: Architecture,
        dtype: str,
        seed: int,
        console: Console,
    ) -> None:
        self._step, self._responses, self._architecture, self._console = step, responses, architecture, console
        self._format = NumberFormat(REFEREE_DTYPES[dtype])
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._batch = batch_of(responses)
        self._count = sum(len(response.positions) for response in responses)
        self._watched = np.zeros(self._count, np.bool_)
        chosen = np.random.default_rng(seed).permutation(self._count)[:WATCHED_TOKENS]
        self._watched[chosen] = True

    def result(self) -> dict[str, Any]:
        """Judge the step: the referee's log-probs against both sides, as the report's JSON has them."""
        config = self._step.config
        learner = self._learner()
        model = self._load(self._format)
        # Where the learner took the engine's experts, so does the referee that judges both, and their yardsticks.
        replayed = replays_engine(self._step, self._batch) and self._can_force(model)
        own = self._read(model, f"referee in {self._format}", watched=None if replayed else self._watched)
        forced = None
        if self._can_force(model):
            watched = self._watched if replayed else None
            forced = self._read(model, "referee with the engine's experts", watched=watched, force_experts=True)
        referee = forced if replayed and forced is not None else own
        del model
        self._free()
        learner_format = NumberFormat(DTYPES[config.learner.dtype])
        formats = {learner_format: self._yardstick(learner_format, watched=self._watched, force_experts=replayed)}
        engine = engine_format(config.rollout, config.weight_sync, config.model, self._architecture)
        if engine not in formats:
            formats[engine] = self._yardstick(engine, force_experts=replayed)
        self.judged = self._judged(
            learner, referee.log_probs, formats[engine].log_probs, formats[learner_format].log_probs
        )
        rows = split_rows(self.judged)
        layers = self._layers(learner.reading, referee, formats[learner_format])
        routing = self._routing(None if replayed else learner.reading, own, forced)
        return {
            "run": str(self._step.run_dir.name),
            "step": self._step.number,
            "verdict": verdict(rows, layers, routing, replayed=replayed),
            "weights": {"version": self._step.weights.version, "path": str(self._step.weights.path)},
            "referee": {"dtype": str(self._format), "device": self._device.type, "experts_forced": replayed},
            "learner": {
                "number_format": str(learner_format),
                "layout": describe_layout(config.learner),
                "run_again": learner.reading is not None,
                "not_run_again_because": learner.reason or None,
                "stored_against_run_again": self._stored_against(learner.reading),
                "old_log_probs": "run again" if self._bypassed else "stored",
                "routing_replay": config.learner.routing_replay,
            },
            "engine": {"number_format": str(engine), "quantization": config.rollout.engine.quantization},
            "sampling": {
                name: asdict(config.rollout.train)[name] for name in ("temperature", "top_p", "top_k", "min_p")
            },
            "splits": rows,
            "responses": response_rows(self.judged),
            "layers": layers,
            "routing": routing,
        }

    @property
    def _bypassed(self) -> bool:
        return self._responses[0].old_log_probs is None

    def _learner(self) -> _Learner:
        try:
            with progress_line(self._console, "learner", self._count) as line:
                return _Learner(read_learner(self._step, self._architecture, self._batch, self._watched, line.advance))
        except ConfigError as error:
            if self._bypassed:
                raise ConfigError(
                    f"{self._step.run_dir} took the engine's log-probs as the learner's "
                    f"(rollout_correction.bypass_old_log_probs), and the learner does not run here: {error}"
                ) from error
            return _Learner(None, str(error))
        finally:
            self._free()

    def _load(self, number_format: NumberFormat) -> Any:
        return load_model(self._step, self._architecture, number_format, self._device)

    def _read(self, model: Any, title: str, **options: Any) -> Reading:
        with progress_line(self._console, title, len(self._responses)) as line:
            return read(
                model,
                self._responses,
                self._step.config.rollout.train,
                architecture=self._architecture,
                on_response=line.advance,
                **options,
            )

    def _yardstick(self, number_format: NumberFormat, **options: Any) -> Reading:
        model = self._load(number_format)
        try:
            return self._read(model, f"yardstick in {number_format}", **options)
        finally:
            del model
            self._free()

    def _free(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _can_force(self, model: Any) -> bool:
        """Whether the engine recorded its experts, and the referee's routers can be told which to take."""
        return self._batch.routed_experts is not None and len(routers(model)) == len(self._architecture.expert_layers)

    def _judged(
        self,
        learner: _Learner,
        referee: npt.NDArray[np.float64],
        engine_yardstick: npt.NDArray[np.float64],
        learner_yardstick: npt.NDArray[np.float64],
    ) -> Judged:
        responses = self._responses
        trajectories = [response.trajectory for response in responses]
        counts = [len(response.positions) for response in responses]

        def column(name: str) -> npt.NDArray[Any]:
            return np.concatenate([getattr(r.trajectory, name)[r.positions] for r in responses])

        if self._bypassed:
            assert learner.reading is not None
            learner_log_probs = learner.reading.log_probs
        else:
            learner_log_probs = self._stored_log_probs()
        return Judged(
            engine=column("rollout_log_probs").astype(np.float64),
            learner=learner_log_probs,
            referee=referee,
            turns=column("turn_ids").astype(np.int64),
            positions=np.concatenate([response.positions for response in responses]),
            responses=np.repeat(np.arange(len(responses)), counts),
            names=[(t.group_id, t.index) for t in trajectories],
            engine_format=engine_yardstick,
            learner_format=learner_yardstick,
        )

    def _stored_log_probs(self) -> npt.NDArray[np.float64]:
        return np.concatenate([r.old_log_probs for r in self._responses if r.old_log_probs is not None])

    def _stored_against(self, reading: Reading | None) -> dict[str, float] | None:
        """How far the learner that was run again is from what the run stored: its layout, device and replay."""
        if reading is None or self._bypassed:
            return None
        difference = np.abs(reading.log_probs - self._stored_log_probs())
        return {"mean_abs": float(difference.mean()), "max_abs": float(difference.max())}

    def _layers(self, learner: Reading | None, referee: Reading, yardstick: Reading) -> list[dict[str, Any]] | None:
        if learner is None or learner.hidden is None or referee.hidden is None or yardstick.hidden is None:
            return None
        others = None
        if learner.experts is not None and referee.experts is not None and yardstick.experts is not None:
            experts = referee.experts[self._watched]
            learner_experts, format_experts = learner.experts[self._watched], yardstick.experts[self._watched]
            others = other_experts(learner_experts, experts), other_experts(format_experts, experts)
        return layer_rows(
            stage_names(self._architecture),
            relative_differences(learner.hidden, referee.hidden),
            relative_differences(yardstick.hidden, referee.hidden),
            others,
        )

    def _routing(self, learner: Reading | None, own: Reading, forced: Reading | None) -> dict[str, Any] | None:
        if forced is None or forced.experts is None or own.experts is None:
            return None
        known = []
        for response in self._responses:
            column, rows = response.trajectory.routed_experts, len(response.trajectory.prompt_ids) - 1
            positions = response.positions + rows
            known.append(np.zeros(len(positions), np.bool_) if column is None else ~is_missing(column[positions]))
        routing = Routing(
            own=own.log_probs,
            forced=forced.log_probs,
            own_experts=own.experts,
            # Where the engine's choice is known the forced pass took it.
            engine_experts=forced.experts,
            known=np.concatenate(known),
        )
        return routing_statistics(
            self.judged.engine, replace(routing, learner_experts=learner.experts if learner else None)
        )
