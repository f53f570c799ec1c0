"""docs/failures.md quotes messages that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOREIGN = ("Ray:", "Slurm:", "NCCL:", "CUDA:")


def quoted_messages() -> list[str]:
    """The project's own messages in the first column, split where … stands for what changes."""
    found = []
    for line in (ROOT / "docs" / "failures.md").read_text(encoding="utf-8").splitlines():
        cell = line.removeprefix("| ").partition(" | ")[0]
        if line.startswith("| `") and not cell.startswith(FOREIGN):
            found += [part.strip() for quote in re.findall(r"`([^`]+)`", cell) for part in quote.split("…")]
    return [part for part in found if len(part) > 6]


@pytest.fixture(scope="module")
def sources() -> str:
    """All sources, with the seams of string literals that are broken over lines taken out."""
    files = [
        path
        for folder in ("megatron_retool", "sglang_rollout", "conversion", "scripts")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".sh", ".sbatch")
    ]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text(encoding="utf-8") for path in files))


def test_page_has_messages() -> None:
    assert len(quoted_messages()) > 25


@pytest.mark.parametrize("message", quoted_messages())
def test_message_exists(message: str, sources: str) -> None:
    assert message in sources
