"""Runs that take turns are what each is by itself; their files continue in any layout, and those of others are refused
by name."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_retool.config import Config, ConfigError, LearnerConfig, LoraConfig, ModelConfig, OptimizerConfig
from megatron_retool.parity.admission.layouts import CP, EP, ETP, PP, SP, TP
from megatron_retool.parity.ranks import run_ranks
from megatron_retool.target_sequences import OptimizerStep, RequestRefused, TokenOutputs
from tests.kit.adapter_reference import gather_factors, small_model
from tests.kit.target_reference import CROSS_ENTROPY, PAIRS, PPO, random_sequences, target_log_probs

SLOT = 4
RUNS = {"one": (4, 8.0, 3), "two": (4, 32.0, 5), "small": (2, 8.0, 3)}
"""Name of a run: its rank, alpha and seed."""
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one rank": ("qwen3", 1, {}),
    "one rank, bfloat16": ("qwen3", 1, {"dtype": "bfloat16"}),
    "tp2 sp": ("qwen3", 2, {TP: 2, SP: True}),
    "dp2": ("qwen3", 2, {}),
    "dp2, bfloat16": ("qwen3", 2, {"dtype": "bfloat16"}),
    "dp2, plain optimizer, bfloat16": ("qwen3", 2, {"use_distributed_optimizer": False, "dtype": "bfloat16"}),
    "dp2, overlap": ("qwen3", 2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "experts, ep2": ("qwen3_moe", 2, {EP: 2}),
}
OTHERS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "pp2": ("qwen3", 2, {PP: 2}),
    "cp2": ("qwen3", 2, {CP: 2}),
    "experts, tp2 sp etp1": ("qwen3_moe", 2, {TP: 2, SP: True, ETP: 1}),
}
FOUR: dict[str, tuple[str, int, dict[str, Any]]] = {
    "experts, ep2, dp2 of experts, bfloat16": ("qwen3_moe", 4, {EP: 2, "dtype": "bfloat16"}),
    "tp2 sp, dp2, overlap": (
        "qwen3",
        4,
        {TP: 2, SP: True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    ),
}


def _learner(world: int, layout: dict[str, Any], directory: Path, rank: int = SLOT, **lora: Any) -> Any:
    from megatron_retool.learner.learner import Learner

    section = LearnerConfig(
        world_size=world,
        max_tokens_per_micro_batch=112,
        lora=LoraConfig(rank=rank, **lora),
        **{"dtype": "float32", **layout},
    )
    config = Config(model=ModelConfig(path=str(directory)), learner=section)
    return Learner(config, optimizer=OptimizerConfig(lr=1e-3), total_optimizer_steps=9, hf_dir=directory)


def _runs(learner: Any) -> Any:
    from megatron_retool.learner.adapter_runs import AdapterRuns

    return AdapterRuns(learner)


def _of(call: Callable[..., Any], name: str, number: int) -> list[np.ndarray]:
    """One call of a run's life, each run with data of its own; what it answers."""
    seed = 10 * list(RUNS).index(name) + number
    if number in (2, 5):
        return [np.array(call("apply", OptimizerStep(1e-2, eps=1e-6, grad_clip_norm=0.5))["grad_norm"])]
    loss, only = (PPO, False) if number in (1, 4) else (CROSS_ENTROPY, number == 3)
    found: TokenOutputs = call("accumulate", random_sequences(PAIRS[: 2 + number % 3], seed), loss, forward_only=only)
    return found.log_probs


CALLS = range(7)


