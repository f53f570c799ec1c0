"""The closed list of units: what may stand behind a number without being part of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from answer_equality.spelling import listed

_MEASURES: dict[str, tuple[str, str]] = {
    # spellings: (factor, dimension)
    "m meter meters metre metres": ("1", "length"),
    "km kilometer kilometers kilometre kilometres kms": ("1000", "length"),
    "cm centimeter centimeters centimetre centimetres cms": ("1/100", "length"),
    "mm millimeter millimeters millimetre millimetres": ("1/1000", "length"),
    "dm decimeter decimeters": ("1/10", "length"),
    "in inch inches": ("254/10000", "length"),
    "ft foot feet": ("3048/10000", "length"),
    "yd yds yard yards": ("9144/10000", "length"),
    "mi mile miles": ("1609344/1000", "length"),
    "g gram grams gm gms": ("1", "mass"),
    "kg kgs kilogram kilograms kilo kilos": ("1000", "mass"),
    "mg milligram milligrams": ("1/1000", "mass"),
    "ton tons": ("1", "ton"),
    "lb lbs pound pounds": ("1", "pound"),
    "oz ounce ounces": ("1/16", "pound"),
    "s sec secs second seconds": ("1", "time"),
    "ms millisecond milliseconds": ("1/1000", "time"),
    "min mins minute minutes": ("60", "time"),
    "h hr hrs hour hours": ("3600", "time"),
    "day days": ("86400", "time"),
    "week weeks wk wks": ("604800", "time"),
    "month months": ("1", "month"),
    "yr yrs year years": ("12", "month"),
    "decade decades": ("120", "month"),
    "century centuries": ("1200", "month"),
    "L l liter liters litre litres": ("1/1000", "volume"),
    "ml mL milliliter milliliters millilitre millilitres cc": ("1/1000000", "volume"),
    "gal gallon gallons": ("1", "gallon"),
    "qt quart quarts": ("1/4", "gallon"),
    "pt pint pints": ("1/8", "gallon"),
    "cup cups": ("1/16", "gallon"),
    "acre acres": ("1", "acre"),
    "hectare hectares ha": ("10000", "area"),
    "tablespoon tablespoons tbsp": ("1", "tablespoon"),
    "teaspoon teaspoons tsp": ("1/3", "tablespoon"),
    "degree degrees deg degs": ("1", "degree"),
    "radian radians rad rads": ("1", "radian"),
    "celsius": ("1", "celsius"),
    "fahrenheit": ("1", "fahrenheit"),
    "K kelvin kelvins": ("1", "kelvin"),
    "percent pct percentage %": ("1", "percent"),
    "dollar dollars USD usd buck bucks": ("1", "dollar"),
    "cent cents": ("1/100", "dollar"),
    "euro euros EUR": ("1", "euro"),
    "pence penny pennies": ("1", "penny"),
    "rupee rupees Rs rs INR": ("1", "rupee"),
    "yen JPY": ("1", "yen"),
    "yuan RMB CNY": ("1", "yuan"),
    "N newton newtons": ("1", "newton"),
    "J joule joules": ("1", "joule"),
    "kJ kilojoule kilojoules": ("1000", "joule"),
    "cal calorie calories": ("1", "calorie"),
    "W watt watts": ("1", "watt"),
    "kW kilowatt kilowatts": ("1000", "watt"),
    "V volt volts": ("1", "volt"),
    "amp amps ampere amperes": ("1", "ampere"),
    "ohm ohms": ("1", "ohm"),
    "Hz hertz": ("1", "hertz"),
    "Pa pascal pascals": ("1", "pascal"),
    "mol mole moles": ("1", "mole"),
    "bit bits": ("1", "bit"),
    "byte bytes": ("8", "bit"),
}
# Things that are counted. Each is a dimension of its own: 5 apples are not 5 pears.
_COUNTED = listed(
    "adult animal answer apple bacterium bag ball balloon banana bar basket bead bean bear bee bike bird block "
    "boat book bottle bowl box boy bracelet brick brownie bucket bug bus bushel cake can candle candy car card "
    "carrot case cat chair chicken chocolate class clip coin color computer container cookie cow crate "
    "crayon customer cube cupcake diamond dime dish doctor dog doll donut door dot dress duck edge egg "
    "employee eraser face family fan fish flight floor flower foot friend frog fruit game gift girl goat group "
    "guest hat head hen horse house invitation jar job key kid kitten leaf lemon lesson letter line lollipop "
    "loaf man marble mango match meal member message mug muffin nail necklace nickel night note nut orange "
    "outfit oyster packet page painting pancake parent passenger path patient peach peanut pear pen "
    "pencil person phone photo picture pie pig pill pizza plant plate player point potato present prize puppy "
    "question rabbit rectangle ribbon ring room rope rose row sandwich seashell seat seed segment sheep sheet "
    "shelf shell ship shirt shoe shot sibling side sister brother slice snack sock song sticker stamp star "
    "step stick stone stop store story strawberry student sweet table tank teacher team tile ticket toffee toy "
    "train tree triangle trip truck tulip turkey turtle vase vehicle vertex visitor vote vowel wheel window "
    "woman word worker worm game problem"
)
# What a count may be called without saying of what.
_GENERIC = listed(
    "unit integer number solution way time value case total item piece thing people element subset outcome "
    "choice combination arrangement permutation possibility term digit root zero factor divisor prime "
    "set function square circle degree_of_freedom cubic_unit real_number "
    "real_root distinct_solution ordered_pair different_way possible_value year_old"
)
_PLURALS = {
    **{"person": "persons", "man": "men", "woman": "women", "child": "children", "foot": "feet", "leaf": "leaves"},
    **{"loaf": "loaves", "shelf": "shelves", "vertex": "vertices", "fish": "fish", "sheep": "sheep", "goose": "geese"},
    **{"bacterium": "bacteria", "people": "people", "year_old": "years_old", "mouse": "mice", "tooth": "teeth"},
}
_SCALES = {
    **{"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12},
    **{"hundreds": 100, "thousands": 1000, "millions": 10**6, "billions": 10**9, "dozens": 12},
}
_SHORTHANDS = {
    "mph": "mile/hour",
    "kmh": "km/h",
    "kph": "km/h",
    "kmph": "km/h",
    "mpg": "mile/gallon",
    "bpm": "beat/min",
}
# What letters without \\text mean where each could be a variable too. Any other product of letters is one of variables.
_LETTER_UNITS = re.compile(r"[mgshLlKNJWV]|m \^ (?:\{ )?[23](?: \})?|m / s(?: \^ (?:\{ )?2(?: \})?)?")
_ATOM = re.compile(r"[A-Za-z_]+|%")
_PIECES = re.compile(r"[A-Za-z_]+|%|\^\s*\{?\s*-?\s*\d\s*\}?|\d|/|\*|\S")


@dataclass(frozen=True)
class Unit:
    """``scale`` times the product of dimensions to their powers, sorted by name; generic counts have no dimension."""

    scale: Fraction
    dimensions: tuple[tuple[str, int], ...]


PERCENT, DEGREE = "percent", "degree"


def single(dimension: str) -> Unit:
    """The unit of one dimension."""
    return Unit(Fraction(1), ((dimension, 1),))


def _plural(word: str) -> str:
    if word in _PLURALS:
        return _PLURALS[word]
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "x", "ch", "sh", "o")) else "s")


def _table() -> dict[str, tuple[Fraction, str]]:
    table: dict[str, tuple[Fraction, str]] = {}
    for word in (*_COUNTED, "child", "mouse", "goose", "tooth", "inhabitant", "beat", "mark", "goal", "revolution"):
        table[word] = table[_plural(word)] = (Fraction(1), word)
    for word in _GENERIC:
        table[word] = table[_plural(word)] = (Fraction(1), "")
    for spellings, (factor, dimension) in _MEASURES.items():
        for spelling in spellings.split():
            table[spelling] = (Fraction(factor), dimension)
    table["potatoes"] = table["potato"]
    return table


_TABLE = _table()


def is_unit_word(word: str) -> bool:
    """May ``word`` begin a unit?"""
    lower = word.lower()
    if len(word) == 1:
        return word in _TABLE
    return word in _TABLE or lower in _TABLE or lower in _SCALES or lower in _SHORTHANDS or lower in _LEADING


_LEADING = {"square", "sq", "cubic", "cu", "per", "real", "distinct", "different", "possible", "ordered", "us"}


def stands_alone(word: str) -> bool:
    """Is ``word`` a unit only where a space parts it from the number?"""
    return len(word) == 1 or word in ("in", "mg")


def is_letter_unit(text: str) -> bool:
    """Is ``text``, pieces with a blank between them, one of the units that single letters may stand for: m, m / s?"""
    return _LETTER_UNITS.fullmatch(text) is not None


@lru_cache(maxsize=4096)
def parse_unit(text: str) -> Unit | None:
    """Read a unit: "cm^2", "square meters", "miles per hour", "m/s^2", "thousand dollars"; None for any other text."""
    text = re.sub(r"(?<=[A-Za-z])\.", "", text).strip()
    if not text or len(text) > 80:
        return None
    text = re.sub(r"\bordered (?:pair|triple|quadruple)s?\b", "ordered_pair", text)
    lowered = re.sub(r"\b(years?) old\b", r"\1_old", text)
    lowered = re.sub(
        r"\b(real|distinct|different|possible|cubic|US) (?=(?:number|solution|root|way|value|pair|unit"
        r"|dollar|integer)s?\b)",
        "",
        lowered,
    )
    lowered = re.sub(r"\bdegrees? (?=[CF]\b|celsius|fahrenheit)", "", lowered, flags=re.IGNORECASE)
    lowered = re.sub(r"\^?\s*\\?circ\s*(?=[CF]\b)", "", lowered)
    if lowered in ("C", "F"):
        return single("celsius" if lowered == "C" else "fahrenheit")
    pieces = _PIECES.findall(lowered)
    scale, powers, sign, pending = Fraction(1), dict[str, int](), 1, 0
    last: tuple[Fraction, str] | None = None
    expects = True
    while pieces:
        piece = pieces.pop(0)
        lower = piece.lower()
        if lower in _SHORTHANDS and expects:
            pieces = _PIECES.findall(_SHORTHANDS[lower]) + pieces
            continue
        if lower in _SCALES and last is None and sign == 1:
            scale *= _SCALES[lower]
            expects = False
            continue
        if lower in ("square", "sq", "cubic", "cu") and expects_more(pieces):
            pending = 2 if lower.startswith("sq") else 3
            continue
        if piece == "/" or lower == "per":
            if sign == -1:
                return None
            sign, expects, last = -1, True, None
            continue
        if piece == "*":
            expects = True
            continue
        power = re.fullmatch(r"\^\s*\{?\s*(-?)\s*(\d)\s*\}?", piece)
        if power:
            if last is None:
                return None
            extra = int(power[1] + power[2]) - 1
            scale *= last[0] ** (sign * extra)
            powers[last[1]] = powers.get(last[1], 0) + sign * extra
            continue
        entry = _TABLE.get(piece) or (_TABLE.get(lower) if len(piece) > 1 else None)
        if entry is None or not (_ATOM.fullmatch(piece)):
            return None
        if entry == last and entry[1] == PERCENT:
            return None
        times = sign * (pending or 1)
        scale *= entry[0] ** times
        powers[entry[1]] = powers.get(entry[1], 0) + times
        last, pending, expects = entry, 0, False
    if expects or pending:
        return None
    return _normal(scale, powers)


def expects_more(pieces: list[str]) -> bool:
    """Does a word follow that "square" may be said of?"""
    return bool(pieces) and (_TABLE.get(pieces[0]) or _TABLE.get(pieces[0].lower())) is not None


def _normal(scale: Fraction, powers: dict[str, int]) -> Unit:
    # A volume is a length cubed, an area a length squared.
    for name, length in (("volume", 3), ("area", 2)):
        powers["length"] = powers.get("length", 0) + length * powers.pop(name, 0)
    powers.pop("", None)
    return Unit(scale, tuple(sorted((name, power) for name, power in powers.items() if power)))
