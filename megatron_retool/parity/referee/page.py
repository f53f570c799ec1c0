"""The referee's page: one HTML file that holds its pictures, and a short table for the terminal."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_retool.parity.referee.attribution import Judged
from run_files.atomic_files import write_text

_MAX_POINTS = 5000
_ENGINE, _LEARNER, _FORMAT = "tab:orange", "tab:blue", "0.55"
_LEAST = 1e-9
"""Errors of log-probs below it are drawn there, since a logarithmic axis has no 0."""


def write_page(path: Path, result: Mapping[str, Any], judged: Judged) -> None:
    """Write the page with the figures of ``result`` and pictures of ``judged``."""
    write_text(path, _page(result, draw(result, judged)))


def print_summary(console: Console, result: Mapping[str, Any]) -> None:
    """The verdict and the splits as a table."""
    table = Table(title=f"{result['run']}, step {result['step']}: off from the referee, mean |error| of a log-prob")
    for column, justify in (("split", "left"), ("tokens", "right"), ("engine", "right"), ("learner", "right"),
                            ("mismatch", "right"), ("off", "left")):  # fmt: skip
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for row in result["splits"]:
        name = "all" if row["split"] == "all" else f"{row['split']} {row['category']}"
        off = [f"{row[side]['mean_abs']:.2e}" for side in ("engine", "learner")]
        table.add_row(name, str(row["tokens"]), *off, f"{row['mismatch_mean_abs']:.2e}", row["side"])
    console.print(table)
    for sentence in result["verdict"]:
        console.print(f"• {sentence}", highlight=False, markup=False)


def draw(result: Mapping[str, Any], judged: Judged) -> list[tuple[str, bytes, str]]:
    """(name, PNG, caption) of every picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    pictures = []

    def save(canvas: Any, name: str, caption: str) -> None:
        canvas.tight_layout()
        buffer = io.BytesIO()
        canvas.savefig(buffer, dpi=110, format="png")
        plt.close(canvas)
        pictures.append((name, buffer.getvalue(), caption))

    canvas, panels = plt.subplots(1, 3, figsize=(13, 4))
    for axes, split in zip(panels, ("probability", "turn", "position"), strict=True):
        _draw_split(axes, [row for row in result["splits"] if row["split"] == split], split)
    panels[1].legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    save(
        canvas,
        "splits",
        "Mean |error| of a log-prob by the referee's probability, turn, and place in the response. Lines: what "
        "transformers in the number format of that side is off by.",
    )

    shown = np.arange(len(judged))
    if len(shown) > _MAX_POINTS:
        shown = np.sort(np.random.default_rng(0).choice(len(judged), _MAX_POINTS, replace=False))
    canvas, panels = plt.subplots(1, 2, figsize=(13, 4), sharey=True)
    for axes, name, values, colour in (
        (panels[0], "engine", judged.engine, _ENGINE),
        (panels[1], "learner", judged.learner, _LEARNER),
    ):
        error = np.maximum(np.abs(values - judged.referee), _LEAST)[shown]
        axes.scatter(np.exp(judged.referee[shown]), error, s=4, alpha=0.3, color=colour, rasterized=True)
        axes.set(yscale="log", xlabel="referee's probability", ylabel="|error| of the log-prob", title=name)
        axes.grid(alpha=0.3)
    save(canvas, "tokens", f"|Error| of each token over its probability; below {_LEAST:.0e} drawn there.")

    if result["layers"] is not None:
        canvas, axes = plt.subplots(figsize=(9, 4))
        _draw_layers(axes, result["layers"])
        save(canvas, "layers", "Relative difference of hidden states, learner against referee.")
    if result["routing"] is not None:
        canvas, panels = plt.subplots(1, 2, figsize=(13, 4))
        _draw_routing(panels, result["routing"])
        save(canvas, "routing", "Choice of experts: which layers, and what it does to the engine's log-probs.")
    return pictures


