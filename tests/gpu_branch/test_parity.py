"""The learner's GPU branch computes what transformers computes, and mixes no devices on the way.

As ``tests/parity`` does on the host: log-probs, entropy, loss, every gradient, their norm, and weights after an
update; replayed experts, common prefixes, recomputation. Once on Transformer Engine's layers and optimizer, once on
Megatron-Core's local layers and torch's, which a GPU has without it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from conversion.hf_to_mcore import convert
from conversion.model.architecture import Architecture
from megatron_retool.parity.admission.comparison import (
    compare,
    load_checkpoint,
    save_checkpoint,
    too_far,
    write_reference,
)
from megatron_retool.parity.admission.layouts import Case, cases
from megatron_retool.parity.admission.requests import Request, shrunk_config
from megatron_retool.parity.admission.tiny_model import converted, random_model, save_model
from megatron_retool.planning.models import MODELS, model_of_each_family, preset
from tests.gpu_branch import device_kernels
from tests.gpu_branch.conftest import Run
from tests.gpu_branch.fake_device import recorded
from tests.gpu_branch.test_compiled_kernels import COMPILED

Cases = dict[str, tuple[str, ...]]
"""Layouts by family."""

DENSE = ("gemma3_text", "llama", "ministral3", "mistral", "olmo3", "qwen2")
EXPERTS = ("glm4_moe", "minimax_m2")
ONE = dict.fromkeys((*DENSE, *EXPERTS), ("one process",)) | {
    "qwen3": ("one process", "unpacked", "recompute", "shared prefixes"),
    "qwen3_moe": ("one process", "unpacked, recompute", "shared prefixes"),
    # Their attention is the learner's own.
    "deepseek_v3": ("one process", "recompute", "shared prefixes"),
    "gpt_oss": ("one process",),
    "qwen3_next": ("one process",),
}
TWO = {
    "qwen3": ("tp2", "tp2 sp", "pp2", "cp2", "dp2", "dp2, plain optimizer", "tp2 sp, shared prefixes"),
    "qwen3_moe": ("pp2", "cp2, dynamic", "ep2", "ep2 tp2"),
    "gemma3_text": ("tp2 sp", "cp2"),
    "mistral": ("cp2",),
    "olmo2": ("tp2 sp", "cp2"),
    "glm4_moe": ("ep2 tp2",),
    "deepseek_v3": ("pp2", "ep2 tp2"),
    "gpt_oss": ("cp2", "ep2 tp2"),
    "qwen3_next": ("tp2 sp", "cp2"),
}
LOCAL_ONE = {
    "qwen3": ("one process", "shared prefixes"),
    "qwen3_moe": ("one process",),
    "mistral": ("one process",),
    "deepseek_v3": ("one process",),
    "deepseek_v32": ("one process",),
    "gpt_oss": ("one process",),
    "qwen3_next": ("one process",),
}
LOCAL_TWO = {
    "mistral": ("cp2",),
    "deepseek_v3": ("tp2 sp", "cp2"),
    "glm_moe_dsa": ("tp2 sp", "cp2"),
    "qwen3_next": ("tp2 sp", "cp2"),
}
BY_WORLD = [
    (True, 1, ONE),
    (True, 2, TWO),
    (False, 1, LOCAL_ONE),
    pytest.param(False, 2, LOCAL_TWO, marks=pytest.mark.rare),
]


def _layers(family: str) -> int:
    return 4 if family == "gemma3_text" else 2  # its windows come in a pattern


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``make(family)``: the directory of a shrunk published model, with what transformers makes of it."""
    directory = tmp_path_factory.mktemp("parity")

    def make(family: str, layers: int) -> Path:
        place = directory / f"{family}-{layers}"
        if not place.is_dir():
            name = model_of_each_family()[family]
            model = random_model(shrunk_config(Request(name, MODELS[name], layers=layers)))
            save_model(model, place)
            write_reference(model, Architecture.from_pretrained(place), place)
        return place

    return make


