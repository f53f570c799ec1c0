"""What is refused before the imports that take seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_retool.config import ConfigError, ModelConfig
from megatron_retool.data.path_checks import check_directory
from megatron_retool.data.tokenizer import check_vocabulary


def model(directory: Path, size: Any, state: Any, settings: Any = None) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": size}))
    (directory / "tokenizer.json").write_text(json.dumps(state))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings or {}))
    return ModelConfig(path=str(directory))


BPE = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 7}}, "added_tokens": []}
IMAGE = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 8, "content": "<image>"}]}


@pytest.mark.parametrize(
    ("size", "state", "settings", "fits"),
    [
        (8, BPE, None, True),
        (7, BPE, None, False),
        (2, {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}}, None, True),
        (1, {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}}, None, False),
        (8, IMAGE, None, True),
        (8, IMAGE, {"eos_token": "<image>"}, False),
        (8, IMAGE, {"eos_token": {"content": "<image>"}}, False),
        (8, IMAGE, {"chat_template": "{{ '<image>' }}"}, False),
        (8, {"model": {"vocab": {"a": 0, "<image>": 8}}, "added_tokens": IMAGE["added_tokens"]}, None, True),
        ("8", BPE, None, True),
        (2, {"model": None, "added_tokens": [None, {"id": "x"}]}, None, True),
    ],
)
def test_a_row_for_each_token(size: Any, state: Any, settings: Any, fits: bool, tmp_path: Path) -> None:
    given = model(tmp_path, size, state, settings)
    if fits:
        check_vocabulary(given)
        return
    with pytest.raises(ConfigError, match=rf"vocab_size={size}.*resize_token_embeddings"):
        check_vocabulary(given)


@pytest.mark.parametrize(
    ("directory", "words"),
    [
        ("x" * 250, "has 250 bytes, more than"),
        ("é" * 110, "has 220 bytes, more than"),
        ("/".join(["x" * 100] * 30), "is longer than"),
        ("a\0b", "no path"),
        ("file/below", "file is a file"),
        ("loop/below", "a link that leads nowhere"),
    ],
)
def test_directories_that_cannot_be_made(directory: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError) as error:
        check_directory("trainer.runs_dir", tmp_path / directory)
    assert words in str(error.value)


QUICK = """
import sys
from megatron_retool.__main__ import main

for line in sys.argv[1:]:
    assert main(line.split()) == 1, line
    assert not {"torch", "transformers", "ray"} & set(sys.modules), line
"""


def test_paths_are_checked_before_heavy_imports(tmp_path: Path) -> None:
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "data.arrow").touch()
    (tmp_path / "good.json").write_text('[{"prompt": "a"}]')
    (tmp_path / "own.yaml").write_text("data: {train_files: [good.json], val_files: [good.json]}\n")
    train = "train --config own.yaml model.path="
    commands = {
        f"{train}cut": "cut/model.safetensors is not a safetensors file",
        "evaluate --config own.yaml model.path=cut": "cut/model.safetensors is not",
        "sft --config own.yaml model.path=cut": "cut/model.safetensors is not",
        "pipeline --config own.yaml model.path=cut": "cut/model.safetensors is not",
        "serve cut": "cut/model.safetensors is not",
        "chat cut": "cut/model.safetensors is not",
        "train model.path=set data.train_files=set": "data.train_files: set: the folder was written by datasets",
        'sft model.path=set sft.stages=[{"train_files":["set"]}]': "sft.stages[0].train_files: set",
        f"{train}set trainer.runs_dir=good.json": "good.json is a file",
        "serve gone": "gone does not exist",
        "plan model.path=gone --gpus=H100x8": "gone",
    }
    run = subprocess.run(
        [sys.executable, "-c", QUICK, *commands], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stdout + run.stderr
    said = " ".join(run.stdout.split())
    for words in commands.values():
        assert words in said
