"""torch.compile and Triton for a GPU, on a host without one: up to the machine code, which nothing runs.

torch.compile traces on the CPU, because a CUDA build of torch asks the driver for a GPU in autograd and in its
operators.  The traced graph is then moved: its tensors are said to lie on a GPU, inductor lowers it, and Triton and
ptxas compile every kernel that comes out, in each of the block sizes that inductor would try.  Kernels that a library
wrote in Triton are compiled where they would be launched, for the arguments of the launch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.gpu_branch.fake_device import properties_of

SHARED_BYTES = {(8, 0): 163 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}
"""What a block may have at most, by compute capability (CUDA C++ Programming Guide, Technical Specifications)."""


@dataclass(frozen=True)
class Kernel:
    """A kernel as it would be loaded.

    Attributes:
        name: that Triton gave it.
        code_bytes: of its machine code.
        shared_bytes: of shared memory that each of its blocks takes.
        arithmetic: its floating-point instructions (PTX), in their order.
    """

    name: str
    code_bytes: int
    shared_bytes: int
    arithmetic: tuple[str, ...] = ()


_ARITHMETIC = re.compile(
    r"^\s*(?:@!?%p\d+\s+)?((?:wgmma\.mma|mma\.sync|(?:add|sub|mul|fma|div|ex2|lg2|sqrt|rsqrt|max|min|cvt)\.)[\w.:]*)",
    re.M,
)

_compiled: list[Kernel] = []


class _Driver:
    """Triton's view of a GPU."""

    def __init__(self, capability: tuple[int, int]) -> None:
        from triton.backends.compiler import GPUTarget

        self.get_current_target = lambda: GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def compile_launches(capability: tuple[int, int], cache: Path) -> None:
    """Let a launch of a kernel in Triton compile it, and no more. What is compiled is kept in ``cache``."""
    import triton
    from triton.runtime import autotuner, driver, jit

    def recorded(make: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            made = make(*args, **kwargs)
            found = _ARITHMETIC.findall(made.asm["ptx"])
            arithmetic = tuple(each for each in found if "mma" in each or "f32" in each or "bf16" in each)
            _compiled.append(Kernel(made.metadata.name, len(made.asm["cubin"]), made.metadata.shared, arithmetic))
            return made

        return kernel

    torch.set_num_threads(1)
    triton.knobs.cache.dir = str(cache)
    launch = jit.JITFunction.run
    jit.JITFunction.run = recorded(lambda *args, warmup, **kwargs: launch(*args, warmup=True, **kwargs))
    triton.compile = recorded(triton.compile)  # inductor's way
    autotuner.Autotuner.run = lambda self, *args, warmup=True, **kwargs: self.warmup(*args, **kwargs)
    driver.set_active(_Driver(capability))


def install(capability: tuple[int, int], cache: Path) -> None:
    """Let ``kernels_of`` work in this process; before inductor and what calls torch.compile are imported."""
    compile_launches(capability, cache)
    properties = properties_of(capability)
    properties.shared_memory_per_multiprocessor = SHARED_BYTES[capability] + (1 << 10)
    answers = {
        "get_device_properties": properties,
        "get_device_capability": capability,
        "current_device": 0,
        "device_count": 1,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    from torch._inductor import async_compile, config, scheduler
    from torch._inductor.runtime import triton_helpers
    from torch.nn.attention import flex_attention

    config.force_disable_caches = True
    scheduler.has_triton = lambda *_: True
    async_compile.AsyncCompile.triton = _compile_source
    triton_helpers.set_driver_to_gpu = lambda: None
    torch.compile = functools.partial(torch.compile, backend=_lower_graph)
    flex_attention._validate_device = lambda *_: None  # which refuses to be differentiated on a CPU


def _compile_source(compiler: Any, name: str, source: str, device_str: str = "cuda") -> None:
    """A kernel that inductor wrote, in all configurations among which it would choose by time."""
    from torch._inductor.codecache import PyCodeCache

    tuner = getattr(PyCodeCache.load(source), name)
    for configuration in tuner.configs:
        tuner._precompile_config(configuration)


def kernels_of(function: Callable[..., Any], *args: Any) -> list[Kernel]:
    """What ``function(*args)`` would compile and launch on a GPU: in parts made by torch.compile and in Triton's own
    kernels, and in the gradient of what it returns. Tensors lie on the CPU.
    """
    torch._dynamo.reset()
    _compiled.clear()
    outputs = [each for each in torch.utils._pytree.tree_leaves(function(*args)) if isinstance(each, Tensor)]
    outputs = [each for each in outputs if each.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
    return list(_compiled)


def _lower_graph(graph_module: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
    """torch.compile's backend."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph_module, inputs, inner_compile=_lower)


def _lower(graph_module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """What ``torch._inductor.compile_fx.compile_fx_inner`` does with a traced graph, on a GPU.

    What it returns answers with zeros: the numbers of a forward decide nothing about its backward's graph.
    """
    from torch._inductor import compile_fx
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    (output,) = (node for node in graph_module.graph.nodes if node.op == "output")
    results = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in output.args[0]]
    mode = torch._guards.detect_fake_mode(inputs)
    compile_fx.record_original_output_strides(graph_module)
    compile_fx.view_to_reshape(graph_module)
    with V.set_fake_mode(mode):
        compile_fx._recursive_post_grad_passes(graph_module, is_inference=bool(options.get("is_inference")))
    _move(graph_module)
    moved = [_on_gpu(each) for each in inputs]
    lowering = GraphLowering(
        graph_module,
        example_inputs=moved,
        shape_env=mode.shape_env,
        is_inference=bool(options.get("is_inference")),
        is_backward=bool(options.get("is_backward")),
        get_decomp_fn=compile_fx.select_decomp_table,
    )
    with V.set_graph_handler(lowering), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        lowering.run(*moved)
        code, _ = lowering.codegen()
    PyCodeCache.load(code.value)  # whose import compiles its kernels

    def run(args: list[Any]) -> list[Any]:
        return [_zeros(each) for each in results]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _zeros(result: Any) -> Any:
    """A tensor of a traced one's shape; of a traced size its value."""
    if isinstance(result, Tensor):
        return torch.zeros([_zeros(size) for size in result.shape], dtype=result.dtype)
    return result.node.hint if isinstance(result, torch.SymInt) else result


def _move(graph_module: torch.fx.GraphModule) -> None:
    gpu = torch.device("cuda", 0)

    def moved(argument: Any) -> Any:
        return gpu if isinstance(argument, torch.device) and argument.type == "cpu" else argument

    for module in graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            for key in node.meta.keys() & {"val", "example_value"}:
                node.meta[key] = torch.utils._pytree.tree_map(_on_gpu, node.meta[key])
            node.args = torch.fx.node.map_aggregate(node.args, moved)
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, moved)
            if node.target is torch.ops.higher_order.flex_attention:
                # Which the backward reads, and which torch leaves out on a CPU.
                node.args = tuple(
                    {**each, "OUTPUT_LOGSUMEXP": True} if isinstance(each, dict) else each for each in node.args
                )
        module.recompile()


def _on_gpu(value: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(value, FakeTensor):
        return value
    meta = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, meta, torch.device("cuda", 0))
