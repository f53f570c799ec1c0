"""A CUDA device that is not there: tensors compute on the host with real numbers, and say that they are on it.

Every storage has a label, its device. Code sees the label as the tensor's device, and three things are recorded with
the line of the program that did them: operations that mix devices, which CUDA refuses; waits of the host for the
device; and copies between both. What autograd makes for itself has no label and goes with everything.

``install`` changes torch for good, so it belongs into a process of its own, before Megatron-Core or Transformer Engine
are imported. Labels are given and read within ``device``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST = torch.device("cpu")
GPUS = 8
"""Of the node that is not there; a rank takes the one of its LOCAL_RANK."""
_ROOT = Path(__file__).parents[2]
_PACKAGE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_STAND_INS = (
    *(f"{_PACKAGE}/{name}.py" for name in ("fake_device", "device_kernels", "device_products")),
    str(_ROOT / "tests" / "learner" / "transformer_engine" / "kernels.py"),
)
HOPPER, BLACKWELL = (9, 0), (10, 0)
_PLAIN = {Tensor, torch.nn.Parameter}
_NO_TREES = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_capability = HOPPER
_own_gpu = 0
_without_record = 0


class Event(NamedTuple):
    """What a line of the program did; ``caller`` is the project's line that led there, empty where it is the line."""

    what: str
    file: str
    function: str
    line: int
    caller: str

    def __str__(self) -> str:
        return f"{self.what} @ {self.file}:{self.line} {self.function}" + (f" <- {self.caller}" if self.caller else "")


@dataclass
class Record:
    """How often each event happened.

    Attributes:
        mixed: operations on tensors of several devices.
        waits: of the host for the device: values that are read, shapes that depend on values, synchronisation.
        copies: from the host that block it, from memory that is not pinned.
        free_copies: between pinned memory and the device, for which the host does not wait.
        compiled: calls of functions that torch.compile made, by the function's module and name.
    """

    mixed: Counter[Event] = field(default_factory=Counter)
    waits: Counter[Event] = field(default_factory=Counter)
    copies: Counter[Event] = field(default_factory=Counter)
    free_copies: Counter[Event] = field(default_factory=Counter)
    compiled: Counter[str] = field(default_factory=Counter)


_record = Record()


@contextlib.contextmanager
def recorded() -> Iterator[Record]:
    """Only what happens inside."""
    global _record
    before, _record = _record, Record()
    try:
        yield _record
    finally:
        _record = before


@contextlib.contextmanager
def _unrecorded() -> Iterator[None]:
    global _without_record
    _without_record += 1
    try:
        yield
    finally:
        _without_record -= 1


def _note(counter: str, what: str) -> None:
    if not _without_record:
        getattr(_record, counter)[_event(what)] += 1


def _event(what: str) -> Event:
    place, frame = None, sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_STAND_INS, _TORCH, "<")):
            short = file.split("site-packages/")[-1].split("transformer_engine_only/")[-1].removeprefix(f"{_ROOT}/")
            if place is None:
                place = what, short, frame.f_code.co_name, frame.f_lineno
            if short.startswith(("megatron_retool/", "conversion/")):
                here = f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
                return Event(*place, "" if place[1] == short else here)
        frame = frame.f_back
    return Event(*(place or (what, "?", "?", 0)), "")


# --- labels ---------------------------------------------------------------------------------------------------------


def gpu() -> torch.device:
    """This process's."""
    return torch.device("cuda", _own_gpu)


def _tensors(tree: Any) -> list[Tensor]:
    """Those in ``tree``; as ``tree_leaves``, which takes three times as long for what operators are given."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [leaf for each in tree for leaf in _tensors(each)]
    if isinstance(tree, dict):
        return [leaf for each in tree.values() for leaf in _tensors(each)]
    if tree is None or isinstance(tree, _NO_TREES):
        return []
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> Any:
    """The storage's object, which lives as long as the memory and takes the label along."""
    with torch._C.DisableTorchFunction():
        try:
            if type(tensor) not in _PLAIN and hasattr(tensor, "get_metadata"):  # a quantised one is where its parts are
                return next(p.untyped_storage() for p in tensor.get_metadata().values() if isinstance(p, Tensor))
            return tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a tensor without one
            return None


