"""Reads the tokens of one expression: sums, products, powers, roots, fractions, functions, brackets."""

from __future__ import annotations

from fractions import Fraction

from answer_equality.cursor import TokenCursor, digit
from answer_equality.expressions import (
    INFINITY,
    PI,
    REALS,
    Bracketed,
    Collection,
    E,
    Expression,
    FunctionCall,
    I,
    Number,
    Structure,
    Symbol,
    integer,
    is_expression,
)
from answer_equality.spelling import listed
from answer_equality.tokens import Numeral, Token, UnreadableError
from answer_equality.words import BARE_FUNCTIONS, GREEK, split_word

_FUNCTIONS = frozenset(
    listed("sin cos tan sec csc cot arcsin arccos arctan sinh cosh tanh exp log ln gcd lcm max min lg")
)
_ALIASES = {
    **{"asin": "arcsin", "acos": "arccos", "atan": "arctan", "Abs": "abs", "ceiling": "ceil", "arcsinh": "asinh"},
    **{"log10": "lg", "cosec": "csc", "ctg": "cot", "tg": "tan", "comb": "binomial", "Max": "max", "Min": "min"},
}
_INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_DECORATIONS = frozenset(
    listed(
        "angle triangle overline vec overrightarrow overleftrightarrow widehat hat bar widetilde tilde odot "
        "square measuredangle parallelogram overarc"
    )
)
_CLOSING = {"(": ")", "[": "]", "\\{": "\\}", "{": "}"}
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_MOST_BITS = 10_000
_FUNCTION_LETTERS = frozenset("fghFGHP")


