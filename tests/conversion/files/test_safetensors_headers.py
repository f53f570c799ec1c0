"""What is said of safetensors that cannot be what was published, from their headers alone."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conversion.files.safetensors_headers import HFCheckpointError, check_weight_files, read_header


def entry(first: int, last: int, *shape: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [first, last]}


def write(path: Path, header: Any, size: int) -> Path:
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(size))
    return path


GOOD = {"__metadata__": {"format": "pt"}, "b": entry(8, 16, 2), "a": entry(0, 8, 2)}


def test_a_sound_file(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", GOOD, 16)
    assert {each.name: path.stat().st_size - each.offset for each in read_header(path)} == {"a": 16, "b": 8}
    check_weight_files(tmp_path)


@pytest.mark.parametrize(
    ("header", "size", "words"),
    [
        (GOOD, 12, "tensor b is cut short"),
        (GOOD, 20, "4 bytes follow the last tensor"),
        ({"a": entry(0, 8, 2), "b": entry(12, 20, 2)}, 20, "4 bytes lie unused between a and tensor b"),
        ({"a": entry(0, 8, 2), "b": entry(4, 12, 2)}, 12, "the same bytes belong to a and tensor b"),
        ({"a": entry(4, 12, 2)}, 12, "4 bytes lie unused between the header and tensor a"),
        ({"a": entry(0, 8, 3)}, 8, "has 8 bytes in place of 12"),
        ({"a": entry(0, 8, 2, dtype="F33")}, 8, "unknown dtype F33"),
        ({"a": entry(0, 8, 2.0)}, 8, "lacks dtype, shape or data_offsets"),
        ({"a": entry(0, 4, True)}, 4, "lacks dtype, shape or data_offsets"),
        ({"a": entry(-8, 0, 2)}, 8, "lacks dtype, shape or data_offsets"),
        ({"a": None}, 8, "lacks dtype, shape or data_offsets"),
        ([], 8, "holds a list"),
    ],
)
def test_what_is_refused(header: Any, size: int, words: str, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", header, size)
    with pytest.raises(HFCheckpointError, match=r"model\.safetensors") as error:
        check_weight_files(tmp_path)
    assert words in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\x01", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 2) + b"{]"])
def test_what_is_no_safetensors(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(HFCheckpointError, match="is not a safetensors file"):
        check_weight_files(tmp_path)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"a": "part-1.safetensors", "b": "part-2.safetensors"}, "part-2.safetensors is missing"),
        ({"a": "part-1.safetensors", "c": "part-1.safetensors"}, "places tensor c in part-1.safetensors"),
        ({"a": "../part-1.safetensors"}, "no file of the directory"),
        ({"a": "/etc/passwd"}, "no file of the directory"),
        ({"a": 3}, "no file's name"),
        ([3], "is not a safetensors index"),
    ],
)
def test_an_index_that_does_not_fit(index: Any, words: str, tmp_path: Path) -> None:
    write(tmp_path / "part-1.safetensors", GOOD, 16)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(HFCheckpointError) as error:
        check_weight_files(tmp_path)
    assert words in str(error.value)


def test_a_conversion_refuses_before_heavy_imports(tmp_path: Path) -> None:
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **dict.fromkeys(sizes, 2)}))
    write(tmp_path / "model.safetensors", GOOD, 12)
    script = ["conversion/hf_to_mcore.py", "--hf-dir", str(tmp_path), "--mcore-dir", str(tmp_path.with_name("out"))]
    run = subprocess.run([sys.executable, "-X", "importtime", *script], capture_output=True, text=True, timeout=60)
    said = [line for line in run.stderr.splitlines() if not line.startswith("import time:")]
    assert (run.returncode, len(said)) == (1, 1)
    assert "tensor b is cut short" in said[0]
    assert not any(line.rpartition("|")[2].strip() == "torch" for line in run.stderr.splitlines())


def test_an_index_of_other_files_than_the_one_that_is_loaded(tmp_path: Path) -> None:
    """transformers loads the single file, and SGLang the files of the index."""
    for name in ("model", "part-1"):
        write(tmp_path / f"{name}.safetensors", GOOD, 16)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys("ab", "part-1.safetensors")}))
    with pytest.raises(HFCheckpointError, match="transformers loads the single file") as error:
        check_weight_files(tmp_path)
    assert "part-1.safetensors" in str(error.value)
    index.write_text(json.dumps({"weight_map": dict.fromkeys("ab", "model.safetensors")}))
    check_weight_files(tmp_path)
