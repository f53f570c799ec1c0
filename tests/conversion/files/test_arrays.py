"""References between processes: read without making what a file names."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from conversion.files.dist_metadata import load_arrays


class Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("made",)


def test_arrays_are_read_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written = {"tensor": torch.ones(2), "rows": np.zeros((2, 3), np.int16), "share": np.float64(0.5), "none": None}
    torch.save(written, "arrays.pt")
    found = load_arrays("arrays.pt")
    assert found["rows"].dtype == np.int16 and found["share"] == 0.5 and found["tensor"].tolist() == [1.0, 1.0]
    torch.save({"tensor": torch.ones(2), "harm": Harmful()}, "harmful.pt")
    with pytest.raises(pickle.UnpicklingError):
        load_arrays("harmful.pt")
    assert not Path("made").exists()
