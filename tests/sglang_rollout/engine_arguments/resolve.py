"""What SGLang makes of command lines on a card that is not there: python resolve.py NAME GIB MAJOR MINOR < lines

A line of standard input is a list of arguments as JSON. A line of standard output is what SGLang resolved, or
{"error": …}. Resolution and checks are SGLang's own; faked are the card's description and the packages with kernels,
of which only names are needed.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
from typing import Any
from unittest.mock import MagicMock

import torch

KERNELS = ("sgl_kernel", "deep_gemm", "flashinfer")
REPORTED = (
    "attention_backend", "context_length", "device", "enable_memory_saver", "enable_return_routed_experts",
    "enable_deterministic_inference", "ep_size", "kv_cache_dtype", "max_running_requests", "mem_fraction_static",
    "quantization", "tp_size", "nnodes", "node_rank", "dist_init_addr", "enable_lora", "max_lora_rank", "lora_backend",
    "sampling_backend", "moe_runner_backend", "disable_shared_experts_fusion",
    "mamba_radix_cache_strategy", "mamba_ssm_dtype",
)  # fmt: skip


class KernelPackage(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class KernelPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in KERNELS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return KernelPackage(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def fake_card(name: str, gib: int, capability: tuple[int, int]) -> None:
    properties = types.SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], total_memory=gib << 30, multi_processor_count=132, uuid="0"
    )
    answers = {
        "is_available": True, "device_count": 8, "current_device": 0, "get_device_name": name,
        "get_device_capability": capability, "get_device_properties": properties,
        "mem_get_info": (gib << 30, gib << 30),
    }  # fmt: skip
    for function, answer in answers.items():
        setattr(torch.cuda, function, lambda *_, answer=answer: answer)
    torch.version.cuda = "13.0"


def resolve(arguments: list[str]) -> dict[str, Any]:
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import prepare_server_args

    server = prepare_server_args(arguments)
    server.resolve_once()
    server.check_server_args()
    resolved = resolving_view(server)
    graphs = resolved.cuda_graph_config
    return {name: getattr(resolved, name) for name in REPORTED} | {
        "decode_graphs": graphs.decode.bs, "prefill_graphs": graphs.prefill.bs,
        "decode_backend": graphs.decode.backend, "prefill_backend": graphs.prefill.backend,
    }  # fmt: skip


def main() -> None:
    name, *numbers = sys.argv[1:]
    gib, major, minor = map(int, numbers)
    fake_card(name, gib, (major, minor))
    sys.meta_path.insert(0, KernelPackages())
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            try:
                found = resolve(json.loads(line))
            except (Exception, SystemExit) as error:
                found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
