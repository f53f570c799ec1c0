"""A ``ScoreRequest`` as SGLang takes it: requests that ask for the log-probs of the same ids in all their places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_rollout.engine.base import ScoredText, ScoreRequest

MOST_CELLS = 65536
"""Places times different targets of a request: its answer has a log-prob for each, as text."""


@dataclass(frozen=True)
class ScorePiece:
    """Places ``start`` to ``stop`` - 1 of a text, and the ids that are targets of any of them, in order."""

    start: int
    stop: int
    ids: tuple[int, ...] = ()


def pieces(request: ScoreRequest) -> Iterator[ScorePiece]:
    """The fewest pieces in a row whose answers stay below MOST_CELLS."""
    end = len(request.input_ids)
    if request.targets is None:
        yield ScorePiece(request.start, end)
        return
    start, ids = request.start, set(request.targets[0])
    for place in range(request.start + 1, end):
        further = ids.union(request.targets[place - request.start])
        if (place + 1 - start) * len(further) > MOST_CELLS:
            yield ScorePiece(start, place, tuple(sorted(ids)))
            start, further = place, set(request.targets[place - request.start])
        ids = further
    yield ScorePiece(start, end, tuple(sorted(ids)))


def add_likeliest_and_targets(
    found: ScoredText, meta: Mapping[str, Any], request: ScoreRequest, piece: ScorePiece
) -> None:
    """Append to ``found`` what SGLang's answer to ``piece`` says beside the log-probs.

    Raises:
        KeyError, TypeError, IndexError: it says it of other places.
    """
    count = piece.stop - piece.start
    if request.likeliest:
        rows = meta["input_top_logprobs"][1:]
        found.likeliest.extend([(int(entry[1]), float(entry[0])) for entry in rows[place]] for place in range(count))
    if request.targets is None:
        return
    known = meta["input_token_ids_logprobs"][1:] if piece.ids else [()] * count
    for place in range(count):
        values = {int(entry[1]): float(entry[0]) for entry in known[place]}
        found.targets.append([values[token] for token in request.targets[piece.start - request.start + place]])