def _compare(directories: dict[str, Path], layouts: Cases) -> dict[tuple[str, str], Any]:
    """What is too far from transformers, where a rank mixed devices, and what torch.compile would compile that
    ``test_compiled_kernels`` does not."""
    found = {}
    for family, names in layouts.items():
        for case in cases(Architecture.from_pretrained(directories[family]), names):
            assert not case.inapplicable, (family, case)
            with recorded() as record:
                figures = compare(case, directories[family])
            seen: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(seen, ([str(event) for event in record.mixed], list(record.compiled)))
            mixed, compiled = ({each for rank in seen for each in rank[kind]} for kind in (0, 1))
            found[family, case.name] = too_far(figures), sorted(mixed), sorted(compiled - COMPILED)
    return found


def _hold(references: Any, on_gpus: Run, engine: bool, world: int, layouts: Cases, layers: int | None = None) -> None:
    directories = {family: references(family, layers or _layers(family)) for family in layouts}
    found = on_gpus(_compare, directories, layouts, engine=engine, world=world)
    assert found.keys() == {(family, name) for family, names in layouts.items() for name in names}
    assert {case: answer for case, answer in found.items() if answer != ({}, [], [])} == {}


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "world", "layouts"), BY_WORLD)
def test_equals_transformers(engine: bool, world: int, layouts: Cases, references: Any, on_gpus: Run) -> None:
    _hold(references, on_gpus, engine, world, layouts)


@pytest.mark.rare
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", [True, False])
def test_every_other_family_equals_transformers(engine: bool, references: Any, on_gpus: Run) -> None:
    """Those that ``test_equals_transformers`` leaves out; without the engine those that need local layers."""
    names = model_of_each_family()
    local = {family for family, name in names.items() if preset(name).needs_packed_attention()}
    families = names.keys() - ONE.keys() if engine else local - LOCAL_ONE.keys()
    _hold(references, on_gpus, engine, 1, dict.fromkeys(sorted(families), ("one process",)))


@pytest.mark.rare
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_four_processes_equal_transformers(family: str, references: Any, on_gpus: Run) -> None:
    directory = references(family, 8)
    of_four = [case for case in cases(Architecture.from_pretrained(directory)) if case.world == 4]
    # What experts do not take part in, the dense family shows.
    names = tuple(
        case.name
        for case in of_four
        if not case.inapplicable and (family == "qwen3" or "expert_model_parallel_size" in case.settings)
    )
    _hold(references, on_gpus, True, 4, {family: names}, 8)


def _compare_exact(directory: Path) -> tuple[Any, list[str]]:
    device_kernels.install_exact()
    with recorded() as record:
        figures = compare(Case("exact", 1, {"match_engine": "exact"}), directory)
    return too_far(figures), [str(event) for event in record.mixed]


@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        "qwen3_moe",
        "glm4_moe",
        pytest.param("granitemoe", marks=pytest.mark.rare),
        "olmo3",
        pytest.param("gemma3_text", marks=pytest.mark.rare),
        pytest.param("ministral3", marks=pytest.mark.rare),
        "deepseek_v3",
        "qwen3_next",
        "granitemoehybrid",
    ],
)
def test_exact_layers_equal_transformers(family: str, references: Any, on_gpus: Run) -> None:
    for engine in (False, True):
        assert on_gpus(_compare_exact, references(family, 2), engine=engine) == ({}, [])


def _save_or_load(function: Callable[..., Any], directory: Path, layout: str) -> tuple[Any, list[str]]:
    (case,) = cases(Architecture.from_pretrained(directory), (layout,))
    with recorded() as record:
        found = function(case, directory)
    return too_far(found), [str(event) for event in record.mixed]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "family"), [(True, "qwen3"), (True, "qwen3_moe"), (False, "deepseek_v3")])
def test_another_layout_goes_on_from_a_checkpoint(engine: bool, family: str, references: Any, on_gpus: Run) -> None:
    directory = references(family, 2)
    convert(directory, converted(directory), workers=1, require_tokenizer=False)
    for function, layout in ((save_checkpoint, "tp2 sp"), (load_checkpoint, "pp2")):
        assert on_gpus(_save_or_load, function, directory, layout, world=2, engine=engine) == ({}, [])