class AnswerGrammar(TokenCursor):
    """A recursive-descent reader of one slice of tokens. Depth is bounded; reading takes linear time."""

    # Expressions.

    def sum(self) -> Structure:
        """Terms with + - \\pm \\mp between them."""
        left = self._term()
        while self.sees("+", "-", "\\pm", "\\mp", "+/-"):
            sign = self.tokens[self.position].text
            self.position += 1
            right = _expression(self._term())
            name = {"+": "add", "-": "sub", "\\mp": "mp"}.get(sign, "pm")
            left = FunctionCall(name, (_expression(left), right))
        return left

    def _term(self) -> Structure:
        left = self._signed()
        while True:
            if self.take("*", "\\cdot", "\\times"):
                left = FunctionCall("mul", (_expression(left), _expression(self._signed())))
            elif self.take("/", "\\div"):
                left = FunctionCall("div", (_expression(left), _expression(self._signed())))
            elif self._factor_follows():
                left = self._beside(left)
            else:
                return left

    def _signed(self) -> Structure:
        for signs, name in ((("-",), "neg"), (("+",), ""), (("\\pm", "+/-"), "pm"), (("\\mp",), "mp")):
            if self.take(*signs):
                self.enter(1, shields=False)
                inner = self._signed()
                self.leave(1, shields=False)
                if not name:
                    return inner
                operand = _expression(inner)
                return FunctionCall(name, (operand,) if name == "neg" else (integer(0), operand))
        return self._power()

    def _factor_follows(self) -> bool:
        token = self.token
        if token is None or self.unit_ahead():
            return False
        if token.kind in ("number", "word"):
            return token.text not in ("and", "or", "mod", "in")
        if token.kind == "text":
            return len(token.text) == 1
        if token.kind == "command":
            name = token.text[1:]
            return (
                name in ("frac", "sqrt", "pi", "binom", "lfloor", "lceil", "infty", "langle")
                or name in GREEK
                or name in _FUNCTIONS
                or name in _INVERSES.values()
            )
        return token.text in ("(", "{", "[") or (token.text == "|" and not self.bars)

    def _beside(self, left: Structure) -> Structure:
        token = self.tokens[self.position]
        before = self.tokens[self.position - 1]
        following = self.tokens[self.position + 1 : self.position + 2]
        prime_power = before.text == "}" and following and following[0].text == "^"
        if token.kind == "number" and before.text != "!" and not prime_power:
            raise UnreadableError("a number right behind a factor")
        right = _expression(self._power())
        mixed = (
            before.kind == "number"
            and isinstance(left, Number | FunctionCall)
            and token.text == "\\frac"
            and _is_proper_fraction(right)
            and _ends_in_integer(left)
        )
        return _mixed(left, right) if mixed else FunctionCall("mul", (_expression(left), right))

    def _power(self) -> Structure:
        self.enter(1, shields=False)
        base = self._postfix(self._primary())
        if self.sees("^", "**") and not self.unit_ahead():
            self.position += 1
            base = self._raised(_expression(base))
        self.leave(1, shields=False)
        return base

    def _raised(self, base: Expression) -> Structure:
        if self.take("\\circ") or self._braced_circle():
            return self._postfix(FunctionCall("mul", (base, FunctionCall("div", (PI, integer(180))))))
        token = self.token
        if token is not None and token.kind == "text" and token.text in ("th", "st", "nd", "rd"):
            self.position += 1
            return base
        exponent = self._exponent()
        return self._postfix(FunctionCall("pow", (base, exponent)))

    def _exponent(self) -> Expression:
        if self.take("-"):
            return FunctionCall("neg", (self._exponent(),))
        self.take("+")
        self.first_letter_alone()
        self.enter(1)
        exponent = _expression(self._postfix(self._primary()))
        if self.take("^", "**"):
            self.first_letter_alone()
            exponent = FunctionCall("pow", (exponent, self._exponent()))
        self.leave(1)
        return exponent

    def _braced_circle(self) -> bool:
        following = self.tokens[self.position : self.position + 3]
        if [token.text for token in following] == ["{", "\\circ", "}"]:
            self.position += 3
            return True
        return False

    def _postfix(self, base: Structure) -> Structure:
        while True:
            if self.sees("!"):
                self.position += 1
                if self.sees("!"):
                    raise UnreadableError("double factorial")
                base = FunctionCall("factorial", (_expression(base),))
            elif self.sees("'") and isinstance(base, Symbol):
                self.position += 1
                base = Symbol(base.name + "'")
            elif self.sees("%", "\\%") and not self.unit_ahead():
                self.position += 1
                base = FunctionCall("div", (_expression(base), integer(100)))
            elif self.sees("_") and isinstance(base, Number):
                self.position += 1
                base = _in_base(base.numeral, self._subscript())
            else:
                return base

    # What is not made of operators.

    def _primary(self) -> Structure:
        token = self.token
        if token is None:
            raise UnreadableError("something is missing at the end")
        self.position += 1
        if token.kind == "number":
            assert token.numeral is not None
            return self._mixed_number(token.numeral)
        if token.kind == "word":
            return self._word(token)
        if token.kind == "text":
            return self._upright(token)
        if token.kind == "command":
            return self._command(token.text[1:])
        if token.text in ("(", "[", "\\{", "{"):
            return self._bracketed(token.text)
        if token.text == "|":
            self.enter(1)
            self.bars += 1
            inner = _expression(self.sum())
            self.bars -= 1
            self.leave(1)
            self.expect("|")
            return FunctionCall("abs", (inner,))
        raise UnreadableError(f"unexpected {token.text}")

    def _mixed_number(self, numeral: Numeral) -> Structure:
        """3 1/7: an integer, then a fraction of two integers."""
        following = self.tokens[self.position : self.position + 3]
        if (
            len(following) == 3
            and following[1].text == "/"
            and following[0].spaced
            and not following[1].spaced
            and following[0].numeral is not None
            and following[2].numeral is not None
            and numeral.value.denominator == 1
            and numeral.step is None
        ):
            above, below = following[0].numeral.value, following[2].numeral.value
            if above.denominator == below.denominator == 1 and 0 < above < below:
                self.position += 3
                return Number(Numeral(numeral.value + above / below))
        return Number(numeral)

    def _word(self, token: Token) -> Structure:
        name = _ALIASES.get(token.text, token.text)
        if name in BARE_FUNCTIONS or (name in _FUNCTIONS and name != "tg"):
            return self._function(name, natural_log=True)
        constant = {"pi": PI, "oo": INFINITY, "inf": INFINITY, "Infinity": INFINITY, "infinity": INFINITY}.get(name)
        if constant is not None:
            return constant
        if name in GREEK:
            return Symbol(name)
        parts = split_word(token.text)
        if parts[0] in _FUNCTIONS:
            # sinx: give back the letters behind the name.
            self.tokens[self.position : self.position] = [Token("word", part) for part in parts[1:]]
            return self._function(parts[0], natural_log=True)
        if len(parts) > 1:
            self.tokens[self.position : self.position] = [Token("word", part) for part in parts[1:]]
        return self._symbol(parts[0])

    def _symbol(self, letter: str) -> Structure:
        name = letter
        if self.sees("_"):
            self.position += 1
            name = f"{letter}_{self._subscript()}"
        if name in ("e", "i"):
            return E if name == "e" else I
        while self.take("'"):
            name += "'"
        following = self.token
        if self.sees("(") and following is not None and not following.spaced and name[0] in _FUNCTION_LETTERS:
            return self._unknown(name)
        if name == "C" and self.sees("("):
            arguments = self._arguments()
            if len(arguments) == 2:
                return FunctionCall("binomial", arguments)
            return FunctionCall("unknown C", arguments)
        return Symbol(name)

    def _unknown(self, name: str) -> FunctionCall:
        return FunctionCall(f"unknown {name}", self._arguments())

    def _upright(self, token: Token) -> Structure:
        if len(token.text) == 1 and token.text.isalpha():
            return {"e": E, "i": I}.get(token.text, Symbol(token.text))
        if len(self.tokens) == 1 or self.sees("="):
            return Symbol(token.text)
        raise UnreadableError(f"words: {token.text}")

    def _command(self, name: str) -> Structure:
        if name in _FUNCTIONS or name in _INVERSES.values() or name in ("arccot", "sinh", "cosh", "tanh"):
            return self._function(name, natural_log=False)
        if name == "frac":
            above = self._argument(first=True)
            return FunctionCall("div", (above, self._argument()))
        if name == "binom":
            above = self._argument(first=True)
            return FunctionCall("binomial", (above, self._argument()))
        if name == "sqrt":
            return self._root()
        if name in ("lfloor", "lceil"):
            self.enter(1)
            inner = _expression(self.sum())
            self.leave(1)
            self.expect("\\r" + name[1:])
            return FunctionCall("floor" if name == "lfloor" else "ceil", (inner,))
        if name == "langle":
            return self._bracketed("\\langle")
        if name == "mathbb":
            field = self.argument_text()
            return REALS if field == "R" else Symbol(f"field {field}")
        if name in ("emptyset",):
            return Collection(())
        if name == "pi":
            return PI
        if name == "infty":
            return INFINITY
        if name in GREEK:
            return self._symbol(name)
        if name in _DECORATIONS:
            return Symbol(f"{name} {self.argument_text()}")
        raise UnreadableError(f"\\{name}")

    def _function(self, name: str, natural_log: bool) -> Structure:
        base: Expression | None = None
        power: Expression | None = None
        for _ in range(2):
            if name in ("log", "ln") and base is None and self.take("_"):
                base = self._script()
            elif power is None and name in _FUNCTIONS and self.sees("^"):
                self.position += 1
                power = self._exponent()
        if self.sees("(") or self.sees("["):
            arguments = self._arguments()
        elif name in _FUNCTIONS or name in _INVERSES.values() or name in ("sqrt", "cbrt"):
            arguments = (self._bare_argument(name),)
        else:
            raise UnreadableError(f"{name} without an argument")
        if name == "sqrt" or name == "cbrt":
            exponent = FunctionCall("div", (integer(1), integer(2 if name == "sqrt" else 3)))
            return (
                FunctionCall("root", (arguments[0], integer(2 if name == "sqrt" else 3)))
                if len(arguments) == 1
                else exponent
            )
        if name == "log":
            if len(arguments) == 2:
                base = arguments[1]
            elif base is None and not natural_log:
                base = integer(10)
            arguments = (arguments[0],)
        if name == "lg":
            name, base = "log", integer(10)
        if name == "ln":
            name = "log"
        if name in _INVERSES and power == FunctionCall("neg", (integer(1),)):
            return FunctionCall(_INVERSES[name], arguments)
        if name in ("Fraction", "Rational"):
            return FunctionCall("div", (*arguments, integer(1))[:2]) if len(arguments) <= 2 else _raise(name)
        called = FunctionCall(name, arguments if base is None else (arguments[0], base))
        return called if power is None else FunctionCall("pow", (called, power))

    def _bare_argument(self, name: str) -> Expression:
        """What \\sin x takes without brackets: the factors beside each other up to the next function or operator."""
        self.enter(1)
        negative = self.take("-")
        if name in ("sqrt", "cbrt"):
            argument = _expression(self._primary())
        else:
            argument = _expression(self._power())
            while self._factor_follows() and not self._function_follows() and not self.sees("(", "[", "|"):
                argument = _expression(self._beside(argument))
            if self.sees("/") and self.position + 1 < len(self.tokens) and self.tokens[self.position + 1].numeral:
                self.position += 1
                argument = FunctionCall("div", (argument, _expression(self._power())))
        self.leave(1)
        return FunctionCall("neg", (argument,)) if negative else argument

    def _function_follows(self) -> bool:
        token = self.token
        return token is not None and token.text.lstrip("\\") in _FUNCTIONS | BARE_FUNCTIONS

    def _root(self) -> Expression:
        degree: Expression = integer(2)
        if self.take("["):
            self.enter(1)
            degree = _expression(self.sum())
            self.leave(1)
            self.expect("]")
        self.first_letter_alone()
        self.enter(1)
        inner = _expression(self._primary())
        self.leave(1)
        return FunctionCall("root", (inner, degree))

    def _argument(self, first: bool = False) -> Expression:
        """An argument of \\frac or \\binom: braces, or a single digit, letter or command as TeX takes it."""
        token = self.token
        if token is not None and token.kind == "number" and len(token.text) > 1 and token.text.isdigit():
            following = self.tokens[self.position + 1 : self.position + 2]
            apart = first and following and following[0].kind == "number"
            if not apart and (len(token.text) == 2 if first else False):
                self.tokens[self.position : self.position + 1] = [digit(character) for character in token.text]
            elif not apart and not token.spaced:
                raise UnreadableError("digits that TeX would part")
        self.first_letter_alone()
        self.enter(1)
        argument = _expression(self._primary())
        self.leave(1)
        return argument

    def _script(self) -> Expression:
        self.first_letter_alone(digits=True)
        self.enter(1)
        script = _expression(self._primary())
        self.leave(1)
        return script

    def _subscript(self) -> str:
        if not self.sees("{"):
            self.first_letter_alone()
        return self.argument_text().strip("()")

    # Brackets.

    def _arguments(self) -> tuple[Expression, ...]:
        opening = self.expect("(", "[")
        self.enter(1)
        arguments = [_expression(self.sum())]
        while self.take(","):
            arguments.append(_expression(self.sum()))
        self.leave(1)
        self.expect(_CLOSING[opening])
        return tuple(arguments)

    def _bracketed(self, opening: str) -> Structure:
        self.enter(1)
        closings = {"(": (")", "]"), "[": ("]", ")"), "\\langle": ("\\rangle",)}.get(
            opening, (_CLOSING.get(opening, ""),)
        )
        items: list[Structure] = []
        if not self.sees(*closings):
            items.append(self.sum())
            if opening == "{" and self.take("\\choose"):
                below = _expression(self.sum())
                items = [FunctionCall("binomial", (_expression(items[0]), below))]
            while self.take(",", ";"):
                items.append(self.sum())
        closing = self.expect(*closings)
        self.leave(1)
        if opening == "{":
            if len(items) == 1:
                return items[0]
            return Collection(tuple(items))
        if opening == "\\{":
            return Collection(tuple(items))
        if opening == "\\langle":
            return Bracketed("(", ")", tuple(items))
        if len(items) == 1 and opening == "(" and closing == ")" and is_expression(items[0]):
            return items[0]
        if not items:
            raise UnreadableError("nothing in brackets")
        return Bracketed(opening, closing, tuple(items))


