"""Run a recipe of the cookbook unchanged, on data sets made here in place of the hub's: MODULE, then its arguments."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import datasets

ROWS = 160


def made(name: str, /, *arguments: Any, split: str | None = None, **more: Any) -> Any:
    """What ``datasets.load_dataset`` would fetch."""
    rows = [_ROW[name](place) for place in range(ROWS)]
    whole = datasets.DatasetDict({each: datasets.Dataset.from_list(rows) for each in ("train", "test")})
    return whole if split is None else whole[split.partition("[")[0]]


def _question(place: int) -> str:
    return f"What is {place % 10} + {place // 10}?"


_ROW = {
    "HuggingFaceH4/no_robots": lambda place: {
        "messages": [
            {"role": "user", "content": _question(place)},
            {"role": "assistant", "content": str(place % 10 + place // 10)},
        ]
    },
    "openai/gsm8k": lambda place: {"question": _question(place), "answer": f"#### {place % 10 + place // 10}"},
    "Anthropic/hh-rlhf": lambda place: {
        "chosen": f"\n\nHuman: {_question(place)}\n\nAssistant: {place % 10 + place // 10}",
        "rejected": f"\n\nHuman: {_question(place)}\n\nAssistant: no",
    },
    "zwhe99/DeepMath-103K": lambda place: {"question": _question(place), "final_answer": str(place % 10 + place // 10)},
}

if __name__ == "__main__":
    datasets.load_dataset = made
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=False)
