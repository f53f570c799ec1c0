from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.jobs import Submitter
from tests.slurm.virtual_cluster import SlurmUnavailable, VirtualCluster


@pytest.fixture(scope="session")
def slurm() -> Iterator[VirtualCluster]:
    """Two Slurm nodes. Not below pytest's own directory, whose path is too long for Ray's sockets."""
    directory = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))
    try:
        cluster = VirtualCluster(directory)
    except SlurmUnavailable as error:
        shutil.rmtree(directory, ignore_errors=True)
        pytest.skip(f"no Slurm here: {error}")
    try:
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def submit(slurm: VirtualCluster, tmp_path: Path) -> Iterator[Submitter]:
    submitter = Submitter(slurm, tmp_path)
    yield submitter
    submitter.close()
