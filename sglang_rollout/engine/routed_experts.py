"""How an engine's routed experts look on the wire, and what of them can be trusted."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from conversion.model.architecture import Architecture
from megatron_retool.routed_experts import ExpertArray, expert_dtype, missing_expert


@dataclass(frozen=True)
class RoutingShape:
    """What a row of routed experts of a model looks like: [layers with experts, k], each below ``experts``.

    Attributes:
        layers: of the model.
        without_experts: numbers of the others. An engine's rows have them too, with nothing in them.
    """

    layers: int
    k: int
    experts: int
    without_experts: tuple[int, ...] = ()

    @classmethod
    def of(cls, architecture: Architecture) -> RoutingShape:
        """Of a mixture of experts.

        Raises:
            ValueError: the model is dense.
        """
        if architecture.num_experts is None or architecture.num_experts_per_tok is None:
            raise ValueError(f"a dense model ({architecture.family}) chooses no experts")
        return cls(
            architecture.num_layers,
            architecture.num_experts_per_tok,
            architecture.num_experts,
            tuple(layer for layer in range(architecture.num_layers) if not architecture.has_experts(layer)),
        )

    def decode(self, text: str, rows: int) -> ExpertArray:
        """Rows from base64, in the column's own type or in SGLang's, which is int32.

        Returns:
            [rows, layers with experts, k].

        Raises:
            ValueError: it is no base64, has another size, or names experts that the model has not.
        """
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"routed experts are no base64: {error}") from error
        dtype = np.dtype(expert_dtype(self.experts))
        count = rows * self.layers * self.k
        wire = {count * 4: np.dtype(np.int32), count * dtype.itemsize: dtype}.get(len(data))
        if wire is None:
            raise ValueError(
                f"{len(data)} bytes of routed experts, where {rows} rows of {self.layers} layers x {self.k} experts "
                f"are {count * dtype.itemsize} bytes in {dtype} or {count * 4} in int32"
            )
        result = np.frombuffer(data, wire).reshape(rows, self.layers, self.k)
        if self.without_experts:
            result = np.delete(result, self.without_experts, axis=1)
        if result.size and not (result.min() >= 0 and result.max() < self.experts):
            raise ValueError(f"routed experts from {result.min()} to {result.max()} of a model that has {self.experts}")
        column: ExpertArray = result.astype(dtype, copy=False)
        return column


def trusted_rows(rows: ExpertArray, versions: Sequence[int]) -> ExpertArray:
    """``rows`` of one answer, with those missing that other weights than the sampling ones may have chosen.

    An answer's rows are read when it ends. A request that was held while weights changed was computed again from its
    first token on, so its rows are those of the last version that sampled in it. A row belongs to the next sampled
    token: the forward pass that sampled it went through that row. So a row stays where the next sampled token is of the
    answer's last version:

    * held in the middle: rows up to the one before the first token of the last version go, that one stays. It was the
      input that this token was sampled from, whose own version is older.
    * paused with its rows received, resumed under newer weights: those were received and are not asked for again; the
      row of the last token that was sampled before the pause is new and stays, for the same reason.
    * paused without rows (aborted while it was held, or its engine died): the next answer has rows of all tokens, and
      those before tokens that older weights sampled go.
    * tool results that came between two versions: rows of the version that read them and sampled the next token.

    An engine that keeps its cache through a change would have the right rows; they go all the same, because nothing
    tells it apart. Prefixes that a cache holds from older weights do not occur: every push forgets them.

    Args:
        rows: [n, layers, k] of consecutive tokens, the last but one of the answer the last of them.
        versions: int [n + 1], of these tokens and of the answer's last; below 0: not sampled.

    Raises:
        ValueError: the lengths do not fit.
    """
    following = np.asarray(versions[1:], np.int64)
    if len(versions) != len(rows) + 1:
        raise ValueError(f"{len(rows)} rows of routed experts up to the last of {len(versions)} tokens")
    if not len(rows):
        return rows
    places = np.where(following >= 0, np.arange(len(following)), len(following) - 1)
    next_sampled = np.minimum.accumulate(places[::-1])[::-1]
    changed = following[next_sampled] != following[-1]
    if not changed.any():
        return rows
    trusted = rows.copy()
    trusted[changed] = missing_expert(rows.dtype)
    return trusted