def _alone(world: int, layout: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Every run in a learner that begins as the run does: what it answers, and its factors."""
    found = {}
    for name, (rank, alpha, seed) in RUNS.items():
        learner = _learner(world, layout, directory, rank, alpha=alpha, seed=seed)

        def call(method: str, *args: Any, learner: Any = learner, **options: Any) -> Any:
            return getattr(learner, method)(*args, **options)

        answers = [_of(call, name, number) for number in CALLS]
        learner.export_weights()
        found[name] = {"answers": answers, "factors": gather_factors(learner.model_chunks)}
    return found


def _cut(factors: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    for name, factor in factors.items():
        beyond = factor[rank:] if ".lora_A." in name else factor[:, rank:]
        assert not beyond.any(), "what is beyond a run's rank stays zero"
    return {name: factor[:rank] if ".lora_A." in name else factor[:, :rank] for name, factor in factors.items()}


def _interleaved(world: int, layout: dict[str, Any], directory: Path) -> dict[str, Any]:
    runs = _runs(_learner(world, layout, directory))
    found: dict[str, Any] = {name: {"answers": []} for name in RUNS}
    for name, (rank, alpha, seed) in RUNS.items():
        runs.create_run(name, rank=rank, alpha=alpha, seed=seed)
    runs.create_run("gone", rank=1, alpha=1.0, seed=0)
    runs.accumulate("gone", random_sequences(PAIRS, 0), CROSS_ENTROPY)
    runs.delete_run("gone")
    for number in CALLS:
        for name in RUNS:

            def call(method: str, *args: Any, name: str = name, **options: Any) -> Any:
                return getattr(runs, method)(name, *args, **options)

            found[name]["answers"].append(_of(call, name, number))
    for name, (rank, _, _) in RUNS.items():
        runs.activate(name)
        runs.learner.export_weights()
        found[name]["factors"] = _cut(gather_factors(runs.learner.model_chunks), rank)
    return found


def _both(world: int, directory: Path, names: list[str]) -> dict[str, Any]:
    made = {}
    for name in names:
        family, _, layout = {**LAYOUTS, **FOUR}[name]
        made[name] = (_alone(world, layout, directory / family), _interleaved(world, layout, directory / family))
    return made


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    for family in ("qwen3", "qwen3_moe"):
        small_model(family).save_pretrained(directory / family)
    return directory


@pytest.fixture(scope="module")
def taken_turns(models: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for world in (1, 2):
        names = [name for name, (_, size, _) in LAYOUTS.items() if size == world]
        found |= run_ranks(_both, world, models / f"turns{world}", world, models, names)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_that_take_turns_are_what_each_is_by_itself(taken_turns: dict[str, Any], layout: str) -> None:
    _assert_each_by_itself(layout, *taken_turns[layout])


def _assert_each_by_itself(layout: str, alone: dict[str, Any], together: dict[str, Any]) -> None:
    assert alone.keys() == together.keys() == RUNS.keys()
    for name, (rank, _, _) in RUNS.items():
        expected, found = alone[name], together[name]
        # A smaller rank is exact but for the rounding of products of another shape.
        bar = 0.0 if rank == SLOT else 2e-2 if "bfloat16" in layout else 1e-5
        for mine, theirs in zip(found["answers"], expected["answers"], strict=True):
            for one, other in zip(mine, theirs, strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=bar)
        for key, factor in expected["factors"].items():
            torch.testing.assert_close(found["factors"][key], factor, rtol=0, atol=bar)
    assert not np.array_equal(together["one"]["answers"][-1][0], together["one"]["answers"][0][0])


def _begin(runs: Any, name: str = "small", number: int = 0) -> None:
    rank, alpha, seed = RUNS[name]
    runs.create_run(name, rank=rank, alpha=alpha, seed=seed)
    for step in range(number):
        _advance(runs, name, step)


def _advance(runs: Any, name: str, number: int) -> float:
    loss = runs.accumulate(name, random_sequences(PAIRS, 50 + number), CROSS_ENTROPY).metrics["loss"]
    runs.apply(name, OptimizerStep(3e-3, eps=1e-6, weight_decay=0.1))
    return float(loss)


def _next(runs: Any, name: str = "small") -> dict[str, Any]:
    losses = [_advance(runs, name, number) for number in (3, 4, 5)]
    runs.activate(name)
    runs.learner.export_weights()
    return {"losses": losses, "factors": _cut(gather_factors(runs.learner.model_chunks), RUNS[name][0])}


def _save(world: int, directory: Path, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        family, _, layout = {**LAYOUTS, **FOUR}[name]
        runs = _runs(_learner(world, layout, directory / family))
        _begin(runs, "one", 1)
        _begin(runs, "small", 3)
        place = directory / "saved" / name
        runs.accumulate("one", random_sequences(PAIRS, 1), CROSS_ENTROPY)
        runs.save_run("one", place / "with gradients", with_optimizer=True)
        pending = runs.apply("one", OptimizerStep(1e-3))["grad_norm"]
        runs.save_run("small", place / "run", with_optimizer=True)
        runs.save_run("small", place / "weights", with_optimizer=False)
        runs.write_adapter("small", place / "adapter")
        runs.write_adapter("small", place / "adapter")  # replaces what is there
        read = runs.accumulate("small", random_sequences(PAIRS, 9), CROSS_ENTROPY, forward_only=True).log_probs
        found[name] = {"next": _next(runs), "log_probs": read, "pending": pending}
        # In the same layout, into a run that has gone elsewhere, twice.
        for _ in range(2):
            runs.load_run("small", place / "run", with_optimizer=True)
            found[name].setdefault("again", []).append(_next(runs))
        runs.load_run("small", place / "weights", with_optimizer=False)
        found[name]["weights"] = _next(runs)
    return found


def _load(world: int, directory: Path, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        family, _, layout = {**LAYOUTS, **OTHERS}[name]
        for saved in (
            other for other, (kind, _, settings) in LAYOUTS.items() if kind == family and not settings.get("dtype")
        ):
            runs = _runs(_learner(world, layout, directory / family, rank=3))
            _begin(runs, "small", 1)
            runs.load_run("small", directory / "saved" / saved / "run", with_optimizer=True)
            found.setdefault(name, {})[saved] = _next(runs)
    return found


@pytest.fixture(scope="module")
def saved(models: Path) -> dict[str, Any]:
    (models / "saved").mkdir(exist_ok=True)
    found: dict[str, Any] = {}
    for world in (1, 2):
        names = [name for name, (_, size, _) in LAYOUTS.items() if size == world]
        found |= run_ranks(_save, world, models / f"save{world}", world, models, names)
    return found


def _assert_equal(found: dict[str, Any], expected: dict[str, Any], bar: float) -> None:
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=bar, atol=0)
    assert found["factors"].keys() == expected["factors"].keys()
    for name, factor in expected["factors"].items():
        torch.testing.assert_close(found["factors"][name], factor, rtol=0, atol=bar, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_goes_on_from_its_files_as_often_as_they_are_loaded(saved: dict[str, Any], layout: str) -> None:
    _assert_goes_on(saved[layout])


def _assert_goes_on(found: dict[str, Any]) -> None:
    for again in found["again"]:
        _assert_equal(again, found["next"], 0.0)
    assert found["weights"]["losses"][0] == found["next"]["losses"][0]
    assert found["weights"]["losses"][2] != found["next"]["losses"][2], "the moments begin anew"
    assert found["pending"] > 0


@pytest.mark.slow
def test_runs_take_turns_and_go_on_from_files_on_four_ranks(models: Path) -> None:
    for layout, both in run_ranks(_both, 4, models / "turns4", 4, models, list(FOUR)).items():
        _assert_each_by_itself(layout, *both)
    (models / "saved").mkdir(exist_ok=True)
    for found in run_ranks(_save, 4, models / "save4", 4, models, list(FOUR)).values():
        _assert_goes_on(found)


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout_and_among_adapters_of_another_rank(
    saved: dict[str, Any], models: Path
) -> None:
    names = [*OTHERS, "tp2 sp", "dp2", "experts, ep2"]
    for name, by_layout in run_ranks(_load, 2, models / "load", 2, models, names).items():
        assert by_layout
        for other, found in by_layout.items():
            _assert_equal(found, saved[other]["next"], 2e-6)
            assert name


def test_peft_loads_what_a_run_has_learned(saved: dict[str, Any], models: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    directory = models / "saved" / "tp2 sp" / "adapter"
    assert {path.name for path in directory.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((directory / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == RUNS["small"][:2]
    base = AutoModelForCausalLM.from_pretrained(models / "qwen3", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, directory).eval()
    with torch.no_grad():
        for sequence, found in zip(random_sequences(PAIRS, 9), saved["tp2 sp"]["log_probs"], strict=True):
            np.testing.assert_allclose(target_log_probs(adapted, sequence).numpy(), found, rtol=0, atol=1e-5)


def _half(learner: Any) -> Any:
    """A learner as it were in float16, which needs a GPU."""
    section = dataclasses.replace(learner.config.learner, dtype="float16")
    learner.config = dataclasses.replace(learner.config, learner=section)
    return learner


def _refusals(directory: Path) -> dict[str, str]:
    good = directory / "saved" / "one rank" / "run"
    runs = _runs(_learner(1, {}, directory / "qwen3"))
    _begin(runs, "one", 1)
    _begin(runs, "small", 2)

    def changed(name: str, change: Callable[[Path], None]) -> Path:
        place = directory / "changed" / name
        shutil.copytree(good, place)
        change(place)
        return place

    def config(**values: Any) -> Callable[[Path], None]:
        def change(place: Path) -> None:
            path = place / "adapter_config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

        return change

    def tensors(change: Callable[[Any], Any], file: str = "adapter_model") -> Callable[[Path], None]:
        def write(place: Path) -> None:
            path = place / f"{file}.safetensors"
            found = load_file(path)
            change(found)
            save_file(found, path, metadata={"format": "pt", "step": "3"})

        return write

    first = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"

    def pickled(place: Path) -> None:
        (place / "adapter_model.safetensors").rename(place / "adapter_model.bin")

    def damaged(place: Path) -> None:
        (place / "adapter_model.safetensors").write_bytes(b"\xff" * 100)

    def record(place: Path) -> None:
        path = place / "adapters.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "base_checksum": "other"}))

    files = {
        "no such": directory / "nowhere",
        "rank": good.parent / "with gradients",
        "alpha": changed("alpha", config(lora_alpha=4)),
        "text": changed("text", config(r="2")),
        "dora": changed("dora", config(use_dora=True)),
        "kind": changed("kind", config(peft_type="IA3")),
        "pickled": changed("pickled", pickled),
        "damaged": changed("damaged", damaged),
        "targets": changed("targets", tensors(lambda found: found.pop(first))),
        "more": changed(
            "more",
            tensors(lambda found: found.update({"base_model.model.lm_head.lora_A.weight": found[first].clone()})),
        ),
        "shape": changed("shape", tensors(lambda found: found.update({first: found[first][:, 1:].clone()}))),
        "nan": changed("nan", tensors(lambda found: found[first].fill_(float("nan")))),
        "base": changed("base", record),
        "optimizer": good.parent / "weights",
        "moments": changed("moments", tensors(lambda found: found.popitem(), "optimizer")),
    }
    cases: dict[str, Callable[[], Any]] = {
        **{
            name: lambda place=place: runs.load_run("small", place, with_optimizer=True)
            for name, place in files.items()
        },
        "unknown": lambda: runs.apply("never", OptimizerStep(1e-3)),
        "twice": lambda: runs.create_run("one", rank=1, alpha=1.0, seed=0),
        "large": lambda: runs.create_run("large", rank=5, alpha=1.0, seed=0),
        "negative": lambda: runs.create_run("negative", rank=1, alpha=-1.0, seed=0),
        "seed": lambda: runs.create_run("seed", rank=1, alpha=1.0, seed=-1),
    }
    said = {}
    for name, call in cases.items():
        with pytest.raises(RequestRefused) as refused:
            call()
        said[name] = str(refused.value)
    _advance(runs, "small", 2)
    found = _next(runs)
    runs.save_run("small", directory / "changed" / "last", with_optimizer=True)
    with pytest.raises(ConfigError) as wrong:
        _runs(_half(_learner(1, {}, directory / "qwen3")))
    with pytest.raises(ConfigError) as none:
        _runs(_learner(1, {}, directory / "qwen3", rank=0))
    return {**said, "float16": str(wrong.value), "all weights": str(none.value), "next": found}


def test_what_is_no_file_of_the_run_is_refused_by_name_and_changes_nothing(saved: dict[str, Any], models: Path) -> None:
    said = run_ranks(_refusals, 1, models / "refusals", models)
    _assert_equal(said.pop("next"), saved["one rank"]["next"], 0.0)
    assert "nowhere has no adapter_config.json" in said["no such"]
    assert "has rank 4, and the run has 2: create the run with rank=4" in said["rank"]
    assert "has alpha 4, and the run has 8: create the run with alpha=4" in said["alpha"]
    assert "adapter_config.json: r='2': give a number" in said["text"]
    assert "use_dora=True: the learner's adapters are plain LoRA" in said["dora"]
    assert "peft_type='IA3': only LORA is read" in said["kind"]
    assert "adapter_model.bin is pickled and not read: save the adapter with peft again" in said["pickled"]
    assert "adapter_model.safetensors is damaged" in said["damaged"]
    assert "lacks 'base_model.model.model.layers.0.mlp.down_proj.lora_A.weight'" in said["targets"]
    assert "also has 'base_model.model.lm_head.lora_A.weight'" in said["more"]
    assert "it is of another base model" in said["shape"]
    assert "holds a number that is not finite" in said["nan"]
    assert "load it into a learner of the same model" in said["base"]
    assert "has no optimizer.safetensors: load it without the optimizer" in said["optimizer"]
    assert "optimizer.safetensors is not of this run's adapter" in said["moments"]
    assert "run 'never': there is no such run" in said["unknown"]
    assert "run 'one': there is one already" in said["twice"]
    assert "rank=5: this learner has ranks of 1 to learner.lora.rank=4" in said["large"]
    assert "alpha=-1.0: give a number above 0" in said["negative"] and "seed=-1" in said["seed"]
    assert "learner.dtype=float16 does not go with several runs" in said["float16"]
    assert "learner.lora.rank=0: runs on one base model train adapters" in said["all weights"]
