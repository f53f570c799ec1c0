"""Checkpoints: two more steps after a load equal those without it, in the same layout bit by bit and in any other to
rounding; a failed save harms nothing."""

from __future__ import annotations

import resource
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_retool.config import Config, LearnerConfig, ModelConfig, OptimizerConfig
from megatron_retool.parity.admission.tiny_model import random_batch, save_model
from megatron_retool.parity.ranks import run_ranks
from megatron_retool.runs.checkpoints import SaveError
from tests.kit.tiny_models import hf_model

TP, SP, PP, VPP, EP, ETP = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
LENGTHS = [(3, 9), (5, 4), (2, 12), (4, 6)]
DENSE = "qwen2"
EXPERTS = "qwen3_moe"
SAVED_BY = {DENSE: {TP: 2, PP: 2}, EXPERTS: {EP: 2, PP: 2}}
LOADED_BY: dict[int, dict[str, list[dict[str, Any]]]] = {
    1: {DENSE: [{}], EXPERTS: [{}]},
    2: {DENSE: [{TP: 2, SP: True}, {PP: 2}, {}], EXPERTS: [{EP: 2, TP: 2, SP: True, ETP: 1}]},
    4: {DENSE: [{PP: 4, VPP: 2}, {TP: 4}], EXPERTS: []},
}


def _learner(world: int, layout: dict[str, Any], hf_dir: Path, optimizer: dict[str, Any] | None = None, **options: Any):
    from megatron_retool.learner.learner import Learner

    config = Config(
        model=ModelConfig(path=str(hf_dir)),
        learner=LearnerConfig(
            world_size=world,
            max_tokens_per_micro_batch=32,
            **{"dtype": "float32", **layout},
        ),
    )
    settings = {"lr": 1e-3, "schedule": "linear", "warmup_steps": 2, "weight_decay": 0.1, **(optimizer or {})}
    return Learner(config, optimizer=OptimizerConfig(**settings), total_optimizer_steps=20, hf_dir=hf_dir, **options)


def _steps(learner: Any, *numbers: int) -> dict[str, Any]:
    """Optimizer steps on the batches of these numbers; what they left behind."""
    history = [learner.sft_update(random_batch(LENGTHS, seed=number)) for number in numbers]
    weights = {name: tensor.clone() for bucket in learner.export_weights() for name, tensor in bucket}
    return {"history": history, "weights": weights, "random": torch.rand(3)}


def _optimizer_steps(learner: Any) -> set[float]:
    """What Adam's bias correction believes, over all parameters."""
    return {
        float(state["step"])
        for optimizer in learner.optimizer.chained_optimizers
        for state in optimizer.optimizer.state.values()
    }


def _distance(found: dict[str, Any], expected: dict[str, Any]) -> float:
    metrics = [
        abs(mine[name] / theirs[name] - 1)
        for mine, theirs in zip(found["history"], expected["history"], strict=True)
        for name in theirs
    ]
    assert found["weights"].keys() == expected["weights"].keys()
    weights = [float((found["weights"][n] - w).abs().max()) for n, w in expected["weights"].items()]
    return max(metrics + weights)


def _save(directory: Path) -> dict[str, Any]:
    """World 4: save, go on, and load into the same layout; save asynchronously while going on."""
    found: dict[str, Any] = {}
    for family, layout in SAVED_BY.items():
        learner = _learner(4, layout, directory / family)
        _steps(learner, 1, 2)
        learner.save(directory / f"{family}-checkpoint")
        learner.save(directory / f"{family}-weights", weights_only=True)
        learner.save(directory / f"{family}-async", asynchronous=True)
        assert not (directory / f"{family}-async").exists()
        expected = _steps(learner, 3, 4)
        learner.finish_save()
        completed = (directory / f"{family}-async" / "COMPLETE").exists()
        again = {}
        for kind in ("checkpoint", "async"):
            learner = _learner(4, layout, directory / family)
            learner.load(directory / f"{family}-{kind}")
            again[kind] = {**_steps(learner, 3, 4), "steps": _optimizer_steps(learner)}
        found[family] = {"expected": expected, "again": again, "completed": completed}
    for layout in LOADED_BY[4][DENSE]:
        learner = _learner(4, layout, directory / DENSE)
        learner.load(directory / f"{DENSE}-checkpoint")
        found.setdefault("others", []).append(_steps(learner, 3, 4))
    return found


