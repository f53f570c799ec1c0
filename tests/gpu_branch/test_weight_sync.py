"""``weight_sync.method=tensor`` as colocated GPUs have it: handles of a GPU's memory, through SGLang's own code."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conversion.model.architecture import Architecture
from conversion.model.block_fp8 import blockwise_quantization_config
from conversion.model.weight_map import WeightMap
from megatron_retool.config import EngineConfig, ModelConfig
from megatron_retool.parity.admission.tiny_model import save_model
from sglang_rollout.engine.key import engine_key, use_engine_key
from sglang_rollout.engine.process import SGLangServer
from sglang_rollout.engine.weight_sync import engine_classes
from sglang_rollout.engine.weight_sync.engine_classes import Load
from sglang_rollout.engine.weight_sync.quantization import Fp8
from sglang_rollout.engine.weight_sync.tensor import TensorWeightSync
from tests.kit.tiny_models import hf_model

IPC = Path(__file__).with_name("ipc")
GPUS_OF_ENGINES = (("GPU-2", "GPU-3", "GPU-0"), ("GPU-1",))
"""The first has two ranks on GPUs of its own and sees its sender's last; the second shares its sender's."""


def _push(directory: Path, urls: list[str], key: str, handles: Path) -> dict[str, Any]:
    """Each rank sends weights of its GPU to one engine, twice, and then one handle to both ranks of the first."""
    sys.path.insert(0, str(IPC))
    import fake_ipc
    from safetensors.torch import load_file
    from torch.multiprocessing import reductions

    from sglang_rollout.engine.weight_sync import tensor as way
    from sglang_rollout.engine.weight_sync.errors import WeightSyncError

    os.environ[fake_ipc.DIRECTORY] = str(handles)
    reductions.reduce_tensor = fake_ipc.reduce_tensor
    use_engine_key(key)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    weights = {name: each.to("cuda") for name, each in load_file(directory / "model.safetensors").items()}
    verified, refused = [], ""
    with way.TensorWeightSync([urls[rank]], verify=True, timeout_seconds=60) as sync:
        for version in (1, 2):
            weights = {name: each * 1.5 for name, each in weights.items()}
            names = list(weights)
            buckets = [[(name, weights[name]) for name in part] for part in (names[:7], names[7:])]
            verified.append(sync.push(buckets, version).verified_tensors)
        if rank == 0:
            pickled, same = way._pickled, dict[int, str]()
            way._pickled = lambda value: same.setdefault(id(value), pickled(value))
            try:
                sync.push([list(weights.items())], 3)
            except WeightSyncError as error:
                refused = str(error)
            way._pickled = pickled
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, verified)
    return {"verified": found, "refused": refused}


@pytest.mark.rare
def test_engines_load_from_the_memory_of_their_senders_gpu(tmp_path: Path, on_gpus: Any) -> None:
    # An engine on a CPU pads matrices of other sizes, and then holds other tensors than were sent.
    model = hf_model("qwen3", num_hidden_layers=2, hidden_size=64, intermediate_size=128)
    directory, handles = save_model(model, tmp_path / "model"), tmp_path / "handles"
    handles.mkdir()
    servers = []
    for number, gpus in enumerate(GPUS_OF_ENGINES):
        config = EngineConfig(
            device="cpu", dtype="float32", max_total_tokens=1024, tensor_parallel_size=2 - number, threads=1
        )
        server = SGLangServer(config, model_path=directory, log_file=tmp_path / f"engine_{number}.log")
        path = f"{IPC}{os.pathsep}{server.environment()['PYTHONPATH']}"
        server.extra_environment = {"PYTHONPATH": path, "FAKE_GPUS": ",".join(gpus)}
        servers.append(server)
    try:
        for server in servers:
            server.launch()
        for server in servers:
            server.wait_ready()
        urls = [server.base_url for server in servers]
        found = on_gpus(_push, directory, urls, engine_key(), handles, world=2)
    finally:
        for server in servers:
            server.stop()
    assert found["verified"] == [[38, 38], [19, 19]], "both ranks of the first engine, and the second engine"
    assert "failed at /update_weights_from_tensor" in found["refused"], "a handle that two ranks open"
    opened = [path.name for path in handles.iterdir()]
    assert sum(name.startswith("GPU-1-") for name in opened) == 2 * 2
    assert sum(name.startswith("GPU-0-") for name in opened) == 2 * 2 * 2 + 2
    assert all(name.endswith(".opened") for name in opened if name.startswith("GPU-1-"))


class _Requests(TensorWeightSync):
    """Whose requests with weights go into a list; the other answers are those of an engine with one rank."""

    def __init__(self, **options: Any) -> None:
        super().__init__(["http://127.0.0.1:1"], **options)
        self.bodies: list[Any] = []

    def _start_all(self, path: str, bodies: Any, timeout: float | None = None) -> Any:
        if path == "/update_weights_from_tensor":
            self.bodies += bodies.values()
        answer: Future[dict[str, Any]] = Future()
        answer.set_result({"success": True, "tp_size": 1, "dtype": "bfloat16", "weight_version": "1"})
        return dict.fromkeys(bodies, answer)


def _quantise_and_push(source: Path, requests: Path, handles: Path) -> None:
    sys.path.insert(0, str(IPC))
    import fake_ipc
    from safetensors.torch import load_file
    from torch.multiprocessing import reductions

    os.environ[fake_ipc.DIRECTORY] = str(handles)
    reductions.reduce_tensor = fake_ipc.reduce_tensor
    weights = {name: each.to("cuda") for name, each in load_file(source / "model.safetensors").items()}
    with _Requests(convert=Fp8(ModelConfig(path=str(source)))) as sync:
        sync.push([[each] for each in weights.items()], 1)
    requests.write_text(json.dumps(sync.bodies))


@pytest.mark.slow
def test_engines_in_fp8_load_from_the_memory_of_a_gpu(
    tmp_path: Path, on_gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hf_model("qwen3_moe", num_hidden_layers=2, hidden_size=256, head_dim=64, moe_intermediate_size=128)
    source = save_model(model, tmp_path / "model")
    requests, handles = tmp_path / "requests.json", tmp_path / "handles"
    handles.mkdir()
    on_gpus(_quantise_and_push, source, requests, handles)
    monkeypatch.setattr(engine_classes, "SCRIPT", IPC / "load_pushed.py")
    monkeypatch.setattr(sys, "path", [str(IPC), *sys.path])
    monkeypatch.setenv("FAKE_GPUS", "GPU-1,GPU-0")
    override = {"quantization_config": blockwise_quantization_config(WeightMap(Architecture.from_pretrained(source)))}
    load = Load("qwen3_moe", str(source), str(requests), override)
    assert engine_classes.load_into_engine_classes([load], tmp_path)["qwen3_moe"].wrong == ""
    assert {path.suffix for path in handles.iterdir()} == {".opened"}
