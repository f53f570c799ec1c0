"""Processes beside pytest's for which there is a GPU, and from which every case's ranks are forked.

In one kind of them Transformer Engine is installed, in the other it is not: Megatron-Core takes other ways by that.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_retool.parity.admission.tiny_model import save_model
from megatron_retool.parity.ranks import run_ranks
from tests.gpu_branch import device_kernels, fake_device
from tests.kit.adapter_reference import small_model
from tests.learner.transformer_engine import kernels

Run = Callable[..., Any]
LAYERS = (2, 4)
SIZES: dict[str, dict[str, int]] = {
    "qwen3": {},
    "qwen3_moe": {"moe_intermediate_size": 32},
    "mistral": {},
    "deepseek_v3": {"q_lora_rank": 32, "kv_lora_rank": 32, "moe_intermediate_size": 32},
    "qwen3_next": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "granitemoehybrid": {"shared_intermediate_size": 48},
}
"""FP8 wants multiples of 16."""


def _start(engine: bool, capability: tuple[int, int]) -> None:
    torch.set_num_threads(1)
    fake_device.install(capability)
    if engine:
        device_kernels.install(kernels.FOLDER)
    else:
        import megatron_retool.learner.learner  # noqa: F401  so that the ranks need not import it
    from tests.gpu_branch import efficient_attention

    efficient_attention.install(fake_device.kernel)


@pytest.fixture(scope="package")
def beside_pytest() -> Iterator[Callable[[bool, tuple[int, int]], ProcessPoolExecutor]]:
    """``start(engine, capability)``: a process with such a GPU, with Transformer Engine or without."""
    if torch.cuda.is_available():
        pytest.skip("for hosts without a GPU: here is one")
    if not (kernels.FOLDER / "transformer_engine").is_dir():
        pytest.fail(f"{kernels.FOLDER} has no transformer_engine: run scripts/setup.sh, which installs it there")
    started: dict[Any, ProcessPoolExecutor] = {}
    with ExitStack() as until_the_end:

        def start(*kind: Any) -> ProcessPoolExecutor:
            if kind not in started:
                spawn = multiprocessing.get_context("spawn")
                executor = ProcessPoolExecutor(1, spawn, initializer=_start, initargs=kind)
                started[kind] = until_the_end.enter_context(executor)
            return started[kind]

        yield start


@pytest.fixture
def on_gpus(beside_pytest: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run(function, *args, world=, engine=, capability=)``: rank 0's answer to ``function(*args)``, where every rank
    has a GPU and sees its tensors there."""

    def run(
        function: Callable[..., Any],
        *args: Any,
        world: int = 1,
        engine: bool = True,
        capability: tuple[int, int] = fake_device.HOPPER,
    ) -> Any:
        directory = tmp_path_factory.mktemp("ranks")
        return beside_pytest(engine, capability).submit(_fork_ranks, function, world, directory, args).result()

    return run


def _fork_ranks(function: Callable[..., Any], world: int, directory: Path, args: tuple[Any, ...]) -> Any:
    return run_ranks(_with_gpu, world, directory, function, args, start_method="fork")


def _with_gpu(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with fake_device.device():
        return function(*args)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with random models FAMILY-LAYERS, dense (qwen3, and mistral with a window) and of experts, of which
    the others compute attention in the learner's own layers."""
    directory = tmp_path_factory.mktemp("models")
    for family, sizes in SIZES.items():
        for layers in LAYERS:
            save_model(small_model(family, num_hidden_layers=layers, **sizes), directory / f"{family}-{layers}")
    return directory
