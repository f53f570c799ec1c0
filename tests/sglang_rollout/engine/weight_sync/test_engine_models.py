"""Families' weights in FP8 against the parameters that SGLang's own class of the model registers.

Each parameter must be written whole, and no name be unknown. tests/parity does so with plain weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from conversion.hf_to_mcore import convert
from conversion.mcore_to_hf import export
from conversion.model.architecture import Architecture
from conversion.model.block_fp8 import blockwise_quantization_config
from conversion.model.weight_map import WeightMap
from megatron_retool.config import ModelConfig
from sglang_rollout.engine.weight_sync.engine_classes import Load, Loaded, load_into_engine_classes
from sglang_rollout.engine.weight_sync.quantization import Fp8
from tests.conversion.conftest import model_directory, read_all  # noqa: F401 (a fixture)
from tests.kit.tiny_models import FAMILIES

pytest.importorskip("sglang")

SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
}
FORMS = ("block-FP8 export", "block-FP8 sync", "block-FP8 sync of some layers")


def load(name: str, directory: Path, override: dict[str, Any] | None = None, tensors: Path | None = None) -> Load:
    return Load(name, str(directory), str(tensors or directory / "model.safetensors"), override or {})


def synced(name: str, source: Path, where: Path) -> Load:
    """What engines that were started for an FP8 weight sync are given."""
    buckets = [read_all(source)]
    tensors = {n: t for bucket in buckets for n, t in Fp8(ModelConfig(path=str(source)))(list(bucket.items()))}
    save_file(tensors, where)
    weight_map = WeightMap(Architecture.from_pretrained(source))
    return load(name, source, {"quantization_config": blockwise_quantization_config(weight_map)}, where)


@pytest.fixture(scope="module")
def answers(model_directory: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:  # noqa: F811
    cases = []
    for family in FAMILIES:
        made = tmp_path_factory.mktemp(family)
        source = model_directory(family, **SIZES)
        convert(source, made / "mcore", workers=1)
        export(made / "mcore", made / "fp8", fp8=True, workers=1)
        cases += [
            load(f"{family} block-FP8 export", made / "fp8"),
            synced(f"{family} block-FP8 sync", source, made / "sync.safetensors"),
            # 200 is no multiple of 128: the SwiGLU stays in bfloat16.
            synced(
                f"{family} block-FP8 sync of some layers",
                model_directory(family, **{**SIZES, "intermediate_size": 200, "moe_intermediate_size": 200}),
                made / "some.safetensors",
            ),
        ]
    return load_into_engine_classes(cases, tmp_path_factory.mktemp("engine"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_the_engine_is_written(answers: dict[str, Loaded], family: str, form: str) -> None:
    assert answers[f"{family} {form}"].wrong == ""


@pytest.mark.rare
def test_per_tensor_checkpoints(model_directory: Callable[..., Path], tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("modelopt.torch.quantization")
    program = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from conversion.fp8_export import MODELOPT_FORMATS, _ModeloptJob, _run_modelopt\n"
        "for source, target in json.loads(sys.argv[1]):\n"
        "    Path(target).mkdir()\n"
        "    job = _ModeloptJob(Path(source), Path(target), MODELOPT_FORMATS['fp8'], ((1, 2, 3), (4, 5)))\n"
        "    _run_modelopt(job)\n"
    )
    pairs = [[str(model_directory(family, **SIZES)), str(tmp_path / family)] for family in FAMILIES]
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, json.dumps(pairs)], check=True, timeout=500)
    loads = [load(family, tmp_path / family) for family in FAMILIES]
    assert [loaded.wrong for loaded in load_into_engine_classes(loads, tmp_path).values()] == [""] * len(loads)
