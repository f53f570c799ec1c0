"""Every built-in family is admitted: in every named layout on up to two processes, two of them on up to four. So are
published models that leave their family's first one, and parts of families that no published model of theirs has.

One family for each kind of attention, of experts and of state is quick to admit; the others are rare tests.
"""

from __future__ import annotations

import importlib.util

import pytest

from conversion.model.family import built_in_families
from megatron_retool.parity.admission.admit import examine
from megatron_retool.parity.admission.engine_checks import LOG_PROBS, PARAMETERS
from megatron_retool.parity.admission.outcome import Admission, AdmissionVerdict
from megatron_retool.parity.admission.requests import Request, one_of_each_family
from megatron_retool.planning.models import model_of_each_family
from tests.kit.model_variants import VARIANTS

SPARSE = {"deepseek_v32", "glm_moe_dsa", "glm-5 with shared keys"}
LATENT = {*SPARSE, "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "deepseek-v2-lite", "kimi-k2"}
MAMBA = {"granitemoehybrid", "granite-4.0-h-tiny"}
"""With one group of heads, which tensor parallelism cannot split."""
GPU_ALONE = {*LATENT, "gpt_oss", "minimax_m2"}
"""What SGLang does not serve on a CPU."""
OF_A_VARIANT = ("one process", "unpacked, recompute", "tp2 sp", "cp2", "ep2 tp2")
"""Its family shows that stages, checkpoints and common prefixes are right."""
QUICK = ("deepseek_v3", "gpt_oss", "nemotron_h", "qwen3_next")
UNSERVED = {"dense layers among experts"}
"""What it serves nowhere."""


@pytest.fixture(scope="module")
def admissions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Admission]:
    """Of all that these tests were chosen to ask for, since processes that examine several have one start."""
    items = (item for item in request.session.items if isinstance(item, pytest.Function))
    chosen = {item.callspec.params["name"] for item in items if item.function is test_admitted}
    families = zip(model_of_each_family(), one_of_each_family(), strict=True)
    variants = [
        Request(name, config, names=(*OF_A_VARIANT, "ep2") if name in MAMBA else OF_A_VARIANT)
        for name, config in VARIANTS.items()
        if name in chosen
    ]
    wanted = [asked for family, asked in families if family in chosen]
    found = examine([*wanted, *variants], tmp_path_factory.mktemp("admission"))
    return {admission.model if admission.model in VARIANTS else admission.family: admission for admission in found}


def test_every_family_has_a_published_model() -> None:
    assert model_of_each_family().keys() == built_in_families().keys()


@pytest.mark.timeout(1800)  # the first of them waits for all
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in QUICK else pytest.mark.rare)
        for name in [*built_in_families(), *VARIANTS]
    ],
)
def test_admitted(admissions: dict[str, Admission], name: str) -> None:
    admission = admissions[name]
    assert [(check.name, check.reason) for check in admission.failures] == []
    passed = {check.name for check in admission.checks if check.verdict is AdmissionVerdict.PASS}
    assert {"round trip", "one process", "cp2"} <= passed
    assert ("pp2" in passed) == (name not in VARIANTS)
    assert ("tp2 sp" in passed) == (name not in MAMBA)
    assert "unpacked, recompute" in passed or {"unpacked", "recompute"} <= passed
    assert {"parameters", "FLOPs", "names and shapes"} <= passed
    assert (("ep2" if name in MAMBA else "ep2 tp2") in passed) == ("routing replay" in passed)
    sglang = importlib.util.find_spec("sglang") is not None
    assert (PARAMETERS in passed) == (sglang and name not in UNSERVED)
    assert (LOG_PROBS in passed) == (sglang and name not in GPU_ALONE | UNSERVED)
