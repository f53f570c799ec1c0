"""Everything that Megatron-Core needs on a host without CUDA: what it asks of the GPU, the host answers.

The package's own ``__init__`` calls ``install``, before any of its modules imports megatron.core.  It does nothing
where CUDA is present.  ``fix_torch_adam`` has nothing to do with CPUs: it repairs Megatron's distributed optimizer
wherever neither Transformer Engine nor Apex supplies Adam.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._device import _device_constructors

_HOST = torch.device("cpu")
_installed = False


def install() -> bool:
    """Redirect what Megatron-Core asks of ``torch.cuda`` to the host. Idempotent.

    Returns:
        True where the redirection is active, False where CUDA is present and nothing was touched.

    Raises:
        RuntimeError: megatron.core was imported first; its modules have then already captured CUDA functions.
    """
    global _installed
    if _installed:
        return True
    if torch.cuda.is_available():
        return False
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core was imported before megatron_retool.learner.cpu.install()")
    _installed = True
    # ``with torch.device("meta")`` knows the constructors from a cached list of torch's functions. Made after the
    # redirection it would hold the wrappers and do nothing, and transformers would load models with buffers of
    # uninitialised memory.
    _device_constructors()
    _redirect_devices()
    _redirect_cuda_module()
    # Megatron decorates functions with torch.compile while it is imported. On a host without a GPU that means a C++
    # compiler run per function, for nothing.
    compile_function = torch.compile
    torch.compile = _identity_compile
    # pip installs it with SGLang. Its import looks for the driver's library, and of failed imports Megatron-Core
    # survives only an ImportError.
    sys.modules.setdefault("flash_mla", None)  # type: ignore[arg-type]
    try:
        from megatron.core import jit
    finally:
        torch.compile = compile_function
    jit.disable_jit_fuser()
    _patch_megatron()
    _keep_freed_memory()
    return True


def _keep_freed_memory() -> None:
    """Stop glibc from giving every freed activation back to the kernel, which has to zero it again for the next one."""
    mmap_threshold, trim_threshold, top_pad = -3, -1, -2  # M_MMAP_THRESHOLD and so on in malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(mmap_threshold, 32 * 2**20)
    mallopt(trim_threshold, 2**30)
    mallopt(top_pad, 64 * 2**20)


# --- torch ----------------------------------------------------------------------------------------------------------


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _redirect_devices() -> None:
    """``device="cuda"``, ``.cuda()`` and ``.to("cuda")`` mean the host."""

    def on_host(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if kwargs:
                if _names_cuda(kwargs.get("device")):
                    kwargs["device"] = _HOST
                kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return wrapper

    factories = ("arange", "empty", "empty_like", "full", "ones", "ones_like", "tensor", "zeros", "zeros_like")
    for name in factories:
        setattr(torch, name, on_host(getattr(torch, name)))

    tensor_to = torch.Tensor.to

    @functools.wraps(tensor_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _names_cuda(args[0]):
            args = (_HOST, *args[1:])
        if kwargs and _names_cuda(kwargs.get("device")):
            kwargs["device"] = _HOST
        return tensor_to(self, *args, **kwargs)

    torch.Tensor.to = to  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]


class _Stream:
    """Stands for ``torch.cuda.Stream``: work on the host is already in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exception: Any) -> None: ...