def _load(world: int, directory: Path) -> list[tuple[str, dict[str, Any], set[float]]]:
    found = []
    for family, layouts in LOADED_BY[world].items():
        for layout in layouts:
            learner = _learner(world, layout, directory / family)
            _steps(learner, 7)  # a learner that has moved elsewhere forgets it
            learner.load(directory / f"{family}-checkpoint")
            found.append((f"{family} {layout}", _steps(learner, 3, 4), _optimizer_steps(learner)))
    return found


def _half_precision(directory: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """World 2, bfloat16 with fp32 main parameters: two steps after a save, plain and compressed, and after a load."""
    learner = _learner(2, {"dtype": "bfloat16"}, directory / DENSE)
    _steps(learner, 1)
    for compression in ("none", "zstd"):
        trainer = replace(learner.config.trainer, checkpoint_compression=compression)
        learner.config = replace(learner.config, trainer=trainer)
        learner.save(directory / f"bfloat16-{compression}")
    expected = _steps(learner, 2, 3)
    again = []
    for compression in ("none", "zstd"):
        learner = _learner(2, {"dtype": "bfloat16"}, directory / DENSE)
        learner.load(directory / f"bfloat16-{compression}")
        again.append(_steps(learner, 2, 3))
    return expected, again


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    for family in SAVED_BY:
        save_model(hf_model(family), directory / family)
    return directory


@pytest.fixture(scope="module")
def saved(models: Path) -> dict[str, Any]:
    return run_ranks(_save, 4, models / "save", models)


@pytest.mark.parametrize("kind", ["checkpoint", "async"])
@pytest.mark.parametrize("family", [DENSE, EXPERTS])
def test_the_same_layout_continues_bit_by_bit(saved: dict[str, Any], family: str, kind: str) -> None:
    """An asynchronous save holds the state of the moment it was asked for, though training went on."""
    expected, again = saved[family]["expected"], saved[family]["again"][kind]
    assert again["history"] == expected["history"]
    for name, tensor in expected["weights"].items():
        assert torch.equal(again["weights"][name], tensor), name
    assert again["steps"] == {4.0}
    assert saved[family]["completed"]
    if kind == "checkpoint":
        assert torch.equal(again["random"], expected["random"])


def test_another_layout_of_four_continues(saved: dict[str, Any]) -> None:
    for other in saved["others"]:
        assert _distance(other, saved[DENSE]["expected"]) < 1e-5


@pytest.mark.parametrize("world", [1, 2])
def test_another_world_size_continues(saved: dict[str, Any], models: Path, world: int) -> None:
    for case, found, steps in run_ranks(_load, world, models / f"load{world}", world, models):
        assert _distance(found, saved[case.split()[0]]["expected"]) < 1e-5, case
        assert steps == {4.0}, case


def test_main_parameters_of_half_precision_are_kept_and_compression_loses_nothing(models: Path) -> None:
    """A bf16 model that resumed from its bf16 weights alone would take other steps."""
    from conversion.files.dist_checkpoint import DistCheckpointError
    from conversion.mcore_to_hf import export
    from tests.conversion.conftest import assert_same_bits, read_all

    expected, loaded = run_ranks(_half_precision, 2, models / "half", models)
    for again in loaded:
        assert again["history"] == expected["history"]
        assert all(torch.equal(again["weights"][name], tensor) for name, tensor in expected["weights"].items())
    plain, packed = (
        sum(path.stat().st_size for path in (models / f"bfloat16-{compression}").glob("*.distcp"))
        for compression in ("none", "zstd")
    )
    assert packed < 0.9 * plain
    exports = [models / f"bfloat16-{compression}-export" for compression in ("none", "zstd")]
    for directory in exports:
        source = models / directory.name.removesuffix("-export")
        export(source, directory, workers=1, require_tokenizer=False)
    assert_same_bits(*map(read_all, exports))
    damaged = max((models / "bfloat16-zstd").glob("*weights*"), key=lambda path: path.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-3000] + bytes(3000))
    with pytest.raises(DistCheckpointError, match=f"{damaged.name}: cannot read .* the file is damaged"):
        export(models / "bfloat16-zstd", models / "x", workers=1, require_tokenizer=False, checksums=False)


