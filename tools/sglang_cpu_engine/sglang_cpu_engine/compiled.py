"""Compiles functions for one thread that are called thousands of times a second, and gives them tensors.

numba's own call looks at every array that it is given, some 15 microseconds for five of them: more than most of these
functions work. Here they take addresses, by ctypes, which is some 2.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from numba import types

OPTIONS: dict[str, Any] = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy"}
"""In any order of summation, so that sums run in vector registers, as loops do in which no division can raise; inf and
nan stay what they are."""
_ARRAYS = {torch.float32: types.float32, torch.int32: types.int32, torch.int64: types.int64}
_NUMBERS = {int: (types.int64, ctypes.c_int64), float: (types.float32, ctypes.c_float)}


def takes(*tensors: torch.Tensor) -> bool:
    """Whether compiled functions are for these: float32 throughout, in a process of one thread."""
    return torch.get_num_threads() == 1 and all(x.dtype == torch.float32 for x in tensors)


def kept(compiler: Callable[..., Any], function: Callable[..., None]) -> Any:
    """``function``, compiled by ``compiler`` (numba's njit or cfunc) with ``OPTIONS``; kept on disk where it can be."""
    try:
        return compiler(cache=True, **OPTIONS)(function)
    except RuntimeError:  # nowhere to keep what is compiled
        return compiler(**OPTIONS)(function)


class Compiled:
    """``function``, compiled at its first call; it gets tensors as pointers to their first element.

    What a pointer's numbers are shaped like the function knows by itself (``numba.carray``); the caller sees to
    strides. Loops that are to become vector instructions belong into functions of arrays, compiled with ``OPTIONS``,
    that it calls.

    Args:
        kinds: of its arguments in their order: of a tensor its dtype, of a number int or float.
    """

    def __init__(self, function: Callable[..., None], *kinds: torch.dtype | type) -> None:
        self._function = function
        self._kinds = kinds
        self._call: Callable[..., None] | None = None

    def __call__(self, *arguments: Any) -> None:
        """Call the compiled function with the tensors' addresses and the numbers; it is compiled at the first one."""
        if self._call is None:
            self._call = self._compiled()
        self._call(*(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments))

    def _compiled(self) -> Callable[..., None]:
        pairs: list[tuple[Any, Any]] = [
            (types.CPointer(_ARRAYS[kind]), ctypes.c_void_p) if isinstance(kind, torch.dtype) else _NUMBERS[kind]
            for kind in self._kinds
        ]
        signature = types.void(*(pair[0] for pair in pairs))
        compiled = kept(functools.partial(numba.cfunc, signature), self._function)
        self._function = compiled  # its code lives as long as it
        # Not CFUNCTYPE: to give the lock away and wait for it again would take longer than most calls.
        return ctypes.PYFUNCTYPE(None, *(pair[1] for pair in pairs))(compiled.address)


@numba.njit(inline="always", **OPTIONS)
def exp(x):  # type: ignore[no-untyped-def]
    """e^x of a float32, within 3e-7 of it; e^-87 for all below, e^88 for all above.

    Unlike the C library's it becomes vector instructions. Range reduction and polynomial are those of Cephes' expf.
    Whoever changes it removes the ``__pycache__`` beside it: numba keeps callers in other files as they were compiled.
    """
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    exponent = np.floor(x * np.float32(1.44269504088896341) + np.float32(0.5))
    rest = x - exponent * np.float32(0.693359375) - exponent * np.float32(-2.12194440e-4)
    power = np.float32(1.9875691500e-4)
    power = power * rest + np.float32(1.3981999507e-3)
    power = power * rest + np.float32(8.3334519073e-3)
    power = power * rest + np.float32(4.1665795894e-2)
    power = power * rest + np.float32(1.6666665459e-1)
    power = power * rest + np.float32(5.0000001201e-1)
    power = power * rest * rest + rest + np.float32(1)
    return power * np.int32((np.int32(exponent) + np.int32(127)) << np.int32(23)).view(np.float32)
