"""A step's groups, and a response with coloured tokens, on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from run_viewer.columns import KINDS, Colour, ColumnKind, FloatArray, colour, largest_shown
from run_viewer.stored_step import StoredResponse, ViewedStep, question_in
from untrusted import printable

_PAPER: Colour = (24, 24, 28)
"""What weak colours fade into."""


def print_groups(console: Console, step: ViewedStep) -> None:
    """A line for each group of a step: its rewards, whether it was trained on, lengths, tools and question."""
    groups: dict[int, dict[int, list[StoredResponse]]] = {}
    for response in step.responses:
        group_id, index, _segment = response.key
        groups.setdefault(group_id, {}).setdefault(index, []).append(response)
    count = sum(map(len, groups.values()))
    table = Table(title=f"step {step.number}: {count} responses", title_justify="left")
    for name, justify in (("group", "right"), ("rewards", "left"), ("trained", "left"), ("tokens", "right"),
                          ("calls", "right"), ("question", "left")):  # fmt: skip
        table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=name != "question")
    for group_id, rollouts in groups.items():
        # The rows of a rollout share reward and what its prompt's row carried.
        first = next(iter(rollouts.values()))[0]
        question, rewards = question_in(first.extra_info, first.prompt), Text()
        for _index, (row, *_others) in sorted(rollouts.items()):
            rewards.append("█" if row.reward > 0 else "░", _reward_style(row.reward))
        rows = [row for own in rollouts.values() for row in own]
        table.add_row(
            str(group_id),
            rewards,
            "yes" if first.reward_info.get("trained", True) else "no",
            f"{sum(len(row.response_ids) for row in rows) / len(rollouts):.0f}",
            f"{sum(len(row.tool_calls) for row in rows) / len(rollouts):.1f}",
            Text(printable(question).replace("\n", " "), overflow="ellipsis", no_wrap=True),
        )
    console.print(table)
    console.print(Text("--group ID shows a response of it"), style="dim")


def print_response(
    console: Console,
    response: StoredResponse,
    texts: tuple[str, Sequence[str]],
    columns: Mapping[str, FloatArray],
    coloured_by: ColumnKind,
) -> None:
    """Who the response is, its tool calls, the prompt, every token in its colour, and what the colours mean.

    Args:
        texts: the prompt's text, and one for each response token.
        columns: of ``token_columns``; must have ``coloured_by``.
    """
    prompt, pieces = texts
    group_id, index, segment = response.key
    console.rule(f"group {group_id}, response {index}{f', segment {segment}' if segment else ''}", align="left")
    prediction = response.reward_info.get("pred")
    rows = {
        "question": question_in(response.extra_info, prompt),
        "ground truth": str(response.extra_info.get("ground_truth", "not in the data")),
        "prediction": "none was found" if prediction is None else str(prediction),
        "reward": f"{response.reward:+g}, accuracy {response.accuracy:g}, ended by {response.finish_reason}",
        "tokens": f"{len(response.response_ids)}, {response.loss_mask.sum()} of them sampled and trained on, "
        f"in {response.num_turns} turns",
    }
    for name, value in rows.items():
        console.print(Text(f"{name}: {printable(value)}"))
    for number, call in enumerate(response.tool_calls):
        cut = ", cut" if call["output_truncated"] else ""
        console.print(Text(printable(f"call {number}: {call['name']} {call['status']}, {call['seconds']:.2f} s, "
                                     f"{call['output_tokens']} tokens{cut}")))  # fmt: skip
    console.print()
    console.print(Text(printable(prompt), style="dim"), soft_wrap=True, end="")
    console.print(coloured(pieces, columns[coloured_by.name], coloured_by), soft_wrap=True)
    console.print(legend(columns[coloured_by.name], coloured_by))


def coloured(pieces: Sequence[str], values: FloatArray, kind: ColumnKind) -> Text:
    """The tokens' texts in their colours; control characters of a model are marks, never commands to the terminal."""
    text, largest = Text(), largest_shown(kind, values)
    for piece, value in zip(pieces, values, strict=True):
        text.append(printable(piece).replace("\n", "⏎\n"), _style(kind, float(value), largest))
    return text


def legend(values: FloatArray, kind: ColumnKind) -> Text:
    """What the colours mean, and the range of the values."""
    finite = values[np.isfinite(values)]
    text = Text("\n")
    text.append(f"{kind.name}: {kind.meaning}")
    if kind.scale in ("share", "amount", "signed") and len(finite):
        text.append(f"; {finite.min():.3g} to {finite.max():.3g}, full colour at {largest_shown(kind, values):.3g}")
    others = ", ".join(name for name in KINDS if name != kind.name)
    return text.append(f"\nother columns: --color {others}", style="dim")


def _reward_style(reward: float) -> Style:
    return Style(color="rgb(0,158,115)" if reward > 0 else "rgb(213,94,0)")


def _style(kind: ColumnKind, value: float, largest: float) -> Style:
    result = colour(kind, value, largest)
    if result is None:
        return Style.null()
    hue, strength = result
    red, green, blue = (round(p + (h - p) * strength) for h, p in zip(hue, _PAPER, strict=True))
    # The paper is dark, so that white stands on weak colours; luminance as of ITU-R BT.601.
    ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"
    return Style(color=ink, bgcolor=f"rgb({red},{green},{blue})")
