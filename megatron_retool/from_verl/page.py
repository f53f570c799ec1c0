"""The table of docs/verl.md: python -m megatron_retool.from_verl.page writes it again between the page's two marks."""

from __future__ import annotations

from itertools import groupby

from megatron_retool.config.verl_keys import TABLE, VerlKey
from megatron_retool.installation import shipped

PAGE = shipped("docs/verl.md")
BEGIN, END = "<!-- table -->", "<!-- end of table -->"


def table() -> str:
    """Markdown: keys with a counterpart by section, then those without one, by reason."""
    lines = []
    for section, rows in groupby((row for row in TABLE if row.ours), key=lambda row: row.verl.partition(".")[0]):
        lines += [f"### {section}", "", "| verl | here | what differs |", "|---|---|---|"]
        lines += [f"| {_theirs(row.verl)} | {', '.join(map(_code, row.ours))} | {_plain(row.note)} |" for row in rows]
        lines.append("")
    lines += ["### Without a counterpart", "", "| verl | why |", "|---|---|"]
    reasons: dict[str, list[VerlKey]] = {}
    for row in TABLE:
        if not row.ours:
            reasons.setdefault(row.note, []).append(row)
    lines += [f"| {', '.join(_theirs(row.verl) for row in rows)} | {_plain(why)} |" for why, rows in reasons.items()]
    return "\n".join(lines) + "\n"


def _theirs(key: str) -> str:
    # Backticks are for what exists here.
    return f"<code>{_plain(key)}</code>"


def _code(key: str) -> str:
    return f"`{key}`"


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "\\<")


def page(text: str) -> str:
    """``text`` with the table between its marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