def test_weights_alone_are_a_checkpoint_of_their_own(saved: dict[str, Any], models: Path) -> None:
    """Written by themselves or linked out of a complete one: the same weights, on the disk once, whole without it."""
    from conversion.files.checksums import verify_files
    from conversion.files.dist_checkpoint import DistCheckpoint
    from conversion.files.weights_alone import link_weights
    from conversion.mcore_to_hf import export
    from megatron_retool.commands.running import with_exported_model
    from tests.conversion.conftest import assert_same_bits, read_all

    for family in SAVED_BY:
        complete, linked, alone = (models / f"{family}-{kind}" for kind in ("complete", "linked", "weights"))
        shutil.copytree(models / f"{family}-checkpoint", complete)
        export(complete, models / f"{family}-expected", workers=1, require_tokenizer=False)
        link_weights(complete, linked)
        assert b"pathlib" not in (complete / ".metadata").read_bytes(), "Python 3.12 cannot read a path of 3.13"
        parts = sorted(linked.glob("*.distcp"))
        assert parts and all(part.samefile(complete / part.name) for part in parts)
        shutil.rmtree(complete)
        assert DistCheckpoint(linked).tensors.keys() == DistCheckpoint(alone).tensors.keys()
        for directory in (linked, alone):
            verify_files(directory)
            export(directory, models / f"{directory.name}-export", workers=1, require_tokenizer=False)
            assert_same_bits(read_all(models / f"{directory.name}-export"), read_all(models / f"{family}-expected"))
    # An evaluation takes it as it is.
    config = Config(model=ModelConfig(path=str(models / f"{DENSE}-weights"), tokenizer_path="elsewhere"))
    evaluated = with_exported_model(config, models / "evaluated", lambda text: None)
    assert evaluated.model.path == str(models / "evaluated") and evaluated.model.tokenizer_path == "elsewhere"
    assert_same_bits(read_all(models / "evaluated"), read_all(models / f"{DENSE}-expected"))
    assert with_exported_model(evaluated, models / "again", lambda text: None) is evaluated


def test_a_training_checkpoint_becomes_a_hugging_face_directory(saved: dict[str, Any], models: Path) -> None:
    from conversion.mcore_to_hf import export
    from tests.conversion.conftest import assert_same_bits, read_all

    for family in SAVED_BY:
        step = models / f"{family}-run" / "global_step_4"
        step.mkdir(parents=True)
        shutil.copytree(models / f"{family}-checkpoint", step / "learner")
        export(step, models / f"{family}-export", workers=1, require_tokenizer=False)
        exported = read_all(models / f"{family}-export")
        source = read_all(models / family)
        assert exported.keys() == source.keys()
        assert all(torch.isfinite(t).all() and not torch.equal(t, source[n]) for n, t in exported.items())
    learner_weights = run_ranks(_weights_of, 1, models / "weights", models)
    assert_same_bits(read_all(models / f"{EXPERTS}-export"), learner_weights)


def _weights_of(directory: Path) -> dict[str, torch.Tensor]:
    learner = _learner(1, {}, directory / EXPERTS, mcore_dir=directory / f"{EXPERTS}-checkpoint")
    weights = {name: tensor for bucket in learner.export_weights() for name, tensor in bucket}
    alone = _learner(1, {}, directory / EXPERTS, mcore_dir=directory / f"{EXPERTS}-weights")
    found = {name: tensor for bucket in alone.export_weights() for name, tensor in bucket}
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    return weights


