"""CUDA IPC without CUDA: a handle is a file with the memory's bytes, which one process may open, once.

The learner's side is ``reduce_tensor``, in a process with the fake device. The engine's side is an SGLang plugin, found
through the entry point beside this file by an engine that has this directory on its path: it sees the GPUs that
FAKE_GPUS names, in that order, and finds its sender's by UUID, through SGLang's own code.
"""

from __future__ import annotations

import os
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

DIRECTORY, GPUS = "FAKE_IPC_DIRECTORY", "FAKE_GPUS"


def uuid_of(gpu: int) -> str:
    """UUID of the GPU with this number on the node."""
    return f"GPU-{gpu}"


def reduce_tensor(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """What torch.multiprocessing makes of a tensor on a GPU, in the same places."""
    device = tensor.device
    assert device.type == "cuda", "only memory of a GPU has a handle"
    with torch._C.DisableTorchFunction():
        data = tensor.numpy().tobytes()
    descriptor, path = tempfile.mkstemp(prefix=f"{uuid_of(device.index)}-", dir=os.environ[DIRECTORY])
    with open(descriptor, "wb") as file:
        file.write(data)
    return reductions.rebuild_cuda_tensor, (
        torch.Tensor, tensor.shape, tensor.stride(), tensor.storage_offset(), torch.UntypedStorage, tensor.dtype,
        device.index, path.encode(), len(data), 0, False, b"", 0, b"", False,
    )  # fmt: skip


def register() -> None:
    """Entry point of group ``sglang.srt.plugins``."""
    gpus = os.environ[GPUS].split(",")
    torch.cuda.device_count = lambda: len(gpus)
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=gpus[device])

    def rebuild(*arguments: Any) -> torch.Tensor:
        _, size, stride, offset, _, dtype, device, handle, *_ = arguments
        path = handle.decode()
        if not os.path.basename(path).startswith(f"{gpus[device]}-"):
            raise RuntimeError(f"{path} is not memory of {gpus[device]}")
        os.rename(path, f"{path}.opened")  # a handle is one count on the memory: it is not opened twice
        with open(f"{path}.opened", "rb") as file:
            memory = torch.frombuffer(bytearray(file.read()), dtype=dtype)
        return torch.as_strided(memory, size, stride, offset)

    # SGLang keeps torch's own under that name, behind its search for the device.
    name = "_rebuild_cuda_tensor_original"
    setattr(reductions, name if hasattr(reductions, name) else "rebuild_cuda_tensor", rebuild)