class _Event:
    """Stands for ``torch.cuda.Event``: always complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _redirect_cuda_module() -> None:
    def constant(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    stream = _Stream()
    constants: dict[str, Any] = {
        "current_device": _HOST,
        "current_stream": stream,
        "default_stream": stream,
        "synchronize": None,
        "empty_cache": None,
        "ipc_collect": None,
        "set_device": None,
        "reset_peak_memory_stats": None,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
    }
    for name, value in constants.items():
        setattr(torch.cuda, name, constant(value))
    replacements: dict[str, Any] = {
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda stream=None: contextlib.nullcontext(),
        # The device's random state is the host's. manual_seed_all stays: torch.manual_seed itself calls it.
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    torch.cuda.nvtx.range_push = constant(None)
    torch.cuda.nvtx.range_pop = constant(None)


def _identity_compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
    return model if callable(model) else (lambda function: function)


# --- megatron -------------------------------------------------------------------------------------------------------


def _patch_megatron() -> None:
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer
    from megatron.core.tensor_parallel import random as parallel_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    parallel_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    parallel_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)

    # Split sizes of the expert all-to-all become integers only `if tensor.is_cuda`.
    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = to_host
    token_dispatcher.maybe_move_tensor_to_cpu = to_host

    # These compare Tensor.type() with names such as 'torch.cuda.FloatTensor'.
    distributed = distrib_optimizer.DistributedOptimizer
    distributed._build_model_and_main_param_groups = classmethod(
        _with_cuda_type_names(distributed._build_model_and_main_param_groups.__func__)
    )
    half = optimizer.Float16OptimizerWithFloat16Params
    half.__init__ = _with_cuda_type_names(half.__init__)
    clip = _with_cuda_type_names(clip_grads.clip_grad_by_total_norm_fp32)
    clip_grads.clip_grad_by_total_norm_fp32 = clip
    optimizer.clip_grad_by_total_norm_fp32 = clip
    _send_pipeline_shapes_without_waiting()
    _exchange_uneven_parts()


def _exchange_uneven_parts() -> None:
    """All-gather and reduce-scatter of parts of different length, which experts under ETP need and gloo refuses."""
    from megatron.core.tensor_parallel import mappings

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_parts(input_: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatter_parts(
        input_: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
        total = input_.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=group)
        return total.split([int(size) for size in input_split_sizes])[group.rank()].clone()

    mappings._gather_along_first_dim = gather_parts
    mappings._reduce_scatter_along_first_dim = reduce_scatter_parts


def _send_pipeline_shapes_without_waiting() -> None:
    """Let pipeline stages tell each other shapes without deadlock.

    Before every exchange of activations and gradients Megatron exchanges their shapes, and waits until all four
    messages have arrived.  NCCL buffers small messages, so a send is done at once; on gloo it is done when the peer
    asks for it.  In the interleaved schedule a stage may send a gradient's shape to a peer that is still waiting for
    this stage's activation, and both wait forever.  Only receiving has to be waited for; the sends are over when the
    exchange is.
    """
    from megatron.core.pipeline_parallel import p2p_communication

    communicator = p2p_communication.P2PCommunicator
    communicate = communicator._communicate

    def exchange_shapes(
        self: Any, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        send, receive = torch.distributed.isend, torch.distributed.irecv
        from_prev, from_next = (torch.zeros(3, dtype=torch.int64) for _ in range(2))
        for tensor, peer in ((tensor_send_prev, self.prev_rank), (tensor_send_next, self.next_rank)):
            if tensor is not None:
                shape = torch.tensor(tensor.shape, dtype=torch.int64)
                self._shapes_under_way.append((send(shape, peer, group=self.pp_group), shape))
        for wanted, shape, peer in ((recv_prev, from_prev, self.prev_rank), (recv_next, from_next, self.next_rank)):
            if wanted:
                request = receive(shape, peer, group=self.pp_group)
                assert request is not None, "this rank is a member of its own pipeline group"
                request.wait()
        return from_prev.tolist(), from_next.tolist()

    @functools.wraps(communicate)
    def communicate_and_finish(self: Any, **kwargs: Any) -> Any:
        self._shapes_under_way = []
        answer = communicate(self, **kwargs)
        for request, _ in self._shapes_under_way:
            request.wait()
        return answer

    communicator._communicate_shapes = exchange_shapes
    communicator._communicate = communicate_and_finish


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        if isinstance(answer, str):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]


def _with_cuda_type_names(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _cuda_type_names():
            return function(*args, **kwargs)

    return wrapper


def fix_torch_adam() -> None:
    """Repair Megatron's distributed optimizer where Adam comes from torch, on any device. Idempotent.

    Without Transformer Engine or Apex, Megatron-Core 0.16's ``DistributedOptimizer``

    - cannot make a state dict before the first step, so that a fresh process cannot load a checkpoint;
    - gives every parameter the same ``step`` tensor on load, which each parameter's update then advances: with 32
      parameters the step counts 32 per step, and the bias correction is silently wrong;
    - insists on a ``step`` among each parameter's loaded tensors, which the fully reshardable format does not store.
    """
    from megatron.core.optimizer import distrib_optimizer

    cls = distrib_optimizer.DistributedOptimizer
    if distrib_optimizer.HAVE_APEX_OR_TE or getattr(cls, "_torch_adam_fixed", False):
        return
    state_dict, load_state_dict = cls.state_dict, cls.load_state_dict
    set_states = cls._set_main_param_and_optimizer_states

    @functools.wraps(state_dict)
    def state_dict_from_the_start(self: Any) -> Any:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if not self.optimizer.state[parameter]:
                    self.optimizer.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        return state_dict(self)

    @functools.wraps(load_state_dict)
    def load_state_dict_unshared(self: Any, state: Any) -> Any:
        answer = load_state_dict(self, state)
        for parameter_state in self.optimizer.state.values():
            if torch.is_tensor(parameter_state.get("step")):
                parameter_state["step"] = parameter_state["step"].clone()
        return answer

    @functools.wraps(set_states)
    def set_states_keeping_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        group, order = self.model_param_group_index_map[model_param]
        current = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in current and "step" not in tensors:
            tensors = {**tensors, "step": current["step"]}
        return set_states(self, model_param, tensors)

    cls.state_dict = state_dict_from_the_start
    cls.load_state_dict = load_state_dict_unshared
    cls._set_main_param_and_optimizer_states = set_states_keeping_step
    cls._torch_adam_fixed = True
