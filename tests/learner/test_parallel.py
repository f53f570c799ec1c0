"""The device of a process, and the process groups that it joins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel

from conversion.model.layout import ParallelLayout
from megatron_retool.config import ConfigError, LearnerConfig
from megatron_retool.learner import parallel
from megatron_retool.learner.parallel import resolve_device
from megatron_retool.parity.ranks import run_ranks
from megatron_retool.ports import free_port


def test_cuda_has_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"learner.device=cuda, but torch finds no CUDA device"):
        resolve_device("cuda")
    assert resolve_device("auto").type == "cpu"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        resolve_device("cpu")


def test_expandable_segments_are_the_learners_alone() -> None:
    """Not of the environment, which engines inherit; on a CPU torch's allocator stays as it is."""
    read, write = torch._C._accelerator_getAllocatorSettings, torch._C._accelerator_setAllocatorSettings
    before, environment = read(), dict(os.environ)
    try:
        for given, expected in (
            ("", "expandable_segments:True"),
            ("max_split_size_mb:128", "max_split_size_mb:128,expandable_segments:True"),
        ):
            write(given)
            parallel.use_expandable_segments(torch.device("cpu"))
            assert read() == given
            parallel.use_expandable_segments(torch.device("cuda", 0))
            assert read() == expected
        assert dict(os.environ) == environment
    finally:
        write(before)


RANKS = """
import os, sys, torch
from psutil import CONN_LISTEN, Process
from megatron_retool.config import LearnerConfig
from megatron_retool.learner import parallel
layout = LearnerConfig(world_size=2).layout()
parallel.initialize(layout, torch.device("cpu"), seed=0, timeout_seconds=60)
torch.distributed.barrier()
print("listens", *sorted({c.laddr.ip for c in Process().net_connections() if c.status == CONN_LISTEN}), flush=True)
torch.distributed.barrier()
"""


def test_ranks_of_one_host_listen_on_loopback_alone() -> None:
    """torch's own store would listen on every address, and whoever reaches it can disturb the run."""
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS], env=common | {"RANK": str(rank), "LOCAL_RANK": "0"},
            stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    found = [line.split()[1:] for text in said for line in text.splitlines() if line.startswith("listens")]
    assert found[0] and all(address.endswith("127.0.0.1") for rank in found for address in rank), found


def test_nccl_connects_all_ranks_before_some_of_them_exchange_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LearnerConfig().layout()
    called: list[str] = []
    monkeypatch.setattr(parallel, "_active", None)
    monkeypatch.setattr(parallel, "_of_layout", [])
    monkeypatch.setenv("WORLD_SIZE", "1")
    for name in ("is_initialized", "init_process_group", "all_reduce"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, name=name, **__: called.append(name))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: False)
    monkeypatch.setattr(
        parallel_state, "initialize_model_parallel", lambda **_: called.append("initialize_model_parallel")
    )
    monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda: None)
    monkeypatch.setattr(parallel, "_context_groups", {})
    monkeypatch.setattr(tensor_parallel, "model_parallel_cuda_manual_seed", lambda *_, **__: None)
    parallel.initialize(layout, torch.device("cuda", 0), seed=0)
    assert [name for name in called if name != "is_initialized"] == [
        "init_process_group",
        "all_reduce",
        "initialize_model_parallel",
    ]
    called.clear()
    parallel._connect(torch.device("cpu"))
    assert not called


def _threads_of_layouts() -> list[int]:
    found = []
    for _ in range(2):
        for layout in ({"tensor": 2}, {"pipeline": 2}):
            parallel.initialize(ParallelLayout.of_ranks(2, **layout), torch.device("cpu"), 1)
            found.append(len(os.listdir("/proc/self/task")))
            model: list[object] = [*parallel._of_layout]
            model.append(model)  # as models do
            del model
    torch.distributed.barrier()  # the store ends with its rank, and another may still be joining by it
    return found


def test_a_layout_that_is_left_leaves_no_threads(tmp_path: Path) -> None:
    first, *later = run_ranks(_threads_of_layouts, 2, tmp_path)
    assert max(later) < first + 10
