"""Every built-in family is admitted: in every named layout on up to two processes, two of them on up to four."""

from __future__ import annotations

from typing import Any

import pytest

from conversion.model.family import built_in_families
from megatron_retool.admission.admit import examine, one_of_each_family
from megatron_retool.admission.outcome import Verdict
from megatron_retool.planning.models import model_of_each_family


@pytest.fixture(scope="module")
def admissions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = examine(one_of_each_family(), tmp_path_factory.mktemp("admission"))
    return {admission.family: admission for admission in found}


def test_every_family_has_a_published_model() -> None:
    assert model_of_each_family().keys() == built_in_families().keys()


@pytest.mark.parametrize("family", built_in_families())
def test_admitted(admissions: dict[str, Any], family: str) -> None:
    admission = admissions[family]
    assert [(check.name, check.reason) for check in admission.failures] == []
    passed = {check.name for check in admission.checks if check.verdict is Verdict.PASS}
    assert {"round trip", "one process", "tp2 sp", "pp2", "cp2"} <= passed
    assert "unpacked, recompute" in passed or {"unpacked", "recompute"} <= passed
    assert {"parameters", "FLOPs", "names and shapes"} <= passed
    assert ("ep2 tp2" in passed) == ("routing replay" in passed)
