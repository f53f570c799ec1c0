"""What weight sync hands to CUDA and NCCL, as far as a host without them can tell: signatures, lifetimes, order."""

from __future__ import annotations

import inspect
import socket
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.distributed_c10d as c10d
from torch.multiprocessing import reductions

from megatron_retool.ports import free_port
from sglang_rollout.engine.weight_sync import distributed, tensor
from sglang_rollout.engine.weight_sync.tensor import TensorWeightSync


def test_ipc_handles_name_the_device_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    arguments = [f"<{name}>" for name in parameters]
    arguments[parameters.index("storage_device")] = 3
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (reductions.rebuild_cuda_tensor, tuple(arguments)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"uuid-of-{device}"))
    rebuild, sent = tensor._reduce_cuda_tensor(torch.ones(1))
    named = inspect.signature(rebuild).bind(*sent).arguments
    assert named.pop("storage_device") == "uuid-of-3"
    assert all(value == f"<{name}>" for name, value in named.items())


def test_other_picklers_of_the_process_keep_their_reducer() -> None:
    tensor._pickled({"flattened_tensor": SimpleNamespace(is_cuda=True)})
    assert vars(ForkingPickler)["_extra_reducers"].get(torch.Tensor) is not tensor._reduce_cuda_tensor


def test_a_bucket_on_a_gpu_never_overwrites_one_that_an_engine_may_be_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty, collected = torch.empty, []
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device=None: empty(size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: collected.append("now"))
    with TensorWeightSync(["http://127.0.0.1:1"]) as sync:
        first, second = (sync._flat(64, torch.device("cuda", 0)) for _ in range(2))
        assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
        assert sync._memory is None  # nothing stays on the GPU when it is the engines' turn
        assert len(collected) == 2
        # In shared memory the engines' copies are done when they answer.
        first, second = (sync._flat(64, torch.device("cpu")) for _ in range(2))
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("settings", "inside"),
    [
        ("", ""),
        ("max_split_size_mb:128", "max_split_size_mb:128"),
        ("max_split_size_mb:128,expandable_segments:True",
         "max_split_size_mb:128,expandable_segments:True,expandable_segments:False"),
    ],
)  # fmt: skip
def test_what_engines_map_is_not_in_an_expandable_segment(
    monkeypatch: pytest.MonkeyPatch, settings: str, inside: str
) -> None:
    read, write = torch._C._accelerator_getAllocatorSettings, torch._C._accelerator_setAllocatorSettings
    found: list[str] = []
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device=None: found.append(read()))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    before = read()
    try:
        write(settings)
        with TensorWeightSync(["http://127.0.0.1:1"]) as sync:
            sync._flat(64, torch.device("cuda", 0))
        assert found == [inside] and read() == settings
    finally:
        write(before)


def test_after_the_last_bucket_its_memory_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: order.append("ipc_collect"))
    with TensorWeightSync(["http://127.0.0.1:1"]) as sync:
        monkeypatch.setattr(sync, "_call_all", lambda path, body: order.append(path))
        sync._end(1)
        assert order == ["/end_weight_update", "ipc_collect"]


@pytest.mark.parametrize(("backend", "seconds"), [("nccl", 600), ("gloo", 300)])
def test_the_learners_own_wait_ends_before_nccls_watchdog_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, backend: str, seconds: int
) -> None:
    made: dict[str, Any] = {}
    helper = inspect.signature(c10d._new_process_group_helper)

    def new_group(*arguments: Any, **options: Any) -> tuple[str, None]:
        made.update(helper.bind(*arguments, **options).arguments)
        return "group", None

    monkeypatch.setattr(c10d, "_new_process_group_helper", new_group)
    monkeypatch.setattr(c10d, "_world", SimpleNamespace(pg_group_ranks={}))
    monkeypatch.setattr(torch.distributed, "TCPStore", lambda *arguments, **options: made.update(tcp_store=options))
    monkeypatch.setattr(torch.distributed, "PrefixStore", lambda name, store: name)
    distributed._join_group(backend, "127.0.0.1", free_port(), 9, "sync", timedelta(seconds=300))
    with socket.socket(fileno=made["tcp_store"]["master_listen_fd"]) as listener:
        assert listener.getsockname()[0] == "127.0.0.1", "torch itself would listen on every address"
    assert (made["group_size"], made["group_rank"], made["group_name"]) == (9, 0, "sync")
    assert made["timeout"] == timedelta(seconds=seconds)


@pytest.mark.parametrize(("backend", "way"), [("nccl", "abort"), ("gloo", "destroy")])
def test_a_group_whose_collective_failed_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, backend: str, way: str
) -> None:
    left: list[tuple[str, str]] = []
    monkeypatch.setattr(c10d, "_abort_process_group", lambda group: left.append(("abort", group)))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda group: left.append(("destroy", group)))
    distributed._leave("group", backend)
    assert left == [(way, "group")]
