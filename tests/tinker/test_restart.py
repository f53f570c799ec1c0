"""A server that is killed: its successor knows sessions, runs and checkpoints, and never goes on with a lost state."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_retool.ports import free_port
from megatron_retool.tinker.requests import CheckpointPath, LoraSettings
from megatron_retool.tinker.run_store import RunStore, StoredCheckpoint
from tests.tinker.served import NAME

tinker = pytest.importorskip("tinker", reason="the client of Tinker is not installed (pyproject.toml, extra test)")
from tinker import types  # noqa: E402

from tests.tinker.test_public_client import lesson, loss_of, taught  # noqa: E402

IDS = list(range(40, 60))
REPOSITORY = Path(__file__).parents[2]


@contextlib.contextmanager
def server_process(model: Path, kept: Path, port: int):
    command = [sys.executable, "-m", "tests.tinker.server_process", str(model), str(kept), str(port)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().strip()
        assert url, "the server did not start"
        yield process, url
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_runs_go_on_from_what_they_saved(model_directory: Path, tmp_path: Path):
    port, kept = free_port(), tmp_path / "kept"
    with server_process(model_directory, kept, port) as (process, url):
        client = tinker.ServiceClient(base_url=url, api_key="tml-local")
        saved, unsaved, fresh = (
            client.create_lora_training_client(base_model=NAME, rank=4, seed=seed).result() for seed in (1, 2, 3)
        )
        taught(saved, IDS, 2)
        path = saved.save_state("middle").result().path
        twin = client.create_training_client_from_state_with_optimizer(path).result()
        expected = taught(twin, IDS, 3)
        taught(unsaved, IDS, 1)
        unsaved_path = unsaved.save_state("early").result().path
        lost = taught(unsaved, IDS, 2)
        begin = loss_of(fresh.forward([lesson(IDS)], "cross_entropy").result())
        sampler = saved.save_weights_and_get_sampling_client()
        prompt = types.ModelInput.from_ints(IDS)
        before = sampler.compute_logprobs(prompt).result()
        process.kill()
        process.wait()
    with server_process(model_directory, kept, port):
        # Nothing was lost: the client does not notice.
        assert taught(saved, IDS, 3) == expected
        assert loss_of(fresh.forward([lesson(IDS)], "cross_entropy").result()) == begin
        np.testing.assert_array_equal(sampler.compute_logprobs(prompt).result()[1:], before[1:])
        # Two steps were lost: the run says so, until it is told where to go on.
        with pytest.raises(tinker.RequestFailedError, match="restarted, and what this run learned since .*early"):
            unsaved.forward([lesson(IDS)], "cross_entropy").result()
        rest = client.create_rest_client()
        assert rest.get_training_run(unsaved.model_id).result().corrupted
        resumed = client.create_training_client_from_state_with_optimizer(unsaved_path).result()
        assert taught(resumed, IDS, 2) == lost
        assert [each.tinker_path for each in rest.list_checkpoints(saved.model_id).result().checkpoints] == [path]
        client.close("success").result()


def checkpoint(name: str, **more) -> StoredCheckpoint:
    lora = LoraSettings(4, 1, True, True, True)
    return StoredCheckpoint(CheckpointPath("s:train:0", "weights", name), "base", lora, **more)


def test_half_a_checkpoint_is_none(tmp_path: Path):
    """Killed while a checkpoint was written, or while it took the place of an older one."""
    store = RunStore(tmp_path)
    store.prepare(checkpoint("half").path)
    store.prepare(checkpoint("whole").path)
    first = store.commit(checkpoint("whole"))
    final = store.directory(first.path)
    final.rename(final.with_name(f".{final.name}.old"))
    store.prepare(first.path)
    assert [each.path.name for each in RunStore(tmp_path).checkpoints()] == ["whole"]
    assert sorted(each.name for each in final.parent.iterdir()) == ["whole"]


def test_a_broken_record_is_named(tmp_path: Path):
    store = RunStore(tmp_path)
    store.prepare(checkpoint("whole").path)
    made = store.commit(checkpoint("whole"))
    file = store.directory(made.path) / "checkpoint.json"
    file.write_text("{")
    with pytest.raises(OSError, match=r"checkpoint.json: .*remove it, or restore it from a copy"):
        list(store.checkpoints())
