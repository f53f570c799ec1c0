"""A weight sync that fails on rank 0, or in the export itself, must not leave the other ranks in a collective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed

from megatron_retool.cluster.learner_failures import OutOfStep
from megatron_retool.cluster.learner_worker import LearnerWorker
from megatron_retool.config import load_config
from megatron_retool.parity.ranks import run_ranks
from sglang_rollout.engine.base import SyncReport
from sglang_rollout.engine.weight_sync.errors import WeightSyncError
from tests.sglang_rollout.engine.weight_sync.test_weight_sync import FakeEngine

BUCKETS = 3
FAILED = (500, {"error": {"message": "on purpose"}})
FAULTS = {
    "at the first look": ("tensor", "/server_info", 1),
    "in the middle": ("tensor", "/update_weights_from_tensor", 2),
    "at the last check": ("tensor", "/model_info", 1),
    "when the engine reads the files": ("disk", "/update_weights_from_disk", 1),
    "when the engine joins": ("distributed", "/init_weights_update_group", 1),
}
"""Method, path that fails, and which call of it."""


class GatheringLearner:
    """An export whose every bucket is a collective, in which all ranks must be at the same place of the same call."""

    calls = 0

    def export_weights(self, bucket_bytes: int, receivers: Sequence[int]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        self.calls += 1
        for bucket in range(BUCKETS):
            places: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(places, (self.calls, bucket))
            assert places == [(self.calls, bucket)] * len(places), places
            yield [(f"layer{bucket}.weight", torch.full((4, 4), float(10 * self.calls + bucket)))]


def learner_worker(directory: Path, method: str, rank: int, learner: Any) -> Any:
    worker: Any = LearnerWorker.__new__(LearnerWorker)
    worker.config = load_config(
        None,
        [
            f"trainer.runs_dir={directory}",
            f"model.path={directory}",
            f"weight_sync.method={method}",
            "weight_sync.timeout_seconds=3",
        ],
    )
    worker.rank, worker.learner = rank, learner
    return worker


def fail_and_sync_again(directory: Path) -> dict[str, tuple[str, dict[str, float]]]:
    """For each of FAULTS: what rank 0 raised, and what the engine holds after a second sync, made through files."""
    distributed.init_process_group("gloo")
    found = {}
    for name, (method, path, number) in FAULTS.items():
        worker = learner_worker(directory, method, distributed.get_rank(), GatheringLearner())
        faults = {path: lambda count, number=number: FAILED if count == number else None}
        engine = FakeEngine(faults) if worker.rank == 0 else None
        senders = {0: [engine.url] if engine else []}
        error = worker.sync_weights(senders, 1)
        worker.config = learner_worker(directory, "disk", 0, None).config
        again = worker.sync_weights(senders, 2)
        if engine:
            assert isinstance(error, WeightSyncError) and error.engines == (engine.url,) and again.tensors == BUCKETS
            held = {name: float(tensor.mean()) for name, tensor in engine.tensors.items()}
            found[name] = str(error), held
            engine.close()
        else:
            assert error is again is None
    return found


def test_a_push_that_fails_leaves_the_ranks_in_step(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = run_ranks(fail_and_sync_again, 2, tmp_path / "ranks", tmp_path, timeout=90)
    assert sorted(found) == sorted(FAULTS)
    for name, (error, held) in found.items():
        assert FAULTS[name][1] in error and "on purpose" in error, (name, error)
        assert held == {f"layer{bucket}.weight": 20.0 + bucket for bucket in range(BUCKETS)}, name


def two_senders(directory: Path) -> list[Any]:
    """Answers of both ranks and the calls that their engines got: at the first sync rank 1's engine fails."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    fault = {"/update_weights_from_tensor": lambda count: FAILED if count == 2 else None}
    engine = FakeEngine(fault if rank == 1 else None)
    urls: list[Any] = [None, None]
    distributed.all_gather_object(urls, engine.url)
    worker = learner_worker(directory, "tensor", rank, GatheringLearner())
    answers = [worker.sync_weights({0: [urls[0]], 1: [urls[1]]}, version) for version in (1, 2)]
    found: list[Any] = [None, None]
    distributed.all_gather_object(found, (engine.url, answers, engine.version))
    engine.close()
    return found


def test_each_sender_answers_for_its_own_engines(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (_, healthy, first_version), (failed_url, failing, second_version) = run_ranks(
        two_senders, 2, tmp_path / "ranks", tmp_path, timeout=90
    )
    assert [report.tensors for report in healthy] == [BUCKETS, BUCKETS]
    assert isinstance(failing[0], WeightSyncError) and failing[0].engines == (failed_url,)
    assert failing[1].tensors == BUCKETS and first_version == second_version == "2"


def test_reports_of_senders_are_counted_together() -> None:
    reports = [SyncReport(7, 3, 100, 0.5, 6), SyncReport(7, 3, 100, 0.8, 12)]
    assert SyncReport.together(reports) == SyncReport(7, 3, 200, 0.8, 18)


def test_an_error_of_the_export_is_not_taken_for_one_of_an_engine(tmp_path: Path) -> None:
    class FailingLearner:
        def export_weights(
            self, bucket_bytes: int, receivers: Sequence[int]
        ) -> Iterator[list[tuple[str, torch.Tensor]]]:
            yield [("layer0.weight", torch.ones(4, 4))]
            raise RuntimeError("out of memory")

    engine = FakeEngine()
    try:
        for rank in range(2):
            worker = learner_worker(tmp_path, "tensor", rank, FailingLearner())
            with pytest.raises(OutOfStep, match="could not be exported: RuntimeError: out of memory"):
                worker.sync_weights({0: [engine.url]}, 1)
    finally:
        engine.close()
    assert engine.paths()[-2:] == ["/end_weight_update", "/continue_generation"]
