"""Eight families of problems in words and one in bare figures, for a pre-trained model that is to learn the tool.

Out of reach for 135 million parameters in their head: products of two- and three-digit numbers in short stories. As in
``problems``, each family knows the code a solver would write, code that is wrong, and code that fails.
"""

from __future__ import annotations

import random

from megatron_retool.data.demo.problems import Family, Problem, Snippets

_NAMES = ("Mia", "Omar", "Lena", "Ravi", "Sofia", "Jonas", "Aisha", "Tom", "Nora", "Pablo", "Yuki", "Ella")
_THINGS = ("pencils", "marbles", "stickers", "apples", "books", "tickets", "cards", "coins", "beads", "buttons")
_HOLDERS = ("boxes", "bags", "crates", "jars", "packs")


def _code(expression: str, *wrong: str) -> Snippets:
    """Code that prints ``expression``; the wrong ones print another."""
    return Snippets(
        correct=f"print({expression})",
        wrong=tuple(f"print({each})" for each in wrong),
        failing=(f"print({expression}", f"result = {expression}", f"print({expression}) dollars"),
    )


def _bare(rng: random.Random) -> Problem:
    a, b, c = rng.randint(13, 499), rng.randint(12, 99), rng.randint(11, 999)
    sign = rng.choice("+-")
    question = rng.choice((f"What is {a} * {b} {sign} {c}?", f"Calculate {a} × {b} {sign} {c}."))
    answer = a * b + c if sign == "+" else a * b - c
    return Problem("bare", question, answer, _code(f"{a} * {b} {sign} {c}", f"{a} + {b} {sign} {c}", f"{a} * {b}"))


def _boxes(rng: random.Random) -> Problem:
    a, b, c = rng.randint(12, 99), rng.randint(12, 99), rng.randint(11, 99)
    name, thing, holder = rng.choice(_NAMES), rng.choice(_THINGS), rng.choice(_HOLDERS)
    question = rng.choice((
        f"{name} has {a} {holder} with {b} {thing} in each, and {c} loose {thing}. How many {thing} does {name} have?",
        f"There are {a} {holder} of {b} {thing} each in a shop, and {c} more {thing} on a shelf. How many {thing} is "
        "that in total?",
    ))  # fmt: skip
    return Problem("boxes", question, a * b + c, _code(f"{a} * {b} + {c}", f"{a} + {b} + {c}", f"{a} * {b}"))


def _change(rng: random.Random) -> Problem:
    n, price = rng.randint(7, 29), rng.randint(12, 89)
    money = n * price + rng.randint(11, 499)
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    question = rng.choice((
        f"{name} has {money} dollars and buys {n} {thing} for {price} dollars each. How many dollars are left?",
        f"Each of {n} {thing} costs {price} dollars. {name} pays with {money} dollars. How many dollars of change does "
        f"{name} get?",
    ))  # fmt: skip
    code = _code(f"{money} - {n} * {price}", f"{n} * {price}", f"{money} - {n} - {price}")
    return Problem("change", question, money - n * price, code)


def _leftover(rng: random.Random) -> Problem:
    n, total = rng.randint(7, 39), rng.randint(311, 2999)
    thing = rng.choice(_THINGS)
    question = rng.choice((
        f"{total} {thing} are shared equally among {n} children. How many {thing} are left over?",
        f"{rng.choice(_NAMES)} packs {total} {thing} into bags of {n}. How many {thing} do not fill a bag?",
    ))  # fmt: skip
    return Problem("leftover", question, total % n, _code(f"{total} % {n}", f"{total} // {n}", f"{total} - {n}"))


