"""Longrope positions: SGLang's own class against the learner's, and where the two part."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sglang_cpu_engine
from conversion.model.architecture import Architecture
from megatron_retool.parity.admission.shrink import shrunk
from sglang_rollout.engine.launch_command import torchvision_directory
from tests.kit.model_variants import PHI_3_5_MINI, PHI_4_MINI

HEADS, LIMIT = 4, 64
SGLANG = """
import sys, torch
from sglang.srt.layers.rotary_embedding.rope_variant import Phi3LongRoPEScaledRotaryEmbedding
cases = torch.load(sys.argv[1])
answers = [[Phi3LongRoPEScaledRotaryEmbedding(**case["options"], is_neox_style=True, dtype=torch.float32)(
    positions, case["query"][positions], case["key"][positions]) for positions in case["passes"]] for case in cases]
torch.save(answers, sys.argv[2])
"""


def case(hf_config: dict[str, Any]) -> dict[str, Any]:
    architecture = Architecture.from_hf_config(shrunk(hf_config, 4))
    assert architecture.longest_text == LIMIT
    positions, rope = architecture.hf_config["rope_scaling"], architecture.rotary_dim or architecture.head_dim
    width = HEADS * architecture.head_dim
    return {
        "options": {
            "head_size": architecture.head_dim,
            "rotary_dim": rope,
            "max_position_embeddings": architecture.max_position_embeddings,
            "original_max_position_embeddings": LIMIT,
            "base": int(architecture.rope_theta),
            "short_factor": positions["short_factor"],
            "long_factor": positions["long_factor"],
        },
        "query": torch.randn(LIMIT + 2, width),
        "key": torch.randn(LIMIT + 2, width),
        # A whole text, a token alone as it is sampled, and a text that is one token too long.
        "passes": [torch.arange(LIMIT), torch.tensor([LIMIT - 1]), torch.arange(LIMIT + 2)],
    }


def scores(hf_config: dict[str, Any], query: torch.Tensor, key: torch.Tensor, length: int) -> torch.Tensor:
    """[HEADS, length, length] of the learner, with what the softmax multiplies."""
    from conversion.model.rotary import inverse_frequencies, query_factor, softmax_scale
    from megatron_retool.learner.attention import RotaryTable, _Rotary

    architecture = Architecture.from_hf_config(shrunk(hf_config, 4))
    rotated = architecture.rotary_dim or architecture.head_dim
    cos, sin = RotaryTable(inverse_frequencies(architecture)).at(torch.arange(length), length, torch.float32)
    query, key = (x[:length].unflatten(1, (HEADS, -1)).clone() for x in (query, key))
    query[..., :rotated] *= query_factor(architecture)
    query, key = _Rotary.apply(query, cos, sin), _Rotary.apply(key, cos, sin)
    return softmax_scale(architecture) * torch.einsum("qhd,khd->hqk", query, key)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], dict[str, Any], Any]]:
    """config.json, the case, and what SGLang makes of it."""
    directory: Path = tmp_path_factory.mktemp("longrope")
    torch.manual_seed(0)
    configs = [PHI_3_5_MINI, PHI_4_MINI]
    asked = [case(config) for config in configs]
    torch.save(asked, directory / "cases.pt")
    paths = [str(torchvision_directory()), *filter(None, sys.path)]
    environment = {**os.environ, **sglang_cpu_engine.environment({"PYTHONPATH": os.pathsep.join(paths)})}
    files = [str(directory / name) for name in ("cases.pt", "answers.pt")]
    subprocess.run([sys.executable, "-W", "ignore", "-c", SGLANG, *files], check=True, timeout=500, env=environment)
    return list(zip(configs, asked, torch.load(files[1]), strict=True))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_scores_are_those_of_sglang_up_to_the_original_positions(cases: Any) -> None:
    for hf_config, asked, ((query, key), (last, _), (long_query, long_key)) in cases:
        scale = asked["options"]["head_size"] ** -0.5
        theirs = [x.unflatten(1, (HEADS, -1)) for x in (query, key, long_query[:LIMIT], long_key[:LIMIT])]
        assert torch.equal(last[0], query[-1])
        expected = scale * torch.einsum("qhd,khd->hqk", *theirs[:2])
        found = scores(hf_config, asked["query"], asked["key"], LIMIT)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        # One token beyond them, and SGLang computes all tokens of the same pass by the other factors.
        beyond = scale * torch.einsum("qhd,khd->hqk", *theirs[2:])
        assert (beyond - expected).abs().max() > 0.1
