"""Limits of time and size for chat templates, which come with a model that somebody else made.

Jinja's sandbox keeps a template from the machine, and lets it loop for hours or build a text of gigabytes. From
``install`` on, what transformers compiles counts time in loops and calls, and the size of texts before they are made.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import nodes
from jinja2.environment import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_SECONDS = 20.0
"""Of one rendering: a conversation of megabytes takes one."""
MOST_CHARACTERS = 1 << 26
"""Of one text. A request's body and a row's messages are smaller by far."""
LARGEST_NUMBER = 1 << 20
"""Of a width, an indent or a count."""
_SIZED = {"ljust", "rjust", "center", "zfill", "expandtabs", "format", "format_map", "replace", "join"}
_SIZED_FILTERS = ("center", "indent", "format", "replace", "join", "batch", "slice", "wordwrap", "tojson", "round")
_LONG_NUMBER = re.compile(r"\d{7}")
_CURE = "take another tokenizer (model.tokenizer_path), or change chat_template in its tokenizer_config.json"
_CLOCK = threading.local()


class TemplateTooCostly(Exception):
    """A template takes longer, or builds more, than any conversation needs."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the tokenizer's chat template {what}: {_CURE}")


@functools.cache
def install() -> None:
    """Have every chat template that transformers renders in this process keep to the limits."""
    from transformers.utils import chat_template_utils

    chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment  # type: ignore[misc]
    chat_template_utils._compile_jinja_template.cache_clear()


class _BoundedTemplate(Template):
    """Starts the clock, and counts what comes out."""

    def render(self, *arguments: Any, **keywords: Any) -> str:
        """As ``Template.render``."""
        _CLOCK.end = time.monotonic() + MOST_SECONDS
        pieces, length = [], 0
        for number, piece in enumerate(self.generate(*arguments, **keywords)):
            pieces.append(piece)
            length += len(piece)
            if length > MOST_CHARACTERS or number % 256 == 255:
                _check_size(length)
                _check_time()
        return "".join(pieces)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers, with limits."""

    template_class = _BoundedTemplate
    concat = staticmethod(lambda pieces: _joined(list(pieces)))
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.filters["_counted"] = _counted
        self.filters["_joined"] = _joined
        for name in _SIZED_FILTERS:
            self.filters[name] = _bounded(name, self.filters[name])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)
        for node in list(template.iter_child_nodes()):
            _replace_concatenations(node, template)
        template.set_environment(self)
        return template

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (a template may name an argument self)
        """As ``SandboxedEnvironment.call``."""
        _check_time()
        method = getattr(__obj, "__wrapped__", __obj)  # str.format comes wrapped
        if getattr(method, "__name__", "") in _SIZED and isinstance(getattr(method, "__self__", None), str):
            _check_arguments(method.__name__, [method.__self__, *args], kwargs)
        elif __obj is __self.globals.get("lipsum"):
            raise TemplateTooCostly("calls lipsum")
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """As ``SandboxedEnvironment.call_binop``."""
        if operator == "+" and type(left) is str and type(right) is str:  # most of them
            if len(left) + len(right) > MOST_CHARACTERS:
                _check_size(len(left) + len(right))
            return left + right
        sizes = [len(each) if isinstance(each, str | list | tuple) else None for each in (left, right)]
        if operator == "+" and None not in sizes:
            _check_size(sum(size or 0 for size in sizes))
        elif operator == "*" and sizes != [None, None]:
            times = max((each for each in (left, right) if isinstance(each, int)), default=0)
            _check_size(max(size or 0 for size in sizes) * times)
        elif operator in ("*", "**"):
            bits = max((abs(each).bit_length() for each in (left, right) if isinstance(each, int)), default=0)
            if bits > 4096 or (operator == "**" and isinstance(right, int) and abs(right) > 4096):
                raise TemplateTooCostly("computes with numbers of more than a thousand digits")
        elif operator == "%" and isinstance(left, str):
            _check_arguments("format", [left, *(right if isinstance(right, tuple) else (right,))], {})
        return super().call_binop(context, operator, left, right)


def _replace_concatenations(node: nodes.Node, parent: nodes.Node) -> None:
    """``a ~ b`` within ``node`` as a filter that looks at the sizes first."""
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            _replace_concatenations(value, node)
            setattr(node, field, _checked(value))
        elif isinstance(value, list):
            for each in value:
                if isinstance(each, nodes.Node):
                    _replace_concatenations(each, node)
            setattr(node, field, [_checked(each) for each in value])


def _checked(node: Any) -> Any:
    if not isinstance(node, nodes.Concat):
        return node
    return nodes.Filter(nodes.List(node.nodes, lineno=node.lineno), "_joined", [], [], None, None, lineno=node.lineno)


def _joined(parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _counted(items: Any) -> Iterable[Any]:
    """``items``, with a look at the clock every now and then; what has a length keeps it, as loops ask for it."""
    _check_time()
    return _Counted(items) if hasattr(items, "__len__") else iter(_Counted(items))


class _Counted:
    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self._items):
            if number % 256 == 255:
                _check_time()
            yield item


def _bounded(name: str, function: Any) -> Any:
    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        _check_time()
        _check_arguments(name, [each for each in arguments if not hasattr(each, "autoescape")], keywords)
        return function(*arguments, **keywords)

    return checked


def _check_arguments(name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Of what makes a text that may be far longer than what it is made from.

    Args:
        name: of a filter, or of a text's method, whose first argument is the text.
    """
    given = [*arguments, *keywords.values()]
    texts = [each for each in given if isinstance(each, str)]
    counts = name in ("format", "format_map") and any(map(_LONG_NUMBER.search, texts[:1]))
    if counts or any(isinstance(each, int) and each > LARGEST_NUMBER for each in given):
        raise TemplateTooCostly(f"asks for more than {LARGEST_NUMBER} characters or pieces")
    if name == "replace" and len(texts) > 2:
        _check_size(len(texts[0]) + texts[0].count(texts[1]) * len(texts[2]))
    elif name == "join":
        lists = [each for each in given if isinstance(each, list | tuple)]
        pieces = lists[0] if lists else ()
        between = len(pieces) * sum(map(len, texts))
        _check_size(between + sum(len(piece) for piece in pieces if isinstance(piece, str)))


def _check_size(characters: int) -> None:
    if characters > MOST_CHARACTERS:
        raise TemplateTooCostly(f"makes a text of more than {MOST_CHARACTERS} characters")


def _check_time() -> None:
    if time.monotonic() > getattr(_CLOCK, "end", float("inf")):
        raise TemplateTooCostly(f"renders for more than {MOST_SECONDS:g} s")
