"""The tool-call format that a run names: made, tried on texts before anything starts, and kept from raising."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

from megatron_retool.config import MultiTurnConfig, RolloutConfig
from megatron_retool.registry import ExtensionError, check_methods
from sglang_rollout.agent.tool_call_formats import NamesResults, ToolCallFormat, formats
from sglang_rollout.agent.written_calls import ParsedCall

logger = logging.getLogger(__name__)


def parsed_calls(call_format: ToolCallFormat, text: str, offered: Callable[[], Collection[str]]) -> list[ParsedCall]:
    """The calls of a turn. The model reads what a format raises, as of any call that it wrote badly.

    Args:
        offered: gives the names of the tools, which decide whether what may be an answer is a call.
    """
    try:
        return [call for call in call_format.parse(text) if call.certain or call.name in offered()]
    except Exception as error:
        # It was tried only on a few texts.
        logger.exception("rollout.multi_turn.format: parse raised on %.200r", text)
        message = f"Error: invalid tool call: reading it failed: {type(error).__name__}"
        return [ParsedCall("", {}, text, error=message)]


def make_format(config: MultiTurnConfig) -> ToolCallFormat:
    """What rollout.multi_turn.format names, checked.

    Raises:
        ExtensionError: it cannot be loaded or made, or is no ToolCallFormat.
    """
    extension = formats.bind(config.format, config.format_kwargs)
    try:
        made = extension()
    except Exception as error:
        raise ExtensionError(f"{extension.label}: making it failed: {type(error).__name__}: {error}") from error
    return checked_format(made, extension.label)


def check_format(rollout: RolloutConfig) -> None:
    """Raise ExtensionError where the run's tool-call format cannot be used."""
    make_format(rollout.multi_turn)


_TRIALS = (
    "",
    "\n",
    "The answer is 42.",
    '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>',
    "<tool_call>{</tool_call><tool_call>",
    "<code>print(1)</code></code>",
    "<think>I <code></think></python>",
    '{"name": 3}</search>\ufffd\x00',
)
"""What a model may write, well or badly formed."""


def checked_format(made: Any, label: str) -> ToolCallFormat:
    """``made``, if it has what ToolCallFormat asks for and parses some texts.

    Args:
        label: for messages.

    Raises:
        ExtensionError: naming what is missing or wrong.
    """
    kind = type(made).__name__
    check_methods(label, made, ToolCallFormat, "parse", "render_results")
    for name, wanted in (("uses_chat_template", bool), ("closing_tags", tuple)):
        if not isinstance(getattr(made, name, None), wanted):
            raise ExtensionError(f"{label}: {kind}.{name} must be a {wanted.__name__}")
    tags = made.closing_tags
    if not all(isinstance(tag, str) and tag for tag in tags) or bool(tags) == made.uses_chat_template:
        raise ExtensionError(
            f"{label}: {kind}.closing_tags={tags!r} must be () where uses_chat_template is True, and otherwise the "
            "texts at which a turn stops for its results"
        )
    for text in (*_TRIALS, *(f"<{tag}>x{tag}{tag}" for tag in tags)):
        try:
            calls = made.parse(text)
        except Exception as error:
            raise ExtensionError(
                f"{label}: parse({text!r}) raised {type(error).__name__}: {error}. What is malformed must come back "
                "as a ParsedCall with error"
            ) from error
        if not isinstance(calls, list) or not all(isinstance(call, ParsedCall) for call in calls):
            raise ExtensionError(f"{label}: parse({text!r}) returned {calls!r:.60}, which is no list of ParsedCall")
    if not made.uses_chat_template:
        _check_rendering(label, "render_results(['1', ''])", lambda: made.render_results(["1", ""]))
    if isinstance(made, NamesResults):
        tried = "render_named_results(['search', ''], ['1', ''])"
        _check_rendering(label, tried, lambda: made.render_named_results(["search", ""], ["1", ""]))
    result: ToolCallFormat = made
    return result


def _check_rendering(label: str, tried: str, render: Callable[[], Any]) -> None:
    try:
        rendered = render()
    except Exception as error:
        raise ExtensionError(f"{label}: {tried} raised {type(error).__name__}: {error}") from error
    if not isinstance(rendered, str):
        raise ExtensionError(f"{label}: {tried} returned {rendered!r:.60}, which is no text")
