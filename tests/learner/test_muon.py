"""Muon is that of the published formula on whole matrices, in every layout, and resumes from checkpoints of others."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from conversion.model.architecture import Architecture
from megatron_retool.config import Config, ConfigError, LearnerConfig, OptimizerConfig, load_config
from megatron_retool.learner.performance import check_performance
from megatron_retool.learner.precision import Acceleration
from megatron_retool.parity.admission.layouts import cases as layout_cases
from megatron_retool.parity.admission.layouts import learner_config
from megatron_retool.parity.admission.shrink import shrunk
from megatron_retool.parity.admission.tiny_model import random_batch, random_model, save_model
from megatron_retool.parity.ranks import run_ranks
from megatron_retool.planning.memory import checkpoint_bytes, state_bytes
from megatron_retool.planning.models import MODELS

LENGTHS = [(5, 30), (9, 3), (4, 22), (13, 41), (6, 1), (8, 17)]
OPTIMIZER = OptimizerConfig(
    name="muon", muon_momentum=0.9, lr=2e-3, weight_decay=0.1, clip_grad=0.5, betas=[0.9, 0.95], eps=1e-6
)
# Each with another kind of matrix: heads that share keys, experts beside dense layers, latents, delta nets and gates.
PUBLISHED = {
    "dense": "qwen2.5-0.5b",
    "experts": "glm-4.5",
    "latents": "deepseek-v3",
    "delta nets": "qwen3-next-80b-a3b",
}
LAYOUTS = {
    "dense": ("one process", "tp2", "dp2", "pp4 vpp2", "tp2 sp cp2"),
    "experts": ("one process", "ep2 tp2", "tp2 sp etp1", "ep2 etp2 dp2", "ep2 pp2"),
    "latents": ("one process", "tp2 sp"),
    "delta nets": ("one process", "tp2 sp"),
}
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
BY_ADAMW = re.compile(r"embed_tokens|lm_head|norm|bias|\.mlp\.gate\.|shared_expert_gate|conv1d|dt_bias|A_log")


def orthogonalised(matrix: Tensor) -> Tensor:
    """Five steps of Keller Jordan's iteration, on the side with fewer rows."""
    wide = matrix.mT if matrix.size(0) > matrix.size(1) else matrix
    wide = wide / (wide.norm() + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.mT if matrix.size(0) > matrix.size(1) else wide


def matrices(weights: dict[str, Tensor], groups: int) -> list[list[tuple[str, Tensor]]]:
    """(name, its rows) of what Muon takes as one matrix: gate over up is one, and so are all rows of a delta net;
    queries and their gates, which lie head by head in one tensor, are two."""
    found: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in weights.items():
        if BY_ADAMW.search(name):
            continue
        rows = torch.arange(len(tensor))
        if re.search(r"\.(gate|up)_proj\.", name):
            found.setdefault(re.sub(r"\.(gate|up)_proj\.", ".gate_up.", name), []).append((name, rows))
        elif ".in_proj_" in name:
            found.setdefault(re.sub(r"in_proj_\w+", "in_proj", name), []).append((name, rows))
        elif groups and ".q_proj." in name:
            queries, gates = rows.view(-1, 2, tensor.size(0) // (2 * groups)).unbind(1)
            found[f"{name} queries"] = [(name, queries.flatten())]
            found[f"{name} gates"] = [(name, gates.flatten())]
        else:
            found[name] = [(name, rows)]
    return list(found.values())


class PlainMuon:
    """The formula on whole matrices under Hugging Face names, in float64."""

    def __init__(self, weights: dict[str, Tensor], gated_heads: int) -> None:
        self.weights = {name: tensor.double() for name, tensor in weights.items()}
        self.means = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        self.squares = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        self.matrices = matrices(weights, gated_heads)
        self.steps = 0

    def step(self, gradients: dict[str, Tensor]) -> None:
        self.steps += 1
        gradients = {name: tensor.double() for name, tensor in gradients.items()}
        norm = torch.stack([tensor.norm() for tensor in gradients.values()]).norm()
        clip = min(1.0, OPTIMIZER.clip_grad / (float(norm) + 1e-6))
        gradients = {name: tensor * clip for name, tensor in gradients.items()}
        decay = 1 - OPTIMIZER.lr * OPTIMIZER.weight_decay
        for parts in self.matrices:
            update = torch.cat([self._nesterov(name, gradients[name])[rows] for name, rows in parts])
            update = 0.2 * max(update.shape) ** 0.5 * orthogonalised(update)
            for (name, rows), part in zip(parts, update.split([len(rows) for _, rows in parts]), strict=True):
                self.weights[name][rows] = self.weights[name][rows] * decay - OPTIMIZER.lr * part
        by_muon = {name for parts in self.matrices for name, _ in parts}
        for name in by_muon:
            self.means[name] = self._mean(name, gradients[name], OPTIMIZER.muon_momentum)
        for name in gradients.keys() - by_muon:
            self._adamw(name, gradients[name], decay)

    def _mean(self, name: str, gradient: Tensor, rate: float) -> Tensor:
        return rate * self.means[name] + (1 - rate) * gradient

    def _nesterov(self, name: str, gradient: Tensor) -> Tensor:
        rate = OPTIMIZER.muon_momentum
        return rate * self._mean(name, gradient, rate) + (1 - rate) * gradient

    def _adamw(self, name: str, gradient: Tensor, decay: float) -> None:
        first, second = OPTIMIZER.betas
        self.means[name] = self._mean(name, gradient, first)
        self.squares[name] = second * self.squares[name] + (1 - second) * gradient**2
        mean = self.means[name] / (1 - first**self.steps)
        root = (self.squares[name] / (1 - second**self.steps)).sqrt()
        if gradient.dim() == 1 or name.endswith("bias"):
            decay = 1.0
        self.weights[name] = self.weights[name] * decay - OPTIMIZER.lr * mean / (root + OPTIMIZER.eps)


def build(hf_dir: Path, learner: LearnerConfig, optimizer: OptimizerConfig = OPTIMIZER) -> Any:
    from megatron_retool.learner.learner import Learner

    learner = replace(learner, use_distributed_optimizer=False)
    return Learner(Config(learner=learner), optimizer=optimizer, total_optimizer_steps=9, hf_dir=hf_dir)


def update(learner: Any, seed: int) -> tuple[dict[str, Tensor], float]:
    """One update; the gradients before it (on rank 0), and their norm."""
    from megatron_retool.learner.weights import gradients_by_hf_name

    step, gradients = learner._step, {}

    def step_after_a_look() -> Any:
        gradients.update(gradients_by_hf_name(learner.model_chunks, learner.architecture))
        return step()

    learner._step = step_after_a_look
    norm = learner.sft_update(random_batch(LENGTHS, seed=seed))["grad_norm"]
    learner._step = step
    return gradients, norm


def exported(learner: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for bucket in learner.export_weights() for name, tensor in bucket}


SAVED_BY = "ep2 pp2"
RESUMED_BY = ("one process", "ep2 tp2", SAVED_BY)
ADAMW = replace(OPTIMIZER, name="adamw")


def resume(hf_dir: Path, world: int, directory: Path) -> dict[tuple[str, str], Any]:
    """The second update, after a load of what ``SAVED_BY`` saved after the first; with it, that without a load."""
    found: dict[tuple[str, str], Any] = {}
    for optimizer in (OPTIMIZER, ADAMW):
        saved = directory / optimizer.name
        for case in layout_cases(Architecture.from_pretrained(hf_dir), RESUMED_BY):
            if case.world != world:
                continue
            if case.name == SAVED_BY:
                learner = build(hf_dir, learner_config(case), optimizer)
                update(learner, 1)
                learner.save(saved)
                update(learner, 2)
                found[optimizer.name, "without a load"] = exported(learner)
            learner = build(hf_dir, learner_config(case), optimizer)
            update(learner, 7)  # a learner that has moved elsewhere forgets it
            learner.load(saved)
            update(learner, 2)
            found[optimizer.name, case.name] = exported(learner)
    return found


def learn(hf_dirs: dict[str, Path], world: int) -> dict[tuple[str, str], Any]:
    """Two updates in every layout of ``world`` processes; of one process also what the formula makes of them."""
    found: dict[tuple[str, str], Any] = {}
    for family, hf_dir in hf_dirs.items():
        architecture = Architecture.from_pretrained(hf_dir)
        for case in layout_cases(architecture, LAYOUTS[family]):
            if case.world != world:
                continue
            assert not case.inapplicable, (family, case.name, case.inapplicable)
            learner = build(hf_dir, learner_config(case))
            plain = PlainMuon(exported(learner), architecture.num_attention_heads if architecture.attention_gate else 0)
            norms = []
            for seed in (1, 2):
                gradients, norm = update(learner, seed)
                norms.append(norm)
                if world == 1:
                    plain.step(gradients)
            found[family, case.name] = (exported(learner), norms)
            if world == 1:
                found[family, "formula"] = plain.weights
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("muon")
    found = {}
    for family, published in PUBLISHED.items():
        config = shrunk(MODELS[published], 8 if family == "dense" else 4)
        found[family] = save_model(random_model(config), directory / family.replace(" ", "_"), config)
    return found


@pytest.fixture(scope="module")
def found(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    directory = tmp_path_factory.mktemp("ranks")
    answers: dict[tuple[str, str], Any] = {}
    for world in (1, 2, 4):
        answers |= run_ranks(learn, world, directory / str(world), models, world)
    return answers


@pytest.mark.parametrize(("family", "layout"), [(f, layout) for f, names in LAYOUTS.items() for layout in names])
def test_a_step_is_that_of_the_formula_on_whole_matrices(found: Any, family: str, layout: str) -> None:
    weights, norms = found[family, layout]
    formula = found[family, "formula"]
    buffers = {name for name in weights if name.endswith("e_score_correction_bias")}
    assert weights.keys() - buffers == {name for name in formula if name not in buffers}
    assert norms == pytest.approx(found[family, "one process"][1], rel=1e-4)
    off = {name: float((weights[name] - formula[name]).abs().max()) for name in weights.keys() - buffers}
    assert max(off.values()) < 1e-5, sorted(off.items(), key=lambda item: -item[1])[:5]


@pytest.fixture(scope="module")
def resumed(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    directory = tmp_path_factory.mktemp("resumed")
    answers: dict[tuple[str, str], Any] = {}
    for world in (4, 2, 1):
        answers |= run_ranks(resume, world, directory / str(world), models["experts"], world, directory)
    return answers


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("layout", RESUMED_BY)
def test_it_goes_on_from_the_checkpoint_of_another_layout(resumed: Any, optimizer: str, layout: str) -> None:
    expected = resumed[optimizer, "without a load"]
    off = {name: float((resumed[optimizer, layout][name] - tensor).abs().max()) for name, tensor in expected.items()}
    assert max(off.values()) <= (0.0 if layout == SAVED_BY else 1e-5), max(off, key=off.__getitem__)


def test_in_bfloat16_its_main_parameters_and_means_are_saved(models: dict[str, Path], tmp_path: Path) -> None:
    from megatron_retool.learner.checkpoint.load import CheckpointError

    settings = LearnerConfig(dtype="bfloat16", max_tokens_per_micro_batch=112)
    learner = build(models["dense"], settings)
    update(learner, 1)
    learner.save(tmp_path / "muon")
    stored = FileSystemReader(tmp_path / "muon").read_metadata().state_dict_metadata.values()
    tensors = (entry for entry in stored if isinstance(entry, TensorStorageMetadata))
    written = sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in tensors)
    assert written == checkpoint_bytes(learner.architecture, optimizer="muon")
    update(learner, 2)
    again = build(models["dense"], settings)
    again.load(tmp_path / "muon")
    update(again, 2)
    assert all(torch.equal(tensor, exported(again)[name]) for name, tensor in exported(learner).items())
    with pytest.raises(CheckpointError, match=r"saved with optimizer.name=muon, whose state adamw cannot resume from"):
        build(models["dense"], settings, ADAMW).load(tmp_path / "muon")


@pytest.mark.parametrize("optimizer", [OPTIMIZER, ADAMW], ids=["muon", "adamw"])
def test_a_checkpoint_before_the_first_update_is_one(
    models: dict[str, Path], optimizer: OptimizerConfig, tmp_path: Path
) -> None:
    """Also where the first update was left out: there are no moments yet."""
    settings = LearnerConfig(dtype="bfloat16", max_tokens_per_micro_batch=112)
    skipping = build(models["dense"], settings, replace(optimizer, skip_grad_norm=1e-9))
    update(skipping, 1)
    skipping.save(tmp_path / "first")
    loaded, fresh = (build(models["dense"], settings, optimizer) for _ in range(2))
    update(loaded, 7)
    loaded.load(tmp_path / "first")
    skipping.reset_optimizer(optimizer, 9)
    for learner in (loaded, fresh):
        update(learner, 2)
    assert all(torch.equal(tensor, exported(loaded)[name]) for name, tensor in exported(fresh).items())


def test_its_state_leaves_the_device_and_comes_back(models: dict[str, Path]) -> None:
    from megatron_retool.learner.offload import HostOffload

    settings = LearnerConfig(dtype="bfloat16", max_tokens_per_micro_batch=112)
    moved, still = (build(models["dense"], settings) for _ in range(2))
    offload = HostOffload(moved)
    for seed in (1, 2):
        for learner in (moved, still):
            update(learner, seed)
        planned = state_bytes(moved.architecture, moved.layout, 0, "bfloat16", False, optimizer="muon").optimizer
        counts = 4 * sum(len(part.optimizer.state) for part in moved.optimizer.chained_optimizers[1:])
        assert offload.offload("optimizer") == planned + counts
        offload.reload("optimizer")
    assert all(torch.equal(tensor, exported(moved)[name]) for name, tensor in exported(still).items())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "learner.optimizer.name=muon needs learner.use_distributed_optimizer=false"),
        (["learner.dtype=float16"], "learner.optimizer.name=muon needs learner.use_distributed_optimizer=false"),
        (["learner.use_distributed_optimizer=false", "learner.dtype=float16"], "needs learner.dtype=bfloat16 or"),
        (["learner.optimizer.cpu_offload=true"], "learner.optimizer.cpu_offload=true is only for AdamW"),
        (["learner.optimizer.name=adamw", "learner.critic.optimizer.name=muon"], "learner.critic.optimizer.name=muon"),
        (["learner.optimizer.name=adamw", "sft.stages=[{optimizer: {name: muon}}]"], "sft.stages.0..optimizer.name"),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, ["learner.optimizer.name=muon", *overrides])


def test_ranks_that_share_a_key_head_are_refused(models: dict[str, Path]) -> None:
    architecture = Architecture.from_pretrained(models["dense"])
    learner = LearnerConfig(world_size=4, tensor_model_parallel_size=4, use_distributed_optimizer=False)
    layout = learner.layout(architecture)
    assert architecture.num_query_groups == 2
    with pytest.raises(ConfigError, match=r"optimizer.name=muon does not go with learner.tensor_model_parallel_size=4"):
        check_performance(learner, OPTIMIZER, architecture, layout, Acceleration(cuda=False))
    check_performance(learner, ADAMW, architecture, layout, Acceleration(cuda=False))
    with pytest.raises(ConfigError, match=r"^learner.optimizer.name=muon does not go with learner.tensor_model_para"):
        replace(learner, optimizer=OPTIMIZER).layout(architecture)
