"""Six families of integer problems: out of reach for a tiny model in its head, a few characters of Python with a tool.

Every family states its problem in two phrasings and knows the code a solver would write: one snippet that is right,
some that run and print a wrong value, and some that fail (a missing import, a missing parenthesis, nothing printed).
Problems that need a search first are drawn in ``facts``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from megatron_retool.errors import InputError

QUANTITIES = ("price", "weight")
"""What the corpus states of an entity."""


@dataclass(frozen=True)
class Snippets:
    """Code that a demonstration may run."""

    correct: str
    wrong: tuple[str, ...]
    """Run without complaint and print another value than the answer (almost always)."""
    failing: tuple[str, ...]
    """Raise, or print nothing."""


@dataclass(frozen=True)
class Problem:
    """A question, its integer answer, and code for it."""

    family: str
    question: str
    answer: int
    code: Snippets


@dataclass(frozen=True)
class Fact:
    """A quantity of an entity."""

    entity: str
    quantity: str
    value: int

    @property
    def text(self) -> str:
        """The corpus's sentence."""
        return f"The {self.quantity} of {self.entity} is {self.value}."

    @property
    def query(self) -> str:
        """Finds the sentence."""
        return f"{self.quantity} of {self.entity}"

    @property
    def wrong_queries(self) -> tuple[str, ...]:
        """Find another sentence (half of the time, for the entity alone)."""
        return self.quantity, self.entity

    @property
    def failing_queries(self) -> tuple[str, ...]:
        """Find nothing: words run together, a name cut short."""
        return f"{self.quantity}_of_{self.entity}", self.entity[:-1]


@dataclass(frozen=True)
class FactProblem:
    """A question whose integer answer follows from a fact."""

    family: str
    question: str
    answer: int
    fact: Fact
    code_for: Callable[[int], Snippets] | None
    """Code for a value of the fact; None: the value itself is the answer."""


Family = Callable[[random.Random], Problem | FactProblem]


def arithmetic_code(a: int, b: int, sign: str, c: int) -> Snippets:
    """Code for a * b ± c."""
    expression = f"{a}*{b}{sign}{c}"
    return Snippets(
        correct=f"print({expression})",
        wrong=(f"print({a}+{b}{sign}{c})", f"print({a}*{b})"),
        failing=(f"print({expression}", expression),
    )


def range_sum_code(a: int, b: int) -> Snippets:
    """Code for the sum of all integers from a to b."""
    return Snippets(
        correct=f"print(sum(range({a},{b}+1)))",
        wrong=(f"print(sum(range({a},{b})))", f"print({a}+{b})"),
        failing=(f"print(sum({a},{b}+1))", f"print(sum(range({a},{b}+1))"),
    )


def _arithmetic(rng: random.Random) -> Problem:
    a, b, c = rng.randint(11, 299), rng.randint(11, 99), rng.randint(11, 99)
    sign = rng.choice("+-")
    return Problem(
        family="arithmetic",
        question=rng.choice((f"What is {a} * {b} {sign} {c}?", f"Compute {a} * {b} {sign} {c}.")),
        answer=a * b + c if sign == "+" else a * b - c,
        code=arithmetic_code(a, b, sign, c),
    )


def _gcd(rng: random.Random) -> Problem:
    factor = rng.randint(2, 24)
    a, b = factor * rng.randint(2, 24), factor * rng.randint(2, 24)
    return Problem(
        family="gcd",
        question=rng.choice((f"What is the greatest common divisor of {a} and {b}?", f"Find the gcd of {a} and {b}.")),
        answer=math.gcd(a, b),
        code=Snippets(
            correct=f"import math\nprint(math.gcd({a},{b}))",
            wrong=(f"print({a}%{b})",),
            failing=(f"print(gcd({a},{b}))", f"print(math.gcd({a},{b}))"),
        ),
    )


def _power_modulo(rng: random.Random) -> Problem:
    a, b, m = rng.randint(2, 99), rng.randint(11, 99), rng.randint(11, 499)
    return Problem(
        family="power_modulo",
        question=rng.choice((f"Find the remainder when {a}^{b} is divided by {m}.", f"What is {a}^{b} modulo {m}?")),
        answer=pow(a, b, m),
        code=Snippets(
            correct=f"print(pow({a},{b},{m}))",
            wrong=(f"print({a}^{b}%{m})", f"print({a}*{b}%{m})"),
            failing=(f"print({a}**{b}%{m}", f"pow({a},{b},{m})"),
        ),
    )


def _range_sum(rng: random.Random) -> Problem:
    a = rng.randint(2, 99)
    b = a + rng.randint(11, 300)
    return Problem(
        family="range_sum",
        question=rng.choice(
            (f"Find the sum of all integers from {a} to {b}.", f"Add up every integer from {a} to {b}, inclusive.")
        ),
        answer=(a + b) * (b - a + 1) // 2,
        code=range_sum_code(a, b),
    )


def _digit_sum(rng: random.Random) -> Problem:
    a, b = rng.randint(2, 99), rng.randint(5, 60)
    return Problem(
        family="digit_sum",
        question=rng.choice((f"What is the sum of the digits of {a}^{b}?", f"Find the digit sum of {a}^{b}.")),
        answer=sum(map(int, str(a**b))),
        code=Snippets(
            correct=f"print(sum(int(d) for d in str({a}**{b})))",
            wrong=(f"print(len(str({a}**{b})))", f"print({a}^{b})"),
            failing=(f"print(sum(str({a}**{b})))", f"print(sum(d for d in str({a}**{b})))"),
        ),
    )


def _divisor_count(rng: random.Random) -> Problem:
    n = rng.randint(20, 999)
    return Problem(
        family="divisor_count",
        question=rng.choice((f"How many positive divisors does {n} have?", f"Find the number of divisors of {n}.")),
        answer=sum(n % d == 0 for d in range(1, n + 1)),
        code=Snippets(
            correct=f"print(sum({n}%d==0 for d in range(1,{n}+1)))",
            wrong=(f"print(sum({n}%d==0 for d in range(1,{n})))", f"print(sum(d for d in range(1,{n}+1)))"),
            failing=(f"print(sum({n}%d==0 for d in range({n})))", f"print(divisors({n}))"),
        ),
    )


FAMILIES: dict[str, Family] = {
    "arithmetic": _arithmetic,
    "gcd": _gcd,
    "power_modulo": _power_modulo,
    "range_sum": _range_sum,
    "digit_sum": _digit_sum,
    "divisor_count": _divisor_count,
}


def draw(
    rng: random.Random, family: str, excluded: Collection[str] = (), families: Mapping[str, Family] = FAMILIES
) -> Problem | FactProblem:
    """A problem of ``family`` whose question is not in ``excluded``.

    Raises:
        ValueError: a thousand draws in a row were excluded (the family has too few questions for what is asked).
    """
    for _ in range(1000):
        problem = families[family](rng)
        if problem.question not in excluded:
            return problem
    raise InputError(
        f"the demo family {family!r} has too few distinct questions left: lower demo.train_rows or demo.val_rows"
    )


def distinct_problems(
    rng: random.Random, count: int, excluded: Collection[str] = (), families: Mapping[str, Family] = FAMILIES
) -> list[Problem | FactProblem]:
    """``count`` problems with distinct questions, the families in turn, none of them in ``excluded``."""
    taken = set(excluded)
    names = list(families)
    problems = []
    for row in range(count):
        problem = draw(rng, names[row % len(names)], taken, families)
        taken.add(problem.question)
        problems.append(problem)
    return problems
