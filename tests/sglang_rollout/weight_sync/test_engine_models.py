"""Every family's weights, in every form, against the parameters that SGLang's own class of the model registers.

One process with SGLang builds every class on a CPU and lets its ``load_weights`` read what an export or a weight sync
gives it: each parameter must be written whole, and no name be unknown. Nothing is computed, so no GPU is needed.
"""

from __future__ import annotations

import json
import os
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
from sglang_rollout.engine.process import CPU_SHIMS, torchvision_directory
from sglang_rollout.weight_sync.quantization import Fp8
from tests.conversion.conftest import model_directory, read_all  # noqa: F401 (a fixture)
from tests.learner.tiny_models import FAMILIES

pytest.importorskip("sglang")

SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
}
SCRIPT = Path(__file__).with_name("load_into_engine_models.py")
FORMS = ("bf16 export", "block-FP8 export", "block-FP8 sync", "block-FP8 sync of some layers")


def case(name: str, directory: Path, override: dict[str, Any] | None = None, tensors: Path | None = None) -> Any:
    return {
        "name": name,
        "directory": str(directory),
        "override": override or {},
        "tensors": str(tensors or directory / "model.safetensors"),
    }


def synced(name: str, source: Path, where: Path) -> Any:
    """What engines that were started for an FP8 weight sync are given."""
    buckets = [read_all(source)]
    tensors = {n: t for bucket in buckets for n, t in Fp8(ModelConfig(path=str(source)))(list(bucket.items()))}
    save_file(tensors, where)
    weight_map = WeightMap(Architecture.from_pretrained(source))
    return case(name, source, {"quantization_config": blockwise_quantization_config(weight_map)}, where)


def answers_of(cases: list[Any], directory: Path) -> dict[str, Any]:
    (directory / "cases.json").write_text(json.dumps(cases))
    paths = [str(CPU_SHIMS), str(torchvision_directory()), *sys.path]
    subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), str(directory / "cases.json"), str(directory / "answers.json")],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "SGLANG_USE_CPU_ENGINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCHDYNAMO_DISABLE": "1",
        },
        check=True,
        timeout=500,
    )
    answers: dict[str, Any] = json.loads((directory / "answers.json").read_text())
    return answers


@pytest.fixture(scope="module")
def answers(model_directory: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:  # noqa: F811
    cases = []
    for family in FAMILIES:
        made = tmp_path_factory.mktemp(family)
        source = model_directory(family, **SIZES)
        convert(source, made / "mcore", processes=1)
        export(made / "mcore", made / "bf16", processes=1)
        export(made / "mcore", made / "fp8", fp8=True, processes=1)
        cases += [
            case(f"{family} bf16 export", made / "bf16"),
            case(f"{family} block-FP8 export", made / "fp8"),
            synced(f"{family} block-FP8 sync", source, made / "sync.safetensors"),
            # 200 is no multiple of 128: the SwiGLU stays in bfloat16.
            synced(
                f"{family} block-FP8 sync of some layers",
                model_directory(family, **{**SIZES, "intermediate_size": 200, "moe_intermediate_size": 200}),
                made / "some.safetensors",
            ),
        ]
    return answers_of(cases, tmp_path_factory.mktemp("engine"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_the_engine_is_written(answers: dict[str, Any], family: str, form: str) -> None:
    assert_written(answers[f"{family} {form}"])


@pytest.mark.slow
def test_per_tensor_checkpoints(model_directory: Callable[..., Path], tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("modelopt.torch.quantization")
    program = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from conversion.fp8_export import MODELOPT_FORMATS, _ModeloptJob, _run_modelopt\n"
        "for source, target in json.loads(sys.argv[1]):\n"
        "    Path(target).mkdir()\n"
        "    job = _ModeloptJob(Path(source), Path(target), MODELOPT_FORMATS['fp8'], ((1, 2, 3), (4, 5)))\n"
        "    _run_modelopt(job, None)\n"
    )
    pairs = [[str(model_directory(family, **SIZES)), str(tmp_path / family)] for family in FAMILIES]
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, json.dumps(pairs)], check=True, timeout=500)
    for answer in answers_of([case(family, tmp_path / family) for family in FAMILIES], tmp_path).values():
        assert_written(answer)


def assert_written(answer: dict[str, Any]) -> None:
    assert "error" not in answer, answer["error"]
    assert answer["unwritten"] == []
    assert [text for text in answer["warnings"] if "not found" in text or "not loaded" in text] == []
