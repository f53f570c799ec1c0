"""Problems that begin with a search: a number that only the corpus knows, and for some of them arithmetic on it.

The corpus holds one sentence for each quantity of each invented entity, so that nothing but a search tells the number.
Queries, like code, come in kinds: one that finds the sentence, some that find another one, some that find nothing.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from megatron_retool.config import SearchConfig
from megatron_retool.data.demo.problems import (
    FAMILIES,
    QUANTITIES,
    Fact,
    FactProblem,
    Family,
    arithmetic_code,
    range_sum_code,
)
from megatron_retool.data.demo.tool_output import ToolOutput
from megatron_retool.errors import InputError
from tools.search.index import BM25Index, Passage
from tools.search.tool import describe

# Syllables that recur: a model this small copies a new name from the question piece by piece, as it copies digits.
SYLLABLES = tuple(consonant + vowel for consonant in "bdfklmnprstv" for vowel in "aiou")
CODE_FAMILIES = ("arithmetic", "power_modulo", "range_sum")
_VALUE = re.compile(r" is (\d+)\.")


def make_facts(rng: random.Random, entities: int) -> list[Fact]:
    """Every quantity of ``entities`` distinct entities.

    Raises:
        ValueError: there are not so many names.
    """
    names = [first + second for first in SYLLABLES for second in SYLLABLES if first != second]
    if entities > len(names):
        raise InputError(f"there are {len(names)} names for entities, not {entities}")
    return [
        Fact(name, quantity, rng.randint(21, 299)) for name in rng.sample(names, entities) for quantity in QUANTITIES
    ]


def fact_families(facts: Sequence[Fact]) -> dict[str, Family]:
    """Families of the two-tool demo by name: half of them need only code, the others one of ``facts``."""

    def fact(rng: random.Random) -> FactProblem:
        known = rng.choice(facts)
        question = rng.choice((f"What is the {known.query}?", f"Find the {known.query}."))
        return FactProblem("fact", question, known.value, known, None)

    def fact_arithmetic(rng: random.Random) -> FactProblem:
        known, b, c, sign = rng.choice(facts), rng.randint(11, 99), rng.randint(11, 99), rng.choice("+-")
        expression = f"the {known.query} * {b} {sign} {c}"
        return FactProblem(
            family="fact_arithmetic",
            question=rng.choice((f"What is {expression}?", f"Compute {expression}.")),
            answer=known.value * b + (c if sign == "+" else -c),
            fact=known,
            code_for=lambda value: arithmetic_code(value, b, sign, c),
        )

    def fact_range_sum(rng: random.Random) -> FactProblem:
        known, a = rng.choice(facts), rng.randint(2, 19)
        return FactProblem(
            family="fact_range_sum",
            question=rng.choice(
                (
                    f"Find the sum of all integers from {a} to the {known.query}.",
                    f"Add up every integer from {a} to the {known.query}, inclusive.",
                )
            ),
            answer=(a + known.value) * (known.value - a + 1) // 2,
            fact=known,
            code_for=lambda value: range_sum_code(a, value),
        )

    return {
        **{name: FAMILIES[name] for name in CODE_FAMILIES},
        "fact": fact,
        "fact_arithmetic": fact_arithmetic,
        "fact_range_sum": fact_range_sum,
    }


class FactSearch:
    """Callable from a query to what the search tool returns for it over ``facts``, under the tool's settings."""

    def __init__(self, facts: Sequence[Fact], config: SearchConfig) -> None:
        self._index = BM25Index([Passage(str(row), fact.text) for row, fact in enumerate(facts)])
        self._config = config
        self._found: dict[str, ToolOutput] = {}

    def __call__(self, query: str) -> ToolOutput:
        """What the search tool returns for ``query``; the same question is searched once."""
        if query not in self._found:
            hits = self._index.search(query, self._config.top_k)
            self._found[query] = ToolOutput(describe(hits, self._config), succeeded=bool(hits))
        return self._found[query]


def value_in(result: str) -> int:
    """The number that a search result states first."""
    found = _VALUE.search(result)
    assert found is not None, result
    return int(found[1])
