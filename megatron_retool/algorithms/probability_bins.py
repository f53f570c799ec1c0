"""Bins of a token's probability: metrics and reports show the mismatch of engine and learner in the same ones."""

from __future__ import annotations

PROBABILITY_BIN_EDGES = (0.01, 0.1, 0.5, 0.9)
"""Between them; the first bin begins at 0, the last ends at 1."""
