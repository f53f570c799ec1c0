"""The settings that a shell script hands to verl on its command line.

No shell runs. Of a script's language it reads what examples are written in: variables with defaults, arithmetic,
arrays, quotes, continued lines, and ``if`` on the comparison of texts or numbers.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megatron_retool.config import ConfigError

_OVERRIDE = re.compile(r"\+{0,2}(?P<key>[A-Za-z_]\w*(?:\.[A-Za-z_0-9][\w-]*)+)=(?P<value>.*)", re.DOTALL)
_ASSIGNMENT = re.compile(
    r"(?:(?:export|local|readonly)\s+|declare\s+(?:-\w+\s+)*)?(?P<name>[A-Za-z_]\w*)(?P<more>\+?)="
)
_PARAMETER = re.compile(
    r"\$(?:\{(?P<braced>[A-Za-z_]\w*|[@*#?\d])(?:\[[@*]\])?"
    r"(?P<rest>:?[-=?+][^{}]*(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}[^{}]*)*)?\}"
    r"|(?P<plain>[A-Za-z_]\w*|[@*#?\d]))"
)
_HERE_DOCUMENT = re.compile(r"(?<!<)<<(?!<)-?\s*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)")
_STATEMENT_CHARACTERS = 100_000
UNKNOWN = "\0"
"""Stands around the name of a variable that has no value."""
_OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip


@dataclass
class Script:
    """What was read.

    Attributes:
        overrides: key -> value as text, without quotes; the last one of a key.
        options: other words of the commands, such as --config-name=ppo_megatron_trainer.yaml.
    """

    overrides: dict[str, str] = field(default_factory=dict)
    options: list[str] = field(default_factory=list)


def read_script(text: str, environment: Mapping[str, str] | None = None) -> Script:
    """The settings in ``text``; a variable without a value is left in its setting between ``UNKNOWN`` marks.

    Args:
        environment: variables from outside; None: this process's.

    Raises:
        ConfigError: a quote or parenthesis is not closed, or a statement is too long to be one.
    """
    variables: dict[str, str | list[str]] = dict(os.environ if environment is None else environment)
    variables.setdefault("PWD", os.getcwd())
    script, taken = Script(), [True]
    done: list[bool] = []
    for line in _statements(text):
        word = line.split(maxsplit=1)[0] if line.split() else ""
        if word in ("if", "elif"):
            condition = _condition(line.split(maxsplit=1)[1].removesuffix("then").rstrip("; \t"), variables)
            if word == "if":
                taken.append(taken[-1] and condition)
                done.append(condition)
            elif done:
                taken[-1] = taken[-2] and not done[-1] and condition
                done[-1] = done[-1] or condition
        elif word == "else" and done:
            taken[-1] = taken[-2] and not done[-1]
        elif word == "fi" and done:
            taken.pop()
            done.pop()
        elif taken[-1] and word not in ("then", "do", "done"):
            _statement(line, variables, script)
    return script


def _statements(text: str) -> list[str]:
    """Logical lines without comments and here documents; an open parenthesis or quote continues in the next line."""
    lines, current, first, end = list[str](), "", 0, None
    depth, quotes = 0, {"'": 0, '"': 0}
    for number, raw in enumerate(text.splitlines(), 1):
        if end is not None:
            end = None if raw.strip() == end else end
            continue
        if raw.strip().startswith("#"):
            continue
        first = first if current else number
        piece = _without_comment(raw)
        continued = piece.rstrip().endswith("\\")
        piece = piece.rstrip()[:-1] + " " if continued else piece
        for character, quote in _scan(piece, _odd(quotes)):
            if character == quote and quote in quotes:
                quotes[quote] += 1
            elif not quote:
                depth += {"(": 1, ")": -1}.get(character, 0)
        current += piece
        if len(current) > _STATEMENT_CHARACTERS:
            raise ConfigError(
                f"line {first}: the statement that begins here has more than {_STATEMENT_CHARACTERS:,} characters: "
                "close its quote or parenthesis"
            )
        if continued:
            continue
        if depth > 0 or _odd(quotes):
            current += "\n"
            continue
        lines += [part.strip() for part in _split(current) if part.strip()]
        end = _here_document(current)
        current, depth = "", 0
    if depth > 0 or _odd(quotes):
        raise ConfigError(f"line {first}: a quote or parenthesis that opens here is never closed: close it")
    return [*lines, current.strip()] if current.strip() else lines


def _here_document(line: str) -> str | None:
    """The word that ends the here document which ``line`` begins; << in quotes or arithmetic begins none."""
    scanned = _scan(line)
    for match in _HERE_DOCUMENT.finditer(line):
        before = [character for character, quote in scanned[: match.start()] if not quote]
        if not scanned[match.start()][1] and before.count("(") <= before.count(")"):
            return match["end"]
    return None


def _odd(quotes: Mapping[str, int]) -> str:
    """The quote that is open, given how often each was seen outside the other."""
    return next((quote for quote, count in quotes.items() if count % 2), "")


def _scan(text: str, quote: str = "") -> list[tuple[str, str]]:
    """(character, quote that it stands in) of each; a character after a backslash stands in the quote "\\".

    Args:
        quote: that ``text`` begins in.
    """
    result, escaped = [], False
    for character in text:
        if escaped:
            result.append((character, "\\"))
            escaped = False
        elif character == "\\" and quote != "'":
            result.append((character, quote or "\\"))
            escaped = True
        elif quote:
            result.append((character, quote))
            quote = "" if character == quote else quote
        else:
            quote = character if character in "'\"" else ""
            result.append((character, quote))
    return result


def _without_comment(line: str) -> str:
    for place, (character, quote) in enumerate(_scan(line)):
        if character == "#" and not quote and (place == 0 or line[place - 1].isspace()):
            return line[:place]
    return line


def _split(line: str) -> list[str]:
    """At semicolons, and behind then and else."""
    parts, start = [], 0
    for place, (character, quote) in enumerate(_scan(line)):
        if character == ";" and not quote:
            parts.append(line[start:place])
            start = place + 1
    parts.append(line[start:])
    result = []
    for part in parts:
        word, _, rest = part.strip().partition(" ")
        result += [word, rest] if word in ("then", "else") else [part]
    return result


def _statement(line: str, variables: dict[str, str | list[str]], script: Script) -> None:
    match = _ASSIGNMENT.match(line)
    if match is not None and "." not in line[: match.end()]:
        rest = line[match.end() :]
        old = variables.get(match["name"], "")
        if rest.startswith("("):
            items = _words(rest.strip()[1:-1], variables)
            variables[match["name"]] = [*(old if match["more"] and isinstance(old, list) else []), *items]
            return
        words = _words(rest, variables, split=False)
        if len(words) <= 1:
            value = words[0] if words else ""
            variables[match["name"]] = f"{old}{value}" if match["more"] and isinstance(old, str) else value
            return
    for word in _words(line, variables):
        override = _OVERRIDE.fullmatch(word)
        if override is not None:
            script.overrides[override["key"]] = override["value"]
        else:
            script.options.append(word)


def _words(text: str, variables: dict[str, str | list[str]], split: bool = True) -> list[str]:
    """The words of a command, expanded and without their quotes.

    Args:
        split: whether the value of a variable without quotes around it is split at its spaces, as in a command.
    """
    words: list[str] = []
    current: str | None = None
    place = 0
    quote = ""
    while place < len(text):
        character = text[place]
        if character == "\\" and quote != "'" and place + 1 < len(text):
            current = (current or "") + ("" if text[place + 1] == "\n" else text[place + 1])
            place += 2
        elif character in "'\"" and quote in ("", character):
            quote = "" if quote else character
            current = current or ""
            place += 1
        elif character == "$" and quote != "'":
            value, place = _expand(text, place, variables)
            if isinstance(value, list):
                words += value
            elif split and not quote and UNKNOWN not in value and len(value.split()) > 1:
                first, *others = value.split()
                if current is not None and not value[0].isspace():
                    first = current + first
                    current = None
                words += [] if current is None else [current]
                words += [first, *others[:-1]]
                current = others[-1]
            else:
                current = (current or "") + value
        elif character.isspace() and not quote:
            words += [] if current is None else [current]
            current = None
            place += 1
        else:
            current = (current or "") + character
            place += 1
    return words if current is None else [*words, current]


def _expand(text: str, place: int, variables: dict[str, str | list[str]]) -> tuple[str | list[str], int]:
    """What the $… at ``place`` stands for, and where it ends."""
    if text.startswith("$(", place):
        depth = 0
        for end in range(place + 1, len(text)):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            if depth == 0:
                inside = text[place + 2 : end]
                if inside.startswith("(") and inside.endswith(")"):
                    return _arithmetic(inside[1:-1], variables), end + 1
                if inside.strip() == "pwd":
                    return variables["PWD"], end + 1
                return f"{UNKNOWN}$({inside}){UNKNOWN}", end + 1
    match = _PARAMETER.match(text, place)
    if match is None:
        return "$", place + 1
    name, rest = match["braced"] or match["plain"], match["rest"] or ""
    value = variables.get(name)
    if not name[0].isalpha() and name[0] != "_":
        return "", match.end()  # the script's own arguments
    if value is None or (value == "" and rest.startswith(":")):
        if rest.lstrip(":").startswith("+"):
            value = ""
        elif rest.lstrip(":").startswith(("-", "=")):
            value = " ".join(_words(rest.lstrip(":")[1:], variables))
            if rest.lstrip(":").startswith("="):
                variables[name] = value
        elif value is None:
            value = f"{UNKNOWN}${name}{UNKNOWN}"
    elif rest.lstrip(":").startswith("+"):
        value = " ".join(_words(rest.lstrip(":")[1:], variables))
    return value, match.end()


def _arithmetic(text: str, variables: dict[str, str | list[str]]) -> str:
    expanded = " ".join(_words(text, variables))

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name) and isinstance(variables.get(node.id), str):
            return value(ast.parse(str(variables[node.id]), mode="eval").body)
        raise ValueError(text)

    try:
        return str(value(ast.parse(expanded.strip(), mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        return f"{UNKNOWN}$(({text})){UNKNOWN}"


def _condition(text: str, variables: dict[str, str | list[str]]) -> bool:
    """A test in brackets; one that is not understood does not hold."""
    words = _words(text, variables)
    if not words or words[0] not in ("[", "[[") or words[-1] not in ("]", "]]"):
        return False
    words = words[1:-1]
    try:
        if len(words) == 2:
            return {"-z": not words[1], "-n": bool(words[1])}.get(words[0], False)
        if len(words) != 3:
            return False
        left, test, right = words
        if test in ("=", "==", "!="):
            return (left == right) != (test == "!=")
        compare = {"-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-lt": operator.lt, "-ge": operator.ge,
                   "-le": operator.le}.get(test)  # fmt: skip
        return compare is not None and bool(compare(int(left), int(right)))
    except ValueError:
        return False