def _journey(rng: random.Random) -> Problem:
    v, h, w, k = rng.randint(31, 129), rng.randint(3, 19), rng.randint(31, 129), rng.randint(3, 19)
    vehicle = rng.choice(("train", "truck", "bus", "ship"))
    question = rng.choice((
        f"A {vehicle} travels {h} hours at {v} km per hour, then {k} hours at {w} km per hour. How many km is that?",
        f"A {vehicle} drives at {v} km/h for {h} hours and at {w} km/h for {k} more hours. How many km does it drive?",
    ))  # fmt: skip
    code = _code(f"{v} * {h} + {w} * {k}", f"{v} * {h}", f"({v} + {w}) * ({h} + {k})")
    return Problem("journey", question, v * h + w * k, code)


def _savings(rng: random.Random) -> Problem:
    first, more, weeks = rng.randint(5, 60), rng.randint(2, 19), rng.randint(6, 26)
    name = rng.choice(_NAMES)
    question = rng.choice((
        f"{name} saves {first} dollars in the first week and {more} dollars more in each week than in the one before. "
        f"How many dollars has {name} saved after {weeks} weeks?",
        f"In week 1 {name} saves {first} dollars, and every week {more} dollars more than the week before. How many "
        f"dollars are saved in {weeks} weeks together?",
    ))  # fmt: skip
    code = _code(
        f"sum({first} + {more} * i for i in range({weeks}))",
        f"{first} + {more} * {weeks}",
        f"sum({first} + {more} * i for i in range(1, {weeks}))",
    )
    return Problem("savings", question, sum(first + more * i for i in range(weeks)), code)


def _discount(rng: random.Random) -> Problem:
    percent = rng.choice((5, 10, 15, 20, 25, 30, 35, 40, 45))
    price, n = 20 * rng.randint(3, 45), rng.randint(3, 19)
    thing = rng.choice(("lamps", "chairs", "bikes", "coats", "tables"))
    question = rng.choice((
        f"{thing.capitalize()} cost {price} dollars each, and today {percent}% less. How many dollars do {n} {thing} "
        "cost today?",
        f"A shop takes {percent}% off its {thing}, which cost {price} dollars each. How many dollars do {n} of them "
        "cost now?",
    ))  # fmt: skip
    code = _code(
        f"{n} * {price} * (100 - {percent}) // 100",
        f"{n} * {price} * {percent} // 100",
        f"{n} * {price} - {percent}",
    )
    return Problem("discount", question, n * price * (100 - percent) // 100, code)


def _floor(rng: random.Random) -> Problem:
    a, b, tile = rng.randint(12, 79), rng.randint(12, 79), rng.randint(3, 19)
    question = rng.choice((
        f"A hall is {a} meters long and {b} meters wide. A square meter of its floor costs {tile} dollars. How many "
        "dollars does the floor cost?",
        f"How many dollars does it take to cover a field of {a} by {b} meters at {tile} dollars a square meter?",
    ))  # fmt: skip
    code = _code(f"{a} * {b} * {tile}", f"2 * ({a} + {b}) * {tile}", f"{a} * {b}")
    return Problem("floor", question, a * b * tile, code)


def _teams(rng: random.Random) -> Problem:
    schools, teams, players = rng.randint(6, 29), rng.randint(3, 19), rng.randint(6, 23)
    gone = rng.randint(11, 99)
    question = rng.choice((
        f"{schools} schools send {teams} teams of {players} players each. {gone} players are ill. How many play?",
        f"At a contest of {schools} schools, with {teams} teams each and {players} players in a team, {gone} players "
        "go home early. How many players stay?",
    ))  # fmt: skip
    answer = schools * teams * players - gone
    code = _code(
        f"{schools} * {teams} * {players} - {gone}",
        f"{schools} * {teams} * {players}",
        f"{schools} * {players} - {gone}",
    )
    return Problem("teams", question, answer, code)


WORD_FAMILIES: dict[str, Family] = {
    "bare": _bare,
    "boxes": _boxes,
    "change": _change,
    "leftover": _leftover,
    "journey": _journey,
    "savings": _savings,
    "discount": _discount,
    "floor": _floor,
    "teams": _teams,
}