def _raise(name: str) -> Expression:
    raise UnreadableError(f"{name} with too many arguments")


def _expression(structure: Structure) -> Expression:
    if isinstance(structure, Bracketed) and len(structure.items) == 1 and structure.opening + structure.closing == "[]":
        structure = structure.items[0]
    if isinstance(structure, (Number, Symbol, FunctionCall)):
        return structure
    raise UnreadableError("a structure inside an expression")


def _is_proper_fraction(expression: Expression) -> bool:
    if not (isinstance(expression, FunctionCall) and expression.function == "div"):
        return False
    above, below = expression.arguments
    return (
        isinstance(above, Number)
        and isinstance(below, Number)
        and above.numeral.value.denominator == below.numeral.value.denominator == 1
        and 0 < above.numeral.value < below.numeral.value
    )


def _ends_in_integer(left: Structure) -> bool:
    if isinstance(left, Number):
        return left.numeral.value.denominator == 1 and left.numeral.step is None
    return isinstance(left, FunctionCall) and left.function == "neg" and _ends_in_integer(left.arguments[0])


def _mixed(left: Structure, fraction: Expression) -> Expression:
    if isinstance(left, FunctionCall) and left.function == "neg":
        return FunctionCall("neg", (_mixed(left.arguments[0], fraction),))
    return FunctionCall("add", (_expression(left), fraction))


def _in_base(numeral: Numeral, subscript: str) -> Number:
    base = _BASES.get(subscript) or (int(subscript) if subscript.isdecimal() and len(subscript) < 3 else 0)
    digits = str(numeral.value) if numeral.value.numerator.bit_length() < _MOST_BITS else ""
    if numeral.step is not None or not 2 <= base <= 36 or not digits.isdigit() or int(max(digits)) >= base:
        raise UnreadableError(f"{digits} is no number of base {subscript}")
    return Number(Numeral(Fraction(int(digits, base))))
