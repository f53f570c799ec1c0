"""SGLang's own resolution and checks of every GPU configuration's command line, with faked cards of each kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_MODELS

from conversion.model.model_operators import OPERATORS
from megatron_retool.config import Config, load_config
from megatron_retool.planning.engine_model import EngineModel
from megatron_retool.planning.hardware import ACCELERATORS, Machines
from megatron_retool.planning.models import MODELS, resolve_architecture
from sglang_rollout.engine.base import EnginePart
from sglang_rollout.engine.launch_command import RESERVED_TOKENS, torchvision_directory
from sglang_rollout.engine.process import SGLangServer

pytestmark = pytest.mark.slow  # imports SGLang whole, once for each kind of card

ROOT = Path(__file__).parents[3]
RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("retool_*.yaml"))
CARDS = {
    "h100": ("NVIDIA H100 80GB HBM3", 80, 9, 0),
    "h200": ("NVIDIA H200", 141, 9, 0),
    "24gb": ("NVIDIA GeForce RTX 4090", 24, 8, 9),
}
ACCELERATOR = {"h100": "H100", "h200": "H200", "24gb": "RTX4090"}
ONE_GPU = ("rollout.engine.tensor_parallel_size=1", "rollout.engine.expert_parallel_size=1")
OVERRIDES: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "deterministic": ("rollout.engine.random_seed=1",),
    "FP8": ("rollout.engine.quantization=fp8",),
    "adapters": ("rollout.engine.adapters.max_rank=32", "rollout.engine.adapters.targets=[attention]"),
    "on two nodes": (
        "rollout.engine.tensor_parallel_size=16",
        "rollout.engine.expert_parallel_size=16",
        "rollout.engine.count=1",
    ),
    "exact": ONE_GPU,
    "exact latents": (*ONE_GPU, "model.path=deepseek-ai/DeepSeek-V2-Lite"),
    "exact delta nets": (*ONE_GPU, "model.path=Qwen/Qwen3-Next-80B-A3B-Instruct"),
    "exact state spaces": (*ONE_GPU, "model.path=ibm-granite/granite-4.0-h-tiny", "rollout.engine.context_length=null"),
}
PART = EnginePart(1, 2, "10.0.0.1:20000")


def card_of(recipe: str) -> str:
    return next((card for card in CARDS if card in recipe), "h100")


def server_of(recipe: str, kind: str, directory: Path) -> tuple[Config, SGLangServer]:
    """The recipe's first engine, as ``engine_group`` makes it, for a model directory without weights."""
    config = load_config(ROOT / "configs" / f"{recipe}.yaml", [*OVERRIDES[kind], "rollout.engine.device=cuda"])
    path = config.model.path.lower().replace("-", "_")
    name = max((name for name in MODELS if name.replace("-", "_") in path), key=len)
    model = directory / name
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(
        json.dumps(MODELS[name] | {"architectures": [CAUSAL_MODELS[MODELS[name]["model_type"]]]})
    )
    server = SGLangServer(
        config.rollout.engine,
        model_path=model,
        log_file=directory / "log",
        colocated=config.cluster.placement == "colocated",
        gpu_ids=range(config.rollout.engine.tensor_parallel_size),
        weights_from_sync=True,
        routed_experts=config.learner.routing_replay == "rollout",
        port=30000,
        part=PART if kind == "on two nodes" else None,
        exact_operators=OPERATORS if "exact" in kind else (),
    )
    return config, server


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """What SGLang resolves, by recipe and kind. A process for each card imports SGLang, side by side."""
    directory = tmp_path_factory.mktemp("engine_arguments")
    lines: dict[str, dict[tuple[str, str], str]] = {}
    for recipe in RECIPES:
        for kind in OVERRIDES:
            _, server = server_of(recipe, kind, directory)
            lines.setdefault(card_of(recipe), {})[recipe, kind] = json.dumps(server.command()[3:])
    environment = {name: value for name, value in server.environment().items() if name != "CUDA_VISIBLE_DEVICES"}
    environment["PYTHONPATH"] = f"{torchvision_directory()}{os.pathsep}{environment['PYTHONPATH']}"
    script = Path(__file__).with_name("resolve.py")
    processes = {
        card: subprocess.Popen(
            [sys.executable, str(script), *map(str, CARDS[card])], env=environment, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=(directory / f"{card}.log").open("w"),
        )
        for card in lines
    }  # fmt: skip
    found = {}
    for card, process in processes.items():
        output, _ = process.communicate("\n".join(lines[card].values()) + "\n", timeout=500)
        assert process.returncode == 0, (directory / f"{card}.log").read_text()[-2000:]
        found |= dict(zip(lines[card], map(json.loads, output.splitlines()), strict=True))
    return found


@pytest.mark.parametrize("kind", OVERRIDES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_sglang_takes_the_arguments(
    recipe: str, kind: str, resolved: dict[tuple[str, str], dict[str, Any]], tmp_path: Path
) -> None:
    found = resolved[recipe, kind]
    assert "error" not in found
    config, _ = server_of(recipe, kind, tmp_path)
    engine = config.rollout.engine
    experts = "_a3b_" in recipe or "_a22b_" in recipe or "exact " in kind
    parallel = engine.tensor_parallel_size
    expected = {
        "device": "cuda",
        "tp_size": parallel,
        "ep_size": (engine.expert_parallel_size or parallel) if experts else 1,
        "enable_memory_saver": config.cluster.placement == "colocated",
        "enable_return_routed_experts": experts and config.learner.routing_replay == "rollout",
        "enable_deterministic_inference": kind == "deterministic",
        "max_running_requests": engine.max_running_requests,
        "mem_fraction_static": engine.mem_fraction_static,
        "enable_lora": True if kind == "adapters" else None,
        "max_lora_rank": 32 if kind == "adapters" else None,
        "lora_backend": "csgmv",
        "nnodes": 2 if kind == "on two nodes" else 1,
        "node_rank": 1 if kind == "on two nodes" else 0,
        "dist_init_addr": PART.address if kind == "on two nodes" else None,
    }
    assert {name: found[name] for name in expected} == expected
    if engine.context_length is not None:
        assert found["context_length"] == engine.context_length + RESERVED_TOKENS
    if kind == "as it is":
        assert found["attention_backend"] == ("fa3" if CARDS[card_of(recipe)][2] == 9 else "flashinfer"), found
        # What the planner takes for the memory of CUDA graphs.
        _, architecture = resolve_architecture(config.model, config.demo)
        machines = Machines(ACCELERATORS[ACCELERATOR[card_of(recipe)]], 8, 8)
        model = EngineModel.from_config(engine, architecture, machines)
        assert found["prefill_backend"] == "breakable"
        assert tuple(found["prefill_graphs"]) == model.prefill_graph_sizes
        assert max(found["decode_graphs"]) == model.largest_decode_graph
    elif "exact" in kind:
        assert found["attention_backend"] == "torch_native" and found["sampling_backend"] == "pytorch", found
        assert found["moe_runner_backend"] == "triton" and found["disable_shared_experts_fusion"]
        if kind in ("exact delta nets", "exact state spaces"):
            assert found["mamba_radix_cache_strategy"] == "no_buffer" and found["mamba_ssm_dtype"] == "float32"
        assert found["decode_backend"] == found["prefill_backend"] == "disabled"
    else:
        assert found["decode_graphs"]
