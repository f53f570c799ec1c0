"""A step's groups, and a response with coloured tokens, on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from megatron_retool.loop.samples import printable, sample_of
from megatron_retool.rollout_rows import rollouts_of, whole_rollouts
from megatron_retool.trajectory import Trajectory
from megatron_retool.viewer.columns import KINDS, Colour, ColumnKind, FloatArray, colour, largest_shown
from megatron_retool.viewer.stored_step import ViewedStep

_PAPER: Colour = (24, 24, 28)
"""What weak colours fade into."""


def print_groups(console: Console, step: ViewedStep) -> None:
    """A line for each group of a step: its rewards, whether it was trained on, lengths, tools and question."""
    table = Table(title=f"step {step.number}: {len(rollouts_of(step.trajectories))} responses", title_justify="left")
    for name, justify in (("group", "right"), ("rewards", "left"), ("trained", "left"), ("tokens", "right"),
                          ("calls", "right"), ("question", "left")):  # fmt: skip
        table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=name != "question")
    groups: dict[int, list[Trajectory]] = {}
    prompts: dict[int, str] = {}
    for trajectory, prompt in zip(step.trajectories, step.prompts, strict=True):
        groups.setdefault(trajectory.group_id, []).append(trajectory)
        prompts[trajectory.group_id] = prompt
    for group_id, rows in groups.items():
        group = whole_rollouts(rows)
        rewards = Text()
        for trajectory in sorted(group, key=lambda each: each.index):
            rewards.append("█" if trajectory.reward > 0 else "░", _reward_style(trajectory.reward))
        question = printable(_question(group[0], prompts[group_id])).replace("\n", " ")
        table.add_row(
            str(group_id),
            rewards,
            "yes" if group[0].reward_info.get("trained", True) else "no",
            f"{np.mean([len(each.response_ids) for each in group]):.0f}",
            f"{np.mean([len(each.tool_calls) for each in group]):.1f}",
            Text(question, overflow="ellipsis", no_wrap=True),
        )
    console.print(table)
    console.print(Text("--group ID shows a response of it"), style="dim")


def print_response(
    console: Console,
    trajectory: Trajectory,
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
    sample = sample_of(trajectory, _question(trajectory, prompt), "")
    segment = f", segment {trajectory.segment}" if trajectory.segment else ""
    console.rule(f"group {trajectory.group_id}, response {trajectory.index}{segment}", align="left")
    sampled, end = int(trajectory.loss_mask.sum()), trajectory.finish_reason.value
    rows = {
        "question": sample.question,
        "ground truth": sample.truth,
        "prediction": "none was found" if sample.prediction is None else sample.prediction,
        "reward": f"{trajectory.reward:+g}, accuracy {trajectory.accuracy:g}, ended by {end}",
        "tokens": f"{len(trajectory.response_ids)}, {sampled} of them sampled and trained on, "
        f"in {trajectory.num_turns} turns",
    }
    for name, value in rows.items():
        console.print(Text(f"{name}: {printable(value)}"))
    for number, call in enumerate(trajectory.tool_calls):
        cut = ", cut" if call.output_truncated else ""
        console.print(Text(f"call {number}: {call.name} {call.status}, {call.seconds:.2f} s, {call.output_tokens} "
                           f"tokens{cut}"))  # fmt: skip
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


def _question(trajectory: Trajectory, prompt: str) -> str:
    return str(trajectory.extra_info.get("question") or prompt)


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
