"""TensorBoard's event files in the order in which processes made them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_retool.runs.event_file import EventFile


def test_of_two_files_of_a_second_the_later_one_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step, process in ((1, 32767), (2, 305)):  # the numbers of processes have wrapped around
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        file = EventFile(tmp_path, first_step=step)
        file.add_scalars(step, {"actor/steps": float(step)})
        file.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("actor/steps")] == [1, 2]
