"""Whether an engine and the learner compute the same model: their log-probs of one text, and what a difference means.

Rounding moves log-probs a little everywhere; a tensor that was not sent, an output layer of another model, other rotary
frequencies or damaged rows of the vocabulary move them by as much as the log-probs differ among themselves. So a
difference is measured in units of that spread: 0 is the same model, about 1.4 are two that have nothing to do with each
other, whatever the size, the training and the vocabulary of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_MAX_EXPONENT = 20.0
"""As in the metrics of rollouts."""
PARTS = 8
"""Ranges of the text, and of the vocabulary, that are looked at apart."""
MIN_PART = 8
"""Tokens without which a part says nothing."""
FIRST_TOKENS = 16
"""Positions at which wrong rotary frequencies have hardly turned queries and keys apart."""
CONTRAST = 2.0
"""How much more a part must differ than the rest to be named as the place."""


@dataclass(frozen=True)
class ComparedPart:
    """Tokens that differ, where the others do not: ids or positions ``first`` to ``last``."""

    kind: str
    first: int
    last: int


class LogProbComparison:
    """An engine's log-probs of a text against the learner's.

    Args:
        ids: the text, [n + 1].
        engine, learner: log-prob of each token but the first, given those before it, [n].

    Attributes:
        difference: engine - learner, [n].
        spread: mean absolute deviation of the learner's log-probs, in nats.
    """

    def __init__(self, ids: Sequence[int], engine: npt.ArrayLike, learner: npt.ArrayLike) -> None:
        self.ids: IntArray = np.asarray(ids, np.int64)
        self.engine: FloatArray = np.asarray(engine, np.float64)
        self.learner: FloatArray = np.asarray(learner, np.float64)
        if not len(self.ids) - 1 == len(self.engine) == len(self.learner) > 0:
            raise ValueError(
                f"{len(self.ids)} ids, {len(self.engine)} and {len(self.learner)} log-probs do not line up"
            )
        self.difference: FloatArray = self.engine - self.learner
        self.spread = max(float(np.abs(self.learner - self.learner.mean()).mean()), 1e-6)

    @property
    def mean(self) -> float:
        """Mean |difference|, in nats."""
        return float(np.abs(self.difference).mean())

    @property
    def max(self) -> float:
        """Largest |difference|, in nats."""
        return float(np.abs(self.difference).max())

    @property
    def k3(self) -> float:
        """Mean of exp(-d) - 1 + d: the k3 estimate of the two distributions' divergence, where the text was sampled."""
        ratio = np.clip(-self.difference, -_MAX_EXPONENT, _MAX_EXPONENT)
        return float((np.exp(ratio) - 1 - ratio).mean())

    @property
    def relative(self) -> float:
        """``mean`` in units of ``spread``."""
        return self.mean / self.spread

    @cached_property
    def _in_spreads(self) -> FloatArray:
        return np.abs(self.difference) / self.spread

    def differs(self, bound: float) -> bool:
        """Whether the difference exceeds ``bound`` (in units of ``spread``), over all tokens or in one part of them.

        A part counts by its median: experts that are chosen otherwise by a rounding error move some tokens far, damage
        moves all of a part.
        """
        if not np.isfinite(self.difference).all():
            return True
        return self.relative > bound or any(
            np.median(self._in_spreads[rows]) > bound for _, parts in self._parts() for rows, _, _ in parts
        )

    def place(self) -> ComparedPart | None:
        """Where the difference is, if it is not everywhere alike: a range of the vocabulary, or the later positions."""
        for kind, parts in self._parts():
            medians = np.array([np.median(self._in_spreads[rows]) for rows, _, _ in parts])
            off = medians > CONTRAST * np.median(medians)
            if kind != "position" and off.any():
                result = [part for part, is_off in zip(parts, off, strict=True) if is_off]
                return ComparedPart(kind, min(first for _, first, _ in result), max(last for _, _, last in result))
        first, later = self._in_spreads[:FIRST_TOKENS], self._in_spreads[FIRST_TOKENS:]
        if len(later) >= MIN_PART and np.median(later) > CONTRAST * np.median(first):
            return ComparedPart("position", self._onset(float(np.median(later)) / 2), len(self.ids) - 1)
        return None

    def _onset(self, level: float) -> int:
        """First position of the text from which the median of the next tokens exceeds ``level``."""
        for start in range(0, len(self.difference) - MIN_PART):
            if np.median(self._in_spreads[start : start + 2 * MIN_PART]) > level:
                return start + 1
        return 1

    def _parts(self) -> list[tuple[str, list[tuple[npt.NDArray[np.intp], int, int]]]]:
        """By kind: rows of a part, and its first and last id or position."""
        every = np.arange(len(self.difference))
        kinds = {"output id": self.ids[1:], "input id": self.ids[:-1], "position": every + 1}
        parts = []
        for kind, values in kinds.items():
            edges = np.linspace(0, int(values.max()) + 1, PARTS + 1)
            which = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, PARTS - 1)
            rows = [every[which == part] for part in range(PARTS)]
            parts.append((kind, [(r, int(values[r].min()), int(values[r].max())) for r in rows if len(r) >= MIN_PART]))
        return parts

    def diagnosis(self, bound: float) -> str:
        """What differs, where, and what is the likely cause, most likely first."""
        broken = ~np.isfinite(self.difference)
        if broken.any():
            side = "engine" if not np.isfinite(self.engine).all() else "learner"
            return (
                f"{int(broken.sum())} of {len(broken)} log-probs of the {side} are no numbers, the first at position "
                f"{int(broken.argmax()) + 1}: weights that are NaN or infinite, or a dtype too narrow for the model"
            )
        worst = int(np.abs(self.difference).argmax())
        off = float((self._in_spreads > bound).mean())
        figures = (
            f"mean |d| {self.mean:.3g} nats, which is {self.relative:.2g} of the log-probs' own spread of "
            f"{self.spread:.3g}; largest {self.max:.3g} (position {worst + 1}, id {self.ids[worst + 1]}), "
            f"k3 {self.k3:.2g}; {off:.0%} of the tokens are beyond the bound"
        )
        return f"{figures}. {self._causes()}"

    def _causes(self) -> str:
        place = self.place()
        if place is None:
            return (
                "All of the text is concerned. Likely: an output layer or embedding that the engine takes from "
                "elsewhere (tie_word_embeddings); a tensor that was not sent, or that the engine puts in another place "
                "(weight_sync.verify=true names it); rms_norm_eps, rope or experts' settings that the engine reads "
                "otherwise; weights in model.mcore_path that are another model's than model.path's config.json"
            )
        if place.kind == "position":
            return (
                f"It grows with the position, from about {place.first} on. Likely: rope settings that one side reads "
                "otherwise (rope_theta, rope_scaling or rope_parameters of config.json, a --json-model-override-args "
                "in rollout.engine.extra_args); a window of attention that only one side has; a rotary table that is "
                "too short"
            )
        role = "are predicted" if place.kind == "output id" else "are read"
        rows = "the output layer" if place.kind == "output id" else "the embedding"
        return (
            f"It lies where ids from about {place.first} to {place.last} {role}. Likely: rows of {rows} that did not "
            "arrive, or lie in other places: padding of the vocabulary, a shard of one tensor-parallel rank, a "
            "vocab_size that is not that of the weights"
        )
