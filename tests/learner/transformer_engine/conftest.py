"""One process beside pytest's that has Transformer Engine, and from which every case's ranks are forked.

Nothing else of the tests sees the package: Megatron-Core would take other ways wherever it can be imported.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from conversion.model.architecture import Architecture
from megatron_retool.parity.admission.comparison import write_reference
from megatron_retool.parity.admission.tiny_model import save_model
from megatron_retool.parity.ranks import run_ranks
from tests.kit.tiny_models import FAMILIES, WITH_PARTS, hf_model
from tests.learner.transformer_engine import kernels

Run = Callable[..., Any]


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model of each family, and what transformers computes of it (``parity.write_reference``)."""
    directory = tmp_path_factory.mktemp("parity")
    for family in (*FAMILIES, *WITH_PARTS):
        model = hf_model(family)
        save_model(model, directory / family)
        write_reference(model, Architecture.from_pretrained(directory / family), directory / family)
    return directory


def _start(folder: Path) -> None:
    torch.set_num_threads(1)
    kernels.install(folder)


@pytest.fixture(scope="package")
def beside_pytest() -> Iterator[ProcessPoolExecutor]:
    if torch.cuda.is_available():
        pytest.skip("for hosts without a GPU: here Transformer Engine itself is installed")
    if not (kernels.FOLDER / "transformer_engine").is_dir():
        pytest.fail(f"{kernels.FOLDER} has no transformer_engine: run scripts/setup.sh, which installs it there")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=_start, initargs=(kernels.FOLDER,)) as executor:
        yield executor


@pytest.fixture
def with_transformer_engine(beside_pytest: ProcessPoolExecutor, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run(function, world_size, *args)``: rank 0's answer to ``function(*args)`` where Transformer Engine is."""

    def run(function: Callable[..., Any], world_size: int, *args: Any) -> Any:
        directory = tmp_path_factory.mktemp("ranks")
        return beside_pytest.submit(_fork_ranks, function, world_size, directory, args).result()

    return run


def _fork_ranks(function: Callable[..., Any], world_size: int, directory: Path, args: tuple[Any, ...]) -> Any:
    return run_ranks(function, world_size, directory, *args, start_method="fork")
