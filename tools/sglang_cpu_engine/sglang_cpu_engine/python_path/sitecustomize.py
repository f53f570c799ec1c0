"""First thing a CPU engine's processes run: makes the CUDA build of torchvision importable on CPU torch.

SGLang imports torchvision unconditionally, and the wheel on the package index declares its operators in a CUDA
library that CPU torch cannot load. Declaring the two operators that ``import torchvision`` looks up is enough.
This directory is only on PYTHONPATH of CPU engine processes (``sglang_cpu_engine.environment``).
"""

import gc
import sys
from typing import Any


class _DeclareTorchvisionOperators:
    """Meta-path hook that acts once, just before torchvision is imported, and finds nothing itself."""

    library: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        if torch.version.cuda is not None:  # this torch brings what that library needs
            return
        # The library lives as long as its object: keep it.
        type(self).library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return


sys.meta_path.insert(0, _DeclareTorchvisionOperators())


def _fork_workers() -> None:
    """Let SGLang's workers be forked instead of spawned: without CUDA nothing forbids it, and it halves the start.

    SGLang asks for "spawn" because CUDA cannot be forked; a spawned worker imports the whole of SGLang again.
    """
    import multiprocessing

    set_start_method = multiprocessing.set_start_method

    def set_fork(method: str | None, force: bool = False) -> None:
        set_start_method("fork" if method == "spawn" else method, force)

    multiprocessing.set_start_method = set_fork  # type: ignore[assignment]


_fork_workers()
# SGLang's 7,000 modules are objects that stay: by its usual measure the collector walks through them again and again,
# which is a quarter of the start.
gc.set_threshold(100_000)
