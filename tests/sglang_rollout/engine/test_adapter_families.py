"""Adapters in SGLang's own classes of models: names, shapes and fused matrices, against transformers with W + BA."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from conversion.model.adapter_map import module_names
from conversion.model.architecture import Architecture
from megatron_retool.config import EngineConfig, LoraConfig
from megatron_retool.config.rollout import EngineAdaptersConfig
from sglang_rollout.engine.client import SGLangClient
from tests.kit.adapter_reference import random_factors, small_model
from tests.kit.forked_engine import ForkedServer

pytestmark = pytest.mark.slow  # an engine for each family

IDS = [5 + 7 * place % 60 for place in range(40)]
BOUND = 2e-5
RANK, ALPHA = 4, 8.0
DENSE = {"intermediate_size": 64}
"""SGLang fills up other sizes on a CPU, for which it has no adapters."""


@pytest.mark.parametrize(
    ("family", "targets", "sizes"),
    [
        ("qwen3", ["attention", "mlp"], DENSE),
        ("gemma3_text", ["attention", "mlp"], DENSE),
        ("phi3", ["attention", "mlp"], DENSE),
        ("qwen3_moe", ["attention"], {}),
        ("glm4_moe", ["attention"], {}),
    ],
)
def test_an_engine_computes_the_familys_adapters(
    family: str, targets: list[str], sizes: dict[str, int], tmp_path: Path
) -> None:
    small_model(family, **sizes).float().save_pretrained(tmp_path / "base")
    architecture = Architecture.from_pretrained(tmp_path / "base")
    factors = random_factors(architecture, LoraConfig(rank=RANK, alpha=ALPHA, targets=targets))
    write_adapter(tmp_path / "adapter", architecture, targets, factors)
    write_merged(tmp_path / "base", tmp_path / "merged", factors)
    config = EngineConfig(
        device="cpu", dtype="float32", max_total_tokens=4096, max_running_requests=8,
        adapters=EngineAdaptersConfig(max_rank=8, targets=targets),
    )  # fmt: skip
    with ForkedServer(config, model_path=tmp_path / "base", log_file=tmp_path / "engine.log") as server:
        found = asyncio.run(scores(server.base_url, tmp_path / "adapter"))
    wanted = [log_probs(tmp_path / name) for name in ("base", "merged")]
    for own, expected in zip(found, wanted, strict=True):
        assert (torch.tensor(own) - expected).abs().max() < BOUND
    assert (wanted[0] - wanted[1]).abs().max() > 0.1


async def scores(url: str, adapter: Path) -> list[list[float]]:
    async with SGLangClient(url) as client:
        base = await client.score(IDS)
        await client.load_adapter("own", adapter)
        return [base, await client.score(IDS, adapter="own")]


def write_adapter(
    directory: Path, architecture: Architecture, targets: list[str], factors: dict[str, torch.Tensor]
) -> None:
    directory.mkdir()
    named = {f"base_model.model.{name}": factor.contiguous() for name, factor in factors.items()}
    save_file(named, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}
    config["target_modules"] = module_names(architecture, targets)
    (directory / "adapter_config.json").write_text(json.dumps(config))


def write_merged(base: Path, directory: Path, factors: dict[str, torch.Tensor]) -> None:
    shutil.copytree(base, directory)
    for file in directory.glob("*.safetensors"):
        weights = load_file(file)
        for name in factors:
            stem, kind, _ = name.rsplit(".", 2)
            if kind == "lora_A":
                delta = factors[f"{stem}.lora_B.weight"] @ factors[name]
                weights[f"{stem}.weight"] = weights[f"{stem}.weight"] + ALPHA / RANK * delta
        save_file(weights, file, metadata={"format": "pt"})


def log_probs(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        rows = model(torch.tensor([IDS])).logits[0, :-1].float().log_softmax(-1)
    return rows.gather(-1, torch.tensor(IDS[1:])[:, None])[:, 0]