def _failures(directory: Path) -> dict[str, str]:
    """World 2. What is said of every save and load that cannot be, on rank 0; the state after each failed save."""
    from conversion.files.checksums import DamagedError, read_marker
    from conversion.hf_to_mcore import convert
    from megatron_retool.learner.checkpoint.load import CheckpointError

    rank = torch.distributed.get_rank
    said: dict[str, str] = {}

    def expect(case: str, function: Any, *arguments: Any) -> None:
        try:
            function(*arguments)
        except (CheckpointError, DamagedError, SaveError) as error:
            said[case] = str(error)

    learner = _learner(2, {}, directory / DENSE)
    target = directory / "failures" / "learner"
    learner.save(target)
    before = _steps(learner, 1)
    weights_then = {n: t.clone() for b in learner.export_weights() for n, t in b}
    learner.load(target)

    real = shutil.disk_usage
    shutil.disk_usage = lambda path: shutil._ntuple_diskusage(10, 9, 1)
    expect("full before", learner.save, target)
    shutil.disk_usage = real

    # The disk fills up while rank 1 writes.
    if rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    expect("full while writing", learner.save, target)
    if rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    said["left behind"] = " ".join(sorted(path.name for path in target.parent.iterdir()))
    learner.load(target)
    after = _steps(learner, 1)
    said["old one intact"] = str(_distance(after, before) == 0 and bool(weights_then or rank()))

    learner.save(target)  # replaces the old one
    listed = read_marker(target)
    assert listed is not None
    said["without a checksum"] = " ".join(sorted({p.name for p in target.rglob("*")} - {Path(n).name for n in listed}))
    sound = (target / "__1_0.distcp").read_bytes()
    torch.distributed.barrier()
    if rank() == 0:
        (target / "__1_0.distcp").write_bytes(sound[:-9] + bytes([sound[-9] ^ 1]) + sound[-8:])
    torch.distributed.barrier()
    expect("flipped bit", learner.load, target)
    expect("flipped bit of the first weights", lambda: _learner(2, {}, directory / DENSE, mcore_dir=target))
    torch.distributed.barrier()
    if rank() == 0:
        (target / "__1_0.distcp").write_bytes(sound)
    expect("nothing there", learner.load, directory / "nowhere")
    torch.distributed.barrier()
    if rank() == 0:
        (target / "COMPLETE").unlink()
    torch.distributed.barrier()
    expect("incomplete", learner.load, target)
    torch.distributed.barrier()
    if rank() == 0:
        (target / "COMPLETE").touch()
        convert(directory / DENSE, directory / "converted", require_tokenizer=False, workers=1)
    torch.distributed.barrier()
    expect("weights alone", learner.load, directory / "converted")
    learner.save(directory / "alone", weights_only=True)
    expect("its own weights alone", learner.load, directory / "alone")
    plain = _learner(2, {"use_distributed_optimizer": False}, directory / DENSE)
    expect("other optimizer", plain.load, target)
    other = _learner(2, {EP: 2}, directory / EXPERTS)
    expect("other model", other.load, target)
    # The configuration's schedule holds, the checkpoint's step count too.
    slower = _learner(2, {}, directory / DENSE, {"lr": 1e-4, "warmup_steps": 0, "schedule": "constant"})
    slower.load(target)
    said["resumed with another schedule"] = f"{slower.learning_rate} {slower.scheduler.num_steps}"
    return said


def test_what_goes_wrong_is_said_and_harms_nothing(models: Path) -> None:
    said = run_ranks(_failures, 2, models / "failing", models)
    assert " free, and " in said["full before"] and "was not written; rank 0:" in said["full before"]
    assert "was not written" in said["full while writing"] and "File too large" in said["full while writing"]
    assert said["left behind"] == "learner"
    assert said["old one intact"] == "True"
    assert said["without a checksum"] == "COMPLETE hf"
    for case in ("flipped bit", "flipped bit of the first weights"):
        assert "__1_0.distcp is damaged: its " in said[case], case
    assert "nowhere has no COMPLETE marker" in said["nothing there"]
    assert "has no COMPLETE marker" in said["incomplete"]
    for case in ("weights alone", "its own weights alone"):
        assert "holds weights without optimizer state: give it as model.mcore_path" in said[case], case
    assert "was saved with learner.use_distributed_optimizer=True" in said["other optimizer"]
    assert "lacks decoder.layers" in said["other model"] and "it holds another model" in said["other model"]
    assert said["resumed with another schedule"] == "0.0001 1"
