from __future__ import annotations

from pathlib import Path

import pytest

from megatron_retool.config import load_config
from megatron_retool.data.demo import make_demo

SMALL_DEMO = [
    "demo.pretrain_rows=120",
    "demo.sft_rows=240",
    "demo.sft_val_rows=24",
    "demo.train_rows=60",
    "demo.val_rows=18",
    "demo.hidden_size=32",
    "demo.intermediate_size=64",
    "demo.num_layers=1",
    "tools.code_interpreter.print_last_expression=false",
    "tools.code_interpreter.error_style=last_line",
    "tools.code_interpreter.max_error_characters=60",
    "tools.code_interpreter.preimport=[math]",
    "tools.code_interpreter.workers=2",
]


def demo_config(directory: Path, *overrides: str):
    return load_config(None, [f"demo.directory={directory}", *SMALL_DEMO, *overrides])


@pytest.fixture(scope="session")
def demo_directory(tmp_path_factory) -> Path:
    return make_demo(demo_config(tmp_path_factory.mktemp("demo") / "data"))


@pytest.fixture(scope="session")
def tokenizer(demo_directory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_directory / "model")
