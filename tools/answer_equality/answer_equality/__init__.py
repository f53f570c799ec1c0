"""Whether two mathematical answers are equal: spelling, tokens, grammar, values, units, and the comparison itself."""

from answer_equality.equality import canonical, equivalent
from answer_equality.score import compute_score, extract_answer

__all__ = ["canonical", "compute_score", "equivalent", "extract_answer"]
