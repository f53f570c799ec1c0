"""Weight sync against engines that misbehave on purpose. That the real engine takes weights is test_real_engine's."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config

from conversion.model.block_fp8 import takes_power_of_two
from megatron_retool.config import ModelConfig, load_config
from sglang_rollout.engine.weight_sync import distributed, quantization
from sglang_rollout.engine.weight_sync.base import ServerWeightSync, is_local
from sglang_rollout.engine.weight_sync.disk import DiskWeightSync
from sglang_rollout.engine.weight_sync.distributed import DistributedWeightSync
from sglang_rollout.engine.weight_sync.errors import WeightSyncError
from sglang_rollout.engine.weight_sync.push import make_weight_sync
from sglang_rollout.engine.weight_sync.quantization import Fp8
from sglang_rollout.engine.weight_sync.tensor import TensorWeightSync

BUCKETS = [[("a.weight", torch.ones(4, 4)), ("b.bias", torch.zeros(3))], [("c.weight", torch.ones(2))]]


class FakeEngine:
    """Answers every path with success; ``faults`` maps a path to (status, body) or to seconds of silence."""

    def __init__(self, faults=None, dtype: str = "float32") -> None:
        self.faults = faults or {}
        self.calls: list[tuple[str, dict]] = []
        self.version = "0"
        self.tensors: dict[str, torch.Tensor] = {}
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self, body: dict) -> None:
                engine.calls.append((self.path, body))
                fault = engine.faults.get(self.path)
                if callable(fault):
                    fault = fault(len([path for path, _ in engine.calls if path == self.path]))
                status, reply = 200, {"success": True, "message": "ok"}
                if isinstance(fault, tuple):
                    status, reply = fault
                elif fault is not None:
                    time.sleep(fault)
                elif self.path == "/server_info":
                    reply = {"dtype": dtype, "tp_size": 2, "device": "cpu"}
                elif self.path == "/model_info":
                    reply = {"weight_version": engine.version}
                elif self.path == "/update_weight_version":
                    engine.version = body["new_version"]
                elif self.path == "/update_weights_from_disk":
                    engine.version = body["weight_version"]
                    files = Path(body["model_path"]).glob("*.safetensors")
                    engine.tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
                data = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                self.answer({})

            def do_POST(self) -> None:
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

            def log_message(self, *arguments) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def engines():
    made: list[FakeEngine] = []

    def make(**kwargs) -> FakeEngine:
        made.append(FakeEngine(**kwargs))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def tensor_sync(*engines: FakeEngine, **kwargs) -> TensorWeightSync:
    return TensorWeightSync([engine.url for engine in engines], **{"timeout_seconds": 5, **kwargs})


def test_the_order_of_a_push(engines):
    engine = engines()
    with tensor_sync(engine) as sync:
        report = sync.push(BUCKETS, version=7)
    assert engine.paths() == [
        "/server_info", "/pause_generation", "/begin_weight_update", "/update_weights_from_tensor",
        "/update_weights_from_tensor", "/end_weight_update", "/flush_cache", "/update_weight_version",
        "/continue_generation", "/model_info",
    ]  # fmt: skip
    bodies = dict(engine.calls)
    assert bodies["/pause_generation"] == {"mode": "retract"}
    # A draft model of speculative decoding would take the policy's weights too.
    assert bodies["/begin_weight_update"] == {"selector": "target"}
    assert bodies["/update_weights_from_tensor"]["selector"] == "target"
    assert len(bodies["/update_weights_from_tensor"]["serialized_named_tensors"]) == 2  # one for each rank
    assert (report.version, report.tensors, report.bytes) == (7, 3, 4 * (16 + 3 + 2))


def test_the_next_bucket_is_put_together_while_engines_load_the_last_one(engines):
    second = threading.Event()
    waited = []

    def load(count: int) -> None:
        if count == 1:
            waited.append(second.wait(3))

    def buckets():
        yield BUCKETS[0]
        second.set()
        yield BUCKETS[1]

    with tensor_sync(engines(faults={"/update_weights_from_tensor": load})) as sync:
        sync.push(buckets(), 1)
    assert waited == [True]


def test_two_buckets_take_memory_at_a_time(engines):
    """The flat one that engines load, and the one that is put together."""
    made, alive = [], []

    def buckets():
        for _ in range(4):
            gc.collect()
            alive.append(sum(tensor() is not None for tensor in made) + (sync._loading is not None))
            bucket = [("a.weight", torch.ones(64, 64))]
            made.append(weakref.ref(bucket[0][1]))
            yield bucket
            del bucket

    with tensor_sync(engines(dtype="bfloat16")) as sync:
        sync.push(buckets(), 1)
        assert sync._loading is None
    assert alive == [0, 1, 1, 1]  # beside the one that is made next


@pytest.mark.parametrize("place", [1, 2], ids=["before_the_last_bucket", "at_the_last_bucket"])
def test_a_bucket_that_an_engine_refuses_later_ends_the_push_as_before(engines, place):
    def load(count: int) -> tuple[int, dict] | None:
        return (400, {"message": "unexpected shape"}) if count == place else None

    good, bad = engines(), engines(faults={"/update_weights_from_tensor": load})
    with tensor_sync(good, bad) as sync:
        with pytest.raises(WeightSyncError, match="weight sync failed at /update_weights_from_tensor") as error:
            sync.push(BUCKETS, 1)
        assert error.value.engines == (bad.url,)
        for engine in (good, bad):
            assert engine.paths()[-2:] == ["/end_weight_update", "/continue_generation"]
        # The same connection takes the next push, of which nothing is left over.
        assert sync.push(BUCKETS, 2).version == 2


def test_an_engine_that_dies_while_it_loads_is_named(engines):
    good, dying = engines(), engines()
    second = threading.Event()
    dying.faults["/update_weights_from_tensor"] = lambda count: second.wait(3) and (dying.close(), 20.0)[1]

    def buckets():
        yield BUCKETS[0]
        second.set()
        yield BUCKETS[1]

    with tensor_sync(good, dying, timeout_seconds=2) as sync, pytest.raises(WeightSyncError) as error:
        sync.push(buckets(), 1)
    assert error.value.engines == (dying.url,)
    assert good.paths()[-2:] == ["/end_weight_update", "/continue_generation"]


def test_an_export_that_fails_waits_for_what_is_being_loaded(engines):
    """Its memory is given back afterwards."""
    failed = threading.Event()

    def load(count: int) -> None:
        failed.wait(3)
        time.sleep(0.2)

    def buckets():
        yield BUCKETS[0]
        failed.set()
        raise RuntimeError("the learner failed")

    engine = engines(faults={"/update_weights_from_tensor": load})
    with tensor_sync(engine) as sync, pytest.raises(RuntimeError, match="the learner failed"):
        sync.push(buckets(), 1)
    assert engine.paths()[-3:] == ["/update_weights_from_tensor", "/end_weight_update", "/continue_generation"]
    assert sync._loading is None


def test_a_refusal_names_the_engine_and_lets_all_go_on(engines):
    good, bad = engines(), engines(faults={"/update_weights_from_tensor": (400, {"message": "unexpected shape"})})
    with tensor_sync(good, bad) as sync, pytest.raises(WeightSyncError, match="unexpected shape") as error:
        sync.push(BUCKETS, 1)
    assert error.value.engines == (bad.url,) and bad.url in str(error.value)
    for engine in (good, bad):
        assert engine.paths()[-2:] == ["/end_weight_update", "/continue_generation"]
        assert "/update_weight_version" not in engine.paths()


def test_a_silent_engine_is_a_named_timeout(engines):
    good, silent = engines(), engines(faults={"/flush_cache": 20.0})
    began = time.monotonic()
    with (
        tensor_sync(good, silent, timeout_seconds=2) as sync,
        pytest.raises(WeightSyncError, match=f"{silent.url}: no answer in 2"),
    ):
        sync.push(BUCKETS, 1)
    assert time.monotonic() - began < 15


def test_an_engine_that_keeps_its_old_version_is_found(engines):
    good, stale = engines(), engines(faults={"/update_weight_version": (200, {"success": True})})
    with tensor_sync(good, stale) as sync, pytest.raises(WeightSyncError, match=f"{stale.url} serves '0' instead of 9"):
        sync.push(BUCKETS, 9)


def test_a_session_left_open_by_a_dead_learner_is_closed_first(engines):
    def already_open(count):
        return (400, {"message": "a weight-update session is already open"}) if count == 1 else (200, {"success": True})

    engine = engines(faults={"/begin_weight_update": already_open})
    with tensor_sync(engine) as sync:
        sync.push(BUCKETS, 1)
    paths = engine.paths()
    first = paths.index("/begin_weight_update")
    assert paths[first : first + 3] == ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]


def test_nothing_to_send_is_an_error(engines):
    with tensor_sync(engines()) as sync, pytest.raises(WeightSyncError, match="no weight to send"):
        sync.push([], 1)


def test_an_error_of_the_learner_leaves_the_engines_usable(engines):
    engine = engines()

    def failing():
        yield BUCKETS[0]
        raise RuntimeError("gather failed")

    with tensor_sync(engine) as sync, pytest.raises(RuntimeError, match="gather failed"):
        sync.push(failing(), 1)
    assert engine.paths()[-2:] == ["/end_weight_update", "/continue_generation"]


def test_weights_travel_in_the_engines_dtype(engines, tmp_path):
    engine = engines(dtype="bfloat16")
    (tmp_path / "config.json").write_text("{}")
    whole = torch.arange(32.0)
    bias = ("model.layers.1.mlp.gate.e_score_correction_bias", torch.tensor([0.1]))
    views = [("a.weight", whole[:16].view(4, 4)), ("b.weight", whole[16:]), bias]
    with DiskWeightSync([engine.url], directory=tmp_path / "sync", model_path=tmp_path, timeout_seconds=5) as sync:
        report = sync.push([views], 3)
    assert engine.tensors["a.weight"].dtype == torch.bfloat16 and report.bytes == 68
    assert torch.equal(engine.tensors[bias[0]], bias[1])  # engines have it in float32 too
    assert torch.equal(engine.tensors["b.weight"].float(), whole[16:])
    assert not (tmp_path / "sync").exists()


def test_a_peer_that_never_joins_is_a_timeout(engines):
    engine = engines()
    began = time.monotonic()
    with DistributedWeightSync([engine.url], timeout_seconds=1.5) as sync, pytest.raises(WeightSyncError):
        sync.push(BUCKETS, 1)
    assert time.monotonic() - began < 10
    assert engine.paths()[-1] == "/continue_generation"


def test_tensor_sync_needs_the_same_host():
    with TensorWeightSync(["http://203.0.113.5:1"], timeout_seconds=1) as sync:
        sync._call_all = lambda *arguments, **kwargs: {}  # the address answers nobody
        with pytest.raises(WeightSyncError, match=r"203\.0\.113\.5.*weight_sync.method=distributed"):
            sync._probe()


def test_blocks_are_quantised_where_an_fp8_checkpoint_has_them(tmp_path):
    """The rule of conversion.model.block_fp8: matrices of 128 x 128 blocks, the others stay as they are."""
    sizes = {"hidden_size": 256, "intermediate_size": 200, "num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen2Config(**sizes | {"head_dim": 128, "num_hidden_layers": 1}).save_pretrained(tmp_path)
    fp8 = Fp8(ModelConfig(path=str(tmp_path)))
    layer = "model.layers.0"
    names = ["model.embed_tokens.weight", f"{layer}.self_attn.q_proj.weight", f"{layer}.mlp.up_proj.weight"]
    bucket = [(name, torch.ones(256, 256)) for name in names] + [(f"{layer}.self_attn.q_proj.bias", torch.ones(256))]
    quantized = dict(fp8(bucket))
    assert quantized[f"{layer}.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    assert quantized[f"{layer}.self_attn.q_proj.weight_scale_inv"].shape == (2, 2)
    assert len(quantized) == 5
    assert quantized[f"{layer}.mlp.up_proj.weight"].dtype == torch.float32


@pytest.mark.parametrize(("capability", "scale"), [((9, 0), 3 / 448), ((10, 0), 2**-7)])
def test_block_scales_are_of_the_gpus_kind(tmp_path, monkeypatch, capability, scale):
    sizes = {"hidden_size": 128, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 128}
    Qwen2Config(**sizes).save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu = torch.device("cuda")
    monkeypatch.setattr(quantization, "takes_power_of_two", lambda kind, device: takes_power_of_two(kind, gpu))
    name = "model.layers.0.self_attn.q_proj.weight"
    sent = dict(Fp8(ModelConfig(path=str(tmp_path)))([(name, torch.full((128, 128), 3.0))]))
    assert sent[f"{name}_scale_inv"].item() == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize(
    ("method", "kind"), [("disk", DiskWeightSync), ("tensor", TensorWeightSync), ("distributed", DistributedWeightSync)]
)
def test_the_configured_method(method, kind):
    config = load_config(None, [f"weight_sync.method={method}", "weight_sync.timeout_seconds=12"])
    with closing(make_weight_sync(config, ["http://127.0.0.1:1/"])) as sync:
        assert (
            isinstance(sync, ServerWeightSync)
            and type(sync) is kind
            and sync.timeout_seconds == 12
            and sync.engines == ["http://127.0.0.1:1"]
        )


def test_an_engine_on_any_of_this_hosts_addresses_is_local():
    addresses = {
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET
    }
    assert "127.0.0.1" in addresses
    for address in addresses | {"localhost"}:
        assert is_local(f"http://{address}:30000")
    assert not is_local("http://192.0.2.7:30000")  # RFC 5737: an address that no host has
    assert not is_local("http://no-such-host.invalid:30000")


@pytest.mark.parametrize("answers", ["an_error", "nothing"])
def test_an_engine_is_to_blame_where_the_learners_half_fails_first(engines, answers):
    """Without a name nobody would be started again, and the run would end."""
    good, bad = Future(), Future()
    good.set_result({})
    if answers == "an_error":
        threading.Timer(0.2, bad.set_exception, [RuntimeError("connection reset")]).start()
    own = Future()
    own.set_exception(RuntimeError("gloo: connection closed by peer"))
    with (
        DistributedWeightSync(["http://good", "http://bad"], timeout_seconds=1) as sync,
        pytest.raises(WeightSyncError, match="closed by peer") as error,
    ):
        sync._await_together(own, {"http://good": good, "http://bad": bad}, "/update_weights_from_distributed")
    assert error.value.engines == ("http://bad",)


def test_a_broadcast_that_begins_after_a_refusal_stays_in_its_group(engines, monkeypatch):
    """In torch's default group, which None means, it would take what the learner's ranks say to one another."""
    engine = engines(faults={"/update_weights_from_distributed": (400, {"success": False, "message": "no"})})
    used, group, answered = [], object(), threading.Event()
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *_, group, **options: used.append(group) or Future())
    monkeypatch.setattr(distributed, "_leave", lambda *arguments: None)
    with DistributedWeightSync([engine.url], timeout_seconds=5) as sync, ThreadPoolExecutor(1) as busy:
        sync._pool, sync._group = busy, group
        busy.submit(answered.wait)
        with pytest.raises(WeightSyncError, match="no"):
            sync._send(BUCKETS[0])
        answered.set()
    assert used == [group]


def test_an_engine_that_comes_late_to_a_failed_rendezvous_is_sent_away(engines, monkeypatch):
    """It would wait for half an hour, and answer nobody meanwhile."""
    sent_away = []

    def come_late(count: int):
        port = late.calls[-1][1]["master_port"]
        time.sleep(1.0)  # several times as long as the store is open
        store = torch.distributed.TCPStore("127.0.0.1", port, 3, is_master=False, timeout=timedelta(seconds=60))
        with pytest.raises(torch.distributed.DistError):
            store.get("never set")
        sent_away.append(True)
        return 400, {"success": False, "message": "the group did not come"}

    def fail(*arguments):
        raise RuntimeError("no route to host")

    monkeypatch.setattr(distributed, "_join_group", fail)
    monkeypatch.setattr(distributed, "BLAME_SECONDS", 0.1)
    monkeypatch.setattr(distributed, "_STORE_OPEN_SECONDS", 0.2)
    late = engines(faults={"/init_weights_update_group": come_late})
    with (
        DistributedWeightSync([late.url], timeout_seconds=60) as sync,
        pytest.raises(WeightSyncError, match="the learner's side: no route to host"),
    ):
        sync.push(BUCKETS, 1)
    assert sent_away