def label(tensor: Tensor) -> torch.device | None:
    """The device that the tensor is on; None: not said."""
    return getattr(_storage(tensor), "label", None)


def place(tree: Any, device: torch.device | None, *, pinned: bool = False) -> Any:
    """``tree``, whose tensors are on ``device`` now."""
    for leaf in _tensors(tree):
        if (storage := _storage(leaf)) is not None:
            storage.label, storage.pinned = device, pinned
    return tree


def _place_unlabelled(tree: Any, device: torch.device | None) -> Any:
    for leaf in _tensors(tree):
        storage = _storage(leaf)
        if storage is not None and getattr(storage, "label", None) is None:
            storage.label, storage.pinned = device, False
    return tree


def _is_pinned(tensor: Tensor) -> bool:
    return bool(getattr(_storage(tensor), "pinned", False))


def _is_on_gpu(tensor: Tensor) -> bool:
    found = label(tensor)
    return found is not None and found.type == "cuda"


def _meant(device: Any) -> torch.device | None:
    """The device that an argument names; None: it names none, or one that is neither host nor GPU."""
    if isinstance(device, int) and not isinstance(device, bool):
        return torch.device("cuda", device)
    if isinstance(device, str):
        device = torch.device(device)
    if not isinstance(device, torch.device) or device.type not in ("cpu", "cuda"):
        return None
    return gpu() if device.type == "cuda" and device.index is None else device


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` stands in for a kernel: its own waits are not the program's, and its output is on the device."""

    @functools.wraps(function)
    def launched(*args: Any, **kwargs: Any) -> Any:
        for leaf in _tensors((args, kwargs)):
            if leaf.dim() and label(leaf) == HOST:
                _note("mixed", f"kernel {function.__name__} on a tensor of the host {tuple(leaf.shape)}")
        with _unrecorded():
            return place(function(*args, **kwargs), gpu())

    return launched


# --- what Python asks of tensors --------------------------------------------------------------------------------------

_constructors: frozenset[Any] = frozenset()
_NEW = {Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor}
_LIKE = {
    torch.empty_like,
    torch.zeros_like,
    torch.ones_like,
    torch.full_like,
    torch.rand_like,
    torch.randn_like,
    torch.randint_like,
}
_FROM_TENSOR = {torch.tensor, torch.as_tensor, torch.asarray}
_READS_VALUES = {
    Tensor.item,
    Tensor.tolist,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.__repr__,
    Tensor.__format__,
}


class _Answers(TorchFunctionMode):
    """Tensors say that they are on their label's device, and constructors put them there."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        owner = getattr(func, "__self__", None)
        if owner in (Tensor.device, Tensor.is_cuda) and func.__name__ == "__get__":
            found = label(args[0])
            if owner is Tensor.is_cuda:
                return found is not None and found.type == "cuda"
            return func(*args, **kwargs) if found in (None, HOST) else found
        if func is torch.device and args and isinstance(args[0], int):
            return torch.device("cuda", args[0])
        if func is Tensor.get_device:
            return gpu().index if _is_on_gpu(args[0]) else -1
        if func is Tensor.type and len(args) == 1 and not kwargs:
            name = func(*args)
            return name.replace("torch.", "torch.cuda.", 1) if _is_on_gpu(args[0]) else name
        if func in _LIKE or func in _NEW or func in _constructors or func is torch.from_numpy:
            return self._construct(func, args, kwargs)
        if func is Tensor.cpu:
            return self._copy(args[0], HOST, None, False, {})
        if func is Tensor.cuda:
            asked = args[1] if len(args) > 1 else kwargs.get("device")
            return self._copy(args[0], _meant(asked) or gpu(), None, kwargs.get("non_blocking", False), {})
        if func is Tensor.to:
            return self._to(*args, **kwargs)
        if func is Tensor.pin_memory:
            with _unrecorded():
                return place(args[0].clone(), HOST, pinned=True)
        if func is Tensor.is_pinned:
            return _is_pinned(args[0])
        if func in (Tensor.numpy, Tensor.__array__) and _is_on_gpu(args[0]):
            raise TypeError(f"can't convert cuda:0 device type tensor to numpy: {_event('numpy')}")
        if func in _READS_VALUES and _is_on_gpu(args[0]):
            _note("waits", func.__name__)
            with _unrecorded():
                return func(*args, **kwargs)
        if (meant := _meant(kwargs.get("device"))) is not None and meant != HOST:
            return place(func(*args, **{**kwargs, "device": HOST}), meant)
        return func(*args, **kwargs)

    def _construct(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        meant, pinned = _meant(kwargs.get("device")), bool(kwargs.pop("pin_memory", False))
        if kwargs.get("device") is not None and meant is None:
            return func(*args, **kwargs)  # torch.device("meta")
        if meant is not None:
            kwargs["device"] = HOST
        inherits = func in _LIKE or func in _NEW or (func in _FROM_TENSOR and args and isinstance(args[0], Tensor))
        if meant is None:
            # What a kernel makes for itself has no label.
            meant = label(args[0]) if inherits else None if _without_record else HOST
        if meant is not None and meant != HOST and func in _FROM_TENSOR | {Tensor.new_tensor}:
            source = args[0 if func in _FROM_TENSOR else 1]
            if not (isinstance(source, Tensor) and label(source) == meant):
                # torch makes it on the host first, in memory that is not pinned.
                _note("copies", f"{func.__name__} of values of the host")
        with _unrecorded():
            return place(func(*args, **kwargs), meant, pinned=pinned)

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
        non_blocking = kwargs.pop("non_blocking", False)
        rest = list(args)
        if rest:
            first = rest.pop(0)
            if isinstance(first, torch.dtype):
                dtype = first
            elif isinstance(first, Tensor):
                device, dtype = label(first), first.dtype
            else:
                device = first
        if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
            dtype = rest.pop(0)
        if rest:
            non_blocking = rest.pop(0)
        if rest:
            kwargs["copy"] = rest.pop(0)
        if device is not None and _meant(device) is None:
            return Tensor.to(tensor, device, dtype or tensor.dtype, **kwargs)
        return self._copy(tensor, _meant(device), dtype, non_blocking, kwargs)

    def _copy(
        self, tensor: Tensor, target: torch.device | None, dtype: Any, non_blocking: bool, options: dict[str, Any]
    ) -> Tensor:
        own, dtype = label(tensor), tensor.dtype if dtype is None else dtype
        if target is None or own == target or (own is None and target == HOST):
            pinned = _is_pinned(tensor)
            found = Tensor.to(tensor, dtype, **options)
            return place(found, own if target is None else target, pinned=pinned and found is tensor)
        if target == HOST:  # torch takes pinned memory where the caller will wait later
            _note("free_copies" if non_blocking else "waits", "copy to the host")
        else:
            free = non_blocking and _is_pinned(tensor)
            _note("free_copies" if free else "copies", "copy from the host")
        with _unrecorded():
            copied = Tensor.to(tensor, dtype, **{**options, "copy": True})
        return place(copied, target, pinned=non_blocking and target == HOST)


# --- what torch computes ----------------------------------------------------------------------------------------------

_WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
    "is_nonzero",
    "bincount",
    "histc",
}
"""Operators whose answer, or its shape, the host has to know."""
_BETWEEN_DEVICES = {"copy_", "_to_copy", "set_", "detach", "alias", "_local_scalar_dense", "resize_", "barrier"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_OF_EQUALS = {"cat", "stack"}
"""Operators that do not even take a number of the host beside tensors of the device."""


class _Operators(TorchDispatchMode):
    """Outputs are where inputs are; what mixes devices, waits or copies is recorded."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if (asked := _meant(kwargs.get("device"))) is not None and asked != HOST:
            kwargs["device"] = HOST
        kwargs.pop("pin_memory", None)
        if isinstance(func, torch._ops.HigherOrderOperator):  # FlexAttention, which torch computes without a kernel
            with _unrecorded():
                return place(func(*args, **kwargs), gpu())
        inputs = _tensors((args, kwargs))
        labels = [label(each) for each in inputs]
        where = next((each for each in labels if each is not None and each != HOST), None)
        name = func._schema.name.partition("::")[2]
        if where is not None and not _without_record:
            self._look(name, args, kwargs, inputs, labels)
        elif where is None:
            where = HOST if HOST in labels else None
        out = func(*args, **kwargs)
        if not inputs:  # torch's own, or labelled by who made it through the other mode
            return place(out, None if asked == HOST else asked)
        return out if name == "copy_" else _place_unlabelled(out, where)

    def _look(self, name: str, args: Any, kwargs: Any, inputs: list[Tensor], labels: list[torch.device | None]) -> None:
        indices: list[Any] = []
        if name in _INDEXING:
            indices = _tensors(args[1])
            self._look_at_indices(name, args, indices)
        if name == "copy_":
            self._look_at_copy(args, kwargs)
        if name in _WAITS:
            _note("waits", name)
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            _note("waits", "repeat_interleave without output_size")
        if name == "barrier":
            _note("waits", "barrier")
        if name in _BETWEEN_DEVICES:
            return
        strangers = [
            each
            for each, where in zip(inputs, labels, strict=True)
            if where is not None
            and where != gpu()
            and not any(each is index for index in indices)
            and (
                where != HOST or _has_dimensions(each) or name in _OF_EQUALS or (each is inputs[0] and name[-1] == "_")
            )
        ]
        if strangers:
            _note("mixed", f"{name} on the host's {[tuple(each.shape) for each in strangers]}")

    def _look_at_indices(self, name: str, args: Any, indices: list[Tensor]) -> None:
        if any(label(index) in (None, HOST) for index in indices):
            _note("copies", f"{name} by an index of the host")
        masks = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
        fills = name.startswith(("index_put", "_index_put")) and args[2].numel() == 1
        if masks and not fills:
            _note("waits", f"{name} by a mask")

    def _look_at_copy(self, args: Any, kwargs: Any) -> None:
        target, source = args[0], args[1]
        there, here = label(target), label(source)
        if there is None or here is None or there == here:
            return
        free = bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        free = free and _is_pinned(source if here == HOST else target)
        counter = "free_copies" if free else "copies" if here == HOST else "waits"
        _note(counter, "copy from the host" if here == HOST else "copy to the host")


def _has_dimensions(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return tensor.dim() > 0


@contextlib.contextmanager
def device() -> Iterator[None]:
    """Tensors have labels inside. What was sent has arrived at the end."""
    with _Operators(), _Answers():
        yield
    for work, _ in _under_way:
        work.wait()
    _under_way.clear()


# --- what there is of CUDA --------------------------------------------------------------------------------------------


class _Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device, self.cuda_stream = gpu(), 0

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None:
        _note("waits", "stream.synchronize")

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exception: Any) -> None: ...


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None:
        _note("waits", "event.synchronize")

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Chosen:
    """with torch.cuda.device(...)"""

    def __init__(self, *args: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: Any) -> None: ...


def install(capability: tuple[int, int] = HOPPER) -> None:
    """torch says that there are GPUs, and takes gloo where it is asked for NCCL."""
    global _constructors, _capability
    _capability = capability
    _constructors = frozenset(_device_constructors()) - {torch.device}
    _answer_for_cuda()
    torch.UntypedStorage.device = property(lambda self: getattr(self, "label", None) or HOST)
    Tensor.record_stream = lambda self, stream: None
    torch.compile = _compile
    _stay_active_in_backward()
    _exchange_on_gloo()


def properties_of(capability: tuple[int, int]) -> types.SimpleNamespace:
    """torch.cuda.get_device_properties of a GPU of this age."""
    return types.SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        name="a GPU that is not there",
        total_memory=80 << 30,
        multi_processor_count=132,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        L2_cache_size=50 << 20,
        shared_memory_per_multiprocessor=228 << 10,
    )


def _answer_for_cuda() -> None:
    properties = properties_of(_capability)
    stream = _Stream()
    constants: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "device_count": GPUS,
        "get_device_capability": _capability,
        "get_device_name": properties.name,
        "current_stream": stream,
        "default_stream": stream,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "mem_get_info": (79 << 30, 80 << 30),
        "memory_stats": {},
    }
    nothing = ("empty_cache", "ipc_collect", "set_stream", "reset_peak_memory_stats", "init", "_lazy_init")

    def constant(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    for name, value in {**constants, **dict.fromkeys(nothing)}.items():
        setattr(torch.cuda, name, constant(value))

    def set_device(chosen: Any) -> None:
        global _own_gpu
        _own_gpu = (_meant(chosen) or gpu()).index

    generator = torch.default_generator
    changed: dict[str, Any] = {
        "set_device": set_device,
        "current_device": lambda: gpu().index,
        "get_device_properties": lambda device=None: types.SimpleNamespace(
            **vars(properties), uuid=f"GPU-{gpu().index if device is None else torch.device('cuda', device).index}"
        ),
        "synchronize": lambda *_: _note("waits", "cuda.synchronize"),
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda stream=None: contextlib.nullcontext(),
        "device": _Chosen,
        "_lazy_call": lambda call, **_: call(),
        "default_generators": (generator,) * GPUS,
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "set_rng_state": lambda state, device="cuda": generator.set_state(state),
    }
    for name, value in changed.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state, torch.cuda.random.set_rng_state = (
        changed["get_rng_state"],
        changed["set_rng_state"],
    )
    torch.accelerator.current_stream = constant(stream)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = constant(None)
    torch.version.cuda = "13.0"


def _compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
    """torch.compile that leaves the function as it is, and notes its calls: it would compile for the GPU."""
    if model is None:
        return _compile
    if not isinstance(model, types.FunctionType):
        return model

    @functools.wraps(model)
    def noted(*args: Any, **kwargs: Any) -> Any:
        _record.compiled[f"{model.__module__}.{model.__qualname__}"] += 1
        return model(*args, **kwargs)

    return noted


def _stay_active_in_backward() -> None:
    """torch calls a mode with ``backward``, and lets the mode sleep in all that ``backward`` calls, so that the mode
    would not see it."""
    from torch.autograd import _make_grads
    from torch.autograd.graph import _engine_run_backward

    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        tensors = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        given = (grad_tensors,) if isinstance(grad_tensors, Tensor) else grad_tensors
        given = (None,) * len(tensors) if given is None else tuple(given)
        grads = _make_grads(tensors, given, is_grads_batched=False)
        _engine_run_backward(
            tensors,
            grads,
            create_graph if retain_graph is None else retain_graph,
            create_graph,
            inputs or (),
            allow_unreachable=True,
            accumulate_grad=True,
        )

    torch.autograd.backward = backward
    Tensor.backward = lambda self, gradient=None, *args, **kwargs: backward(self, gradient, *args, **kwargs)


# --- NCCL -------------------------------------------------------------------------------------------------------------

_under_way: list[Any] = []
"""Sends, with the memory that they read."""


class _Sent:
    """A send on NCCL does not let the host wait, and reads its memory in the stream's order."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _exchange_on_gloo() -> None:
    init, new_group, send, exchange = dist.init_process_group, dist.new_group, dist.isend, dist.batch_isend_irecv
    gather, scatter = dist.all_gather, dist.reduce_scatter

    def on_gloo(backend: Any) -> Any:
        return backend.replace("nccl", "gloo") if isinstance(backend, str) else backend

    def isend(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        with _unrecorded():
            copy = tensor.detach().clone()
            _under_way.append((send(copy, *args, **kwargs), copy))
        return _Sent()

    def batch_isend_irecv(operations: Any) -> Any:
        sends = [each for each in operations if each.op in (send, isend)]
        works = [isend(each.tensor, group=each.group, group_dst=each.group_peer, tag=each.tag) for each in sends]
        receives = [each for each in operations if each not in sends]
        return works + (exchange(receives) if receives else [])

    def all_gather(parts: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({part.shape for part in parts}) == 1:
            return gather(parts, tensor, group, async_op)
        # Parts of different lengths, which gloo refuses.
        for rank, part in enumerate(parts):
            if rank == dist.get_rank(group):
                part.copy_(tensor)
            dist.broadcast(part, group=group, group_src=rank)
        return None

    def reduce_scatter(output: Tensor, parts: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        if len({part.shape for part in parts}) == 1:
            return scatter(output, parts, *args, **kwargs)
        group = kwargs.get("group")
        for rank, part in enumerate(parts):
            total = part.clone()
            dist.all_reduce(total, group=group)
            if rank == dist.get_rank(group):
                output.copy_(total)
        return None

    dist.init_process_group = lambda backend=None, *args, **kwargs: init(on_gloo(backend), *args, **kwargs)

    def new_groups(ranks: Any = None, timeout: Any = None, backend: Any = None, **kwargs: Any) -> Any:
        return new_group(ranks, timeout, on_gloo(backend), **kwargs)

    dist.new_group = new_groups
    dist.isend = dist.distributed_c10d.isend = isend
    dist.batch_isend_irecv = batch_isend_irecv
    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter
