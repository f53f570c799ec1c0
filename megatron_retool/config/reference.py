"""The reference of the configuration, docs/configuration.md: every key of the typed tree, from its declaration.

    megatron-retool config reference > docs/configuration.md

Type, default, range and choices are the declaration's, the meaning is the text below a field, and who reads a key is
looked up in the sources.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_retool.config.schema import expected, section_of, type_hints
from megatron_retool.config.tree import Config
from megatron_retool.installation import ROOT

ROOMS = ("megatron_retool", "sglang_rollout", "conversion", "tools")

_HEAD = """# Configuration

Every setting: its type, default, range or choices, meaning, and the rooms ([architecture.md](architecture.md)) that
read it. This page is written by `megatron-retool config reference` from the code that declares the settings.

A configuration is a YAML file (`--config`), which may extend another (`extends: <file>`, relative to itself), and
overrides on the command line, `dotted.key=value`. One value stands for a list of one, and `${other.key}` for that of
another setting. What is unknown, of another type or outside its range is refused before anything starts. Numbers
without a bound of their own are at most 1e9."""


@dataclass(frozen=True)
class Setting:
    """One row of the reference.

    Attributes:
        key: dotted; below a list of sections with [] behind the list's.
        kind: type, and range or choices, in words.
        default: as YAML.
        meaning: the text below the field's declaration; empty where there is none.
        readers: rooms whose sources read it.
    """

    key: str
    kind: str
    default: str
    meaning: str
    readers: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """One table of the reference: a dataclass of the tree, where it stands in it.

    Attributes:
        key: dotted, as of a ``Setting``.
        about: what it is for.
    """

    key: str
    about: str
    settings: tuple[Setting, ...]


def reference_page() -> str:
    """The text of docs/configuration.md."""
    parts = [_HEAD]
    for section in sections_of(Config):
        rows = [_row(setting) for setting in section.settings]
        parts.append(f"{'###' if '.' in section.key else '##'} {section.key}")
        parts += [_plain(section.about)]
        parts.append("\n".join(["| key | type | default | meaning | read by |", "|---|---|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def sections_of(schema: type, key: str = "") -> Iterator[Section]:
    """Every section below ``schema``, a dataclass of the tree whose key is ``key``, from the outermost."""
    meanings = field_meanings(schema)
    for name, hint in type_hints(schema).items():
        inner = section_of(hint)
        if inner is not None:
            dotted = f"{key}.{name}".removeprefix(".") + ("" if inner is hint else "[]")
            yield Section(dotted, _about(inner, meanings.get(name, "")), tuple(_settings(inner, dotted)))
            yield from sections_of(inner, dotted)


def _settings(schema: type, key: str) -> Iterator[Setting]:
    meanings, hints = field_meanings(schema), type_hints(schema)
    for item in dataclasses.fields(schema):
        hint, dotted = hints[item.name], f"{key}.{item.name}"
        if section_of(hint) is not hint:
            meaning = meanings.get(item.name, "")
            yield Setting(dotted, _kind(item, hint), _default(item), meaning, _readers(dotted))


def field_meanings(schema: type) -> dict[str, str]:
    """Field -> the text below its declaration, of a dataclass and those that it extends."""
    meanings: dict[str, str] = {}
    for base in reversed([each for each in schema.__mro__ if dataclasses.is_dataclass(each)]):
        (body,) = [node for node in _module(inspect.getfile(base)).body if _is_class(node, base.__name__)]
        assert isinstance(body, ast.ClassDef)
        for node, following in zip(body.body, [*body.body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                text = _text(following)
                if text:
                    meanings[node.target.id] = text
    return meanings


def _text(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def _is_class(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.ClassDef) and node.name == name


@functools.cache
def _module(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text(encoding="utf-8"))


def _about(section: type, meaning: str) -> str:
    """The dataclass's docstring; else ``meaning``, that of the field which holds it; else its module's docstring."""
    own = inspect.cleandoc(section.__doc__ or "")
    if not own.startswith(f"{section.__name__}("):  # dataclass makes up that one
        return own
    return meaning or ast.get_docstring(_module(inspect.getfile(section))) or ""


def _kind(item: dataclasses.Field[Any], hint: Any) -> str:
    choices, allowed = item.metadata.get("choices"), item.metadata.get("range")
    if choices is not None:
        return "one of " + ", ".join("null" if choice is None else f"`{choice}`" for choice in choices)
    words = "any" if hint is Any else expected(hint)
    return words if allowed is None else f"{words}: {str(allowed).removesuffix(', at most 1e9')}"


def _default(item: dataclasses.Field[Any]) -> str:
    value = item.default if item.default is not dataclasses.MISSING else None
    if item.default_factory is not dataclasses.MISSING:
        value = item.default_factory()
    if isinstance(value, str):
        return value if re.fullmatch(r"[\w./-]+", value) else json.dumps(value, ensure_ascii=False)
    return str(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _row(setting: Setting) -> str:
    name = setting.key.rpartition(".")[2]
    cells = (f"`{name}`", setting.kind, f"`{setting.default}`", _plain(setting.meaning), ", ".join(setting.readers))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _plain(text: str) -> str:
    """A docstring as Markdown."""
    return text.replace("``", "`").replace("<", "&lt;")


def _readers(key: str) -> tuple[str, ...]:
    """Rooms whose sources name the key behind its section's name, as ``engine.count``; where there are none, those that
    have an attribute of its name; then those with a parameter, which may be filled by it; then those with the name."""
    *sections, name = key.replace("[]", "").split(".")
    for form in (f"{sections[-1]}.{name}", f".{name}", f"{name}:", name):
        rooms = tuple(room for room, names in _names().items() if form in names)
        if rooms:
            return rooms
    return ("config",)


@functools.cache
def _names() -> dict[str, set[str]]:
    """Room, such as "loop" or "sglang_rollout" -> what its Python sources name: ``name``, ``parameter:``,
    ``.attribute`` (or a string that is one) and ``object.attribute``.

    Without the configuration itself, rooms that only set it, and tools that stand alone.
    """
    names: dict[str, set[str]] = {}
    for package in ROOMS:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).parts
            if (ROOT / package / parts[1] / "pyproject.toml").exists():
                continue
            room = parts[1].removesuffix(".py") if package == "megatron_retool" else package
            room = "commands" if room == "__main__" else room
            if room not in ("config", "fields", "registry", "from_verl", "doctor"):
                text, result = file.read_text(encoding="utf-8"), names.setdefault(room, set())
                result.update(re.findall(r"\w+", text))
                result.update(re.findall(r"\w+:(?= )", text))
                result.update(f".{name}" for name in re.findall(r"[.\"'](\w+)", text))
                result.update(map(".".join, re.findall(r"(\w+)(?:\[\w+\])?\.(?=(\w+))", text)))
    return names