def _draw_split(axes: Any, rows: Sequence[Mapping[str, Any]], split: str) -> None:
    places = np.arange(len(rows))
    for side, offset, colour in (("engine", -0.2, _ENGINE), ("learner", 0.2, _LEARNER)):
        heights = [max(row[side]["mean_abs"], _LEAST) for row in rows]
        axes.bar(places + offset, heights, 0.4, color=colour, label=side)
        for place, row in zip(places, rows, strict=True):
            expected = row[side]["format_mean_abs"]
            if expected:
                label = "its number format" if side == "learner" and place == 0 else None
                axes.hlines(expected, place + offset - 0.2, place + offset + 0.2, color="black", label=label)
    axes.set(yscale="log", xlabel=f"{split} (below: tokens)", ylabel="mean |error|")
    axes.set_xticks(places, [f"{row['category']}\n{row['tokens']}" for row in rows], fontsize=8)
    axes.grid(alpha=0.3, axis="y")


def _draw_layers(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    places = np.arange(len(rows))
    for prefix, colour, label in (("", _LEARNER, "learner"), ("format_", _FORMAT, "its number format")):
        for name, style in (("median", "-"), ("p95", "--")):
            values = [row[prefix + name] for row in rows]
            # Where both looked up the same embedding there is nothing to draw.
            drawn = [value if value > 0 else float("nan") for value in values]
            axes.plot(places, drawn, style, marker="o", markersize=3, color=colour, label=f"{label}, {name}")
    off = [place for place, row in zip(places, rows, strict=True) if row["off"]]
    if off:
        axes.axvspan(off[0] - 0.5, places[-1] + 0.5, color="tab:red", alpha=0.1, label="off")
    axes.set(yscale="log", ylabel="|learner − referee| / |referee|")
    every = -(-len(rows) // 24)
    axes.set_xticks(places[::every], [row["stage"] for row in rows][::every], rotation=45, ha="right", fontsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _draw_routing(panels: Sequence[Any], routing: Mapping[str, Any]) -> None:
    sides = {"engine": (routing["by_layer"], _ENGINE), "learner, run again": (routing["learner_by_layer"], _LEARNER)}
    known = {label: drawn for label, drawn in sides.items() if drawn[0] is not None}
    layers = np.arange(1, len(routing["by_layer"]) + 1)
    width = 0.8 / len(known)
    for number, (label, (shares, colour)) in enumerate(known.items()):
        places = layers + (number - (len(known) - 1) / 2) * width
        panels[0].bar(places, 100 * np.array(shares), width, color=colour, label=label)
    panels[0].set(xlabel="layer", ylabel="tokens (%)", title="Other experts than the referee's")
    panels[0].set_xticks(layers[:: -(-len(layers) // 24)])
    panels[0].legend(fontsize=8)
    bars = {
        "all tokens,\nreferee's own experts": routing["mean_abs_own"],
        "all tokens,\nengine's experts forced": routing["mean_abs_forced"],
        "tokens with\nthe same experts": routing["mean_abs_same_experts"],
        "tokens with\nother experts": routing["mean_abs_other_experts"],
    }
    measured = {name: value for name, value in bars.items() if value is not None}
    panels[1].bar(list(measured), list(measured.values()), color=_ENGINE)
    panels[1].set(ylabel="mean |error|", title="The engine's error")
    panels[1].tick_params(axis="x", labelsize=8)


def _page(result: Mapping[str, Any], pictures: Sequence[tuple[str, bytes, str]]) -> str:
    title = f"Referee: {result['run']}, step {result['step']}"
    verdict = "\n".join(f"<li>{html.escape(sentence)}</li>" for sentence in result["verdict"])
    figures = "\n".join(
        f'<figure><img src="data:image/png;base64,{base64.b64encode(png).decode()}" alt="{name}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        for name, png, caption in pictures
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; padding: 0 1rem; color: #222 }}
figure {{ margin: 1rem 0 }} img {{ max-width: 100%; border: 1px solid #ddd }}
td, th {{ padding: 0 1rem 0 0; text-align: left; font-variant-numeric: tabular-nums }}
li:first-child {{ font-weight: bold }}
</style></head><body>
<h1>{html.escape(title)}</h1>
<ul>
{verdict}
</ul>
<p>{"</p><p>".join(map(html.escape, _remarks(result)))}</p>
{figures}
<h2>Where</h2>
{_table(_split_cells(result["splits"]))}
<h2>Responses that are furthest off</h2>
{_table(_response_cells(result["responses"]))}
{_layer_section(result["layers"])}
</body></html>
"""


def _remarks(result: Mapping[str, Any]) -> list[str]:
    sample, learner, weights = result["sample"], result["learner"], result["weights"]
    sampling = ", ".join(f"{name} {value:g}" for name, value in result["sampling"].items())
    remarks = [
        f"{sample['tokens']} of {sample['of_tokens']} sampled tokens of {sample['responses']} responses (seed "
        f"{sample['seed']}), weight version {weights['version']} from {weights['path']}, {sampling}.",
        f"The referee is transformers in {result['referee']['dtype']} on {result['referee']['device']}, one unpadded "
        "sequence at a time; norms and the softmax of routers stay in float32 there. Error: log-prob − referee's.",
        f"Engine: {result['engine']['number_format']}. Learner: {learner['number_format']}, {learner['layout']}.",
    ]
    if result["referee"]["experts_forced"]:
        remarks.append(
            "The learner replays the engine's choice of experts (learner.routing_replay=rollout): the referee "
            "and the yardsticks take it too."
        )
    if not learner["run_again"]:
        remarks.append(f"Hidden states are not compared: {learner['not_run_again_because']}.")
    elif learner["stored_against_run_again"] is None:
        remarks.append(
            "The run did not compute the learner's log-probs (bypass mode): those here are of the learner run again, "
            "in one rank."
        )
    else:
        found = learner["stored_against_run_again"]
        remarks.append(
            "Hidden states are of the learner run again with the run's precision, in one rank. Its log-probs are "
            f"{found['mean_abs']:.1e} on average and at most {found['max_abs']:.1e} from those that the run stored: "
            "what that exceeds rounding by is the run's layout, device or replay, and not in the layers below."
        )
    return remarks


def _split_cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    header = ["split", "category", "tokens", "engine", "largest", "its format", "learner", "largest", "its format",
              "mismatch", "engine's share", "off"]  # fmt: skip
    return [header, *([row["split"], row["category"], *_side_cells(row)] for row in rows)]


def _response_cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    header = ["group_id", "index", "tokens", "engine", "largest", "its format", "learner", "largest", "its format",
              "mismatch", "engine's share", "off", "worst token at"]  # fmt: skip
    cells = ([str(row["group_id"]), str(row["index"]), *_side_cells(row), str(row["worst_position"])] for row in rows)
    return [header, *cells]


def _side_cells(row: Mapping[str, Any]) -> list[str]:
    cells = [str(row["tokens"])]
    for side in ("engine", "learner"):
        cells += [_number(row[side][name]) for name in ("mean_abs", "max_abs", "format_mean_abs")]
    share = row["engine_share"]
    return [*cells, _number(row["mismatch_mean_abs"]), "–" if share is None else f"{100 * share:.0f} %", row["side"]]


def _layer_section(rows: Sequence[Mapping[str, Any]] | None) -> str:
    if rows is None:
        return ""
    header = ["stage", "median", "its format", "95th percentile", "its format", "off"]
    names = ("median", "format_median", "p95", "format_p95")
    cells = [[row["stage"], *(_number(row[name]) for name in names), "off" if row["off"] else ""] for row in rows]
    return f"<h2>Hidden states</h2>\n{_table([header, *cells])}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2e}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    header, *body = rows

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line(header, "th") + "\n" + "\n".join(line(row, "td") for row in body) + "</table>"
