from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_retool import scratch
from megatron_retool.config import EngineConfig
from megatron_retool.config.rollout import EngineAdaptersConfig, SpeculativeConfig
from megatron_retool.planning.models import MODELS
from sglang_cpu_engine import PYTHON_PATH
from sglang_rollout.engine import process_guard
from sglang_rollout.engine.base import EngineStartError
from sglang_rollout.engine.client import KEEP_ALIVE_SECONDS
from sglang_rollout.engine.launch_command import EXACT_PLUGIN, EXPERT_DTYPE_VARIABLE, PLUGINS, resolve_device
from sglang_rollout.engine.process import SGLangServer
from tests.kit import markov_policy
from untrusted.process_tree import descendants


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory, tokenizer):
    return markov_policy.save(
        markov_policy.random_model(tokenizer, 0), tokenizer, tmp_path_factory.mktemp("engine") / "model"
    )


def make_engine(model_directory, tmp_path, device="cpu", **kwargs) -> SGLangServer:
    config = kwargs.pop("config", None) or EngineConfig(device=device, **kwargs.pop("settings", {}))
    return SGLangServer(config, model_path=model_directory, log_file=tmp_path / "engine.log", **kwargs)


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [({}, 32768), ({"context_length": 40000}, 40000), ({"max_total_tokens": 512, "context_length": 40000}, 512)],
)
def test_an_engine_on_a_cpu_has_a_bounded_cache(model_directory, tmp_path, settings, tokens) -> None:
    """SGLang's own choice is most of the machine's memory."""
    command = make_engine(model_directory, tmp_path, settings=settings).command()
    assert command[command.index("--max-total-tokens") + 1] == str(tokens)
    assert "--max-total-tokens" not in make_engine(model_directory, tmp_path, device="cuda", settings={}).command()


def flag(engine: SGLangServer, name: str) -> str | None:
    command = engine.command()
    return command[command.index(name) + 1] if name in command else None


@pytest.mark.parametrize(("requests", "states"), [(None, "192"), (10, "30")])
def test_an_engine_on_a_cpu_has_bounded_states(model_directory, tmp_path, requests, states):
    settings = {"max_running_requests": requests}
    assert flag(make_engine(model_directory, tmp_path, settings=settings), "--max-mamba-cache-size") == states
    on_a_gpu = make_engine(model_directory, tmp_path, device="cuda", settings=settings)
    assert flag(on_a_gpu, "--max-mamba-cache-size") is None


def test_cpu_engine_gets_what_sglang_lacks_there(model_directory, tmp_path):
    engine = make_engine(model_directory, tmp_path, settings={"max_total_tokens": 4096, "random_seed": 3, "threads": 2})
    environment = engine.environment()
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(PYTHON_PATH)
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1" and environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["OMP_NUM_THREADS"] == "2"
    assert int(environment["SGLANG_TIMEOUT_KEEP_ALIVE"]) > KEEP_ALIVE_SECONDS
    assert flag(engine, "--device") == "cpu" and flag(engine, "--attention-backend") == "torch_native"
    assert flag(engine, "--max-total-tokens") == "4096" and flag(engine, "--weight-version") == "0"
    assert "--skip-tokenizer-init" in engine.command()
    assert "--mem-fraction-static" not in engine.command()


@pytest.mark.parametrize(("device", "backend"), [("cpu", "torch_native"), ("cuda", "csgmv")])
def test_an_engine_is_told_of_the_adapters_that_it_may_get(model_directory, tmp_path, device, backend):
    adapters = EngineAdaptersConfig(max_rank=16, targets=["attention"], per_batch=3)
    engine = make_engine(model_directory, tmp_path, device=device, settings={"adapters": adapters})
    command = engine.command()
    assert {"--enable-lora", "--lora-strict-loading"} <= set(command) and flag(engine, "--lora-backend") == backend
    assert flag(engine, "--max-lora-rank") == "16" and flag(engine, "--max-loras-per-batch") == "3"
    names = command[command.index("--lora-target-modules") + 1 :]
    assert names[:4] == ["k_proj", "o_proj", "q_proj", "v_proj"] and names[4].startswith("--")
    assert "--enable-lora" not in make_engine(model_directory, tmp_path, device=device).command()


def test_weights_that_no_sync_brings_back_are_kept_where_the_engine_sleeps(model_directory, tmp_path):
    for colocated, stay in ((True, True), (True, False), (False, True)):
        engine = make_engine(model_directory, tmp_path, device="cuda", colocated=colocated, weights_stay=stay)
        assert ("--enable-weights-cpu-backup" in engine.command()) == (colocated and stay)


@pytest.mark.parametrize(
    ("model", "targets", "reason"),
    [
        ("qwen3-30b-a3b", ["attention", "mlp"], ""),
        ("qwen1.5-moe-a2.7b", ["attention", "mlp"], "mlp: SGLang adapts these in a mixture of experts"),
        ("deepseek-v3", ["attention"], "latent attention"),
        ("qwen3.5-9b", ["mlp"], "gated delta net"),
        ("smollm3-3b", ["attention"], "no class of its own"),
    ],
)
def test_what_an_engine_cannot_adapt_is_named_before_it_starts(tmp_path, model, targets, reason):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    settings = {"adapters": EngineAdaptersConfig(max_rank=16, targets=targets)}
    engine = make_engine(tmp_path, tmp_path, settings=settings)
    if not reason:
        assert flag(engine, "--max-lora-rank") == "16"
        return
    with pytest.raises(EngineStartError, match=f"does not fit family .*{reason}.*max_rank=0"):
        engine.command()


@pytest.mark.parametrize(("context", "longer"), [(4096, True), (4090, True), (4089, False), (4097, False)])
def test_the_context_can_be_filled(model_directory, tmp_path, context, longer):
    engine = make_engine(model_directory, tmp_path, settings={"context_length": context})
    assert flag(engine, "--context-length") == str(context + 7)
    # A context that is itself longer than the model's 4,096 is still refused.
    assert ("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN" in engine.environment()) == longer


def test_cuda_engine_gets_no_shim(model_directory, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PYTHON_PATH), str(EXACT_PLUGIN), "/somewhere"]))
    engine = make_engine(
        model_directory, tmp_path, device="cuda", settings={"tensor_parallel_size": 4}, colocated=True,
        gpu_ids=[4, 5, 6, 7], tokenizer=True,
    )  # fmt: skip
    environment = engine.environment()
    assert environment["PYTHONPATH"] == os.pathsep.join([str(PLUGINS), "/somewhere"])
    assert "SGLANG_USE_CPU_ENGINE" not in environment and "SGLANG_EXTERNAL_MODEL_PACKAGE" not in environment
    assert environment["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert flag(engine, "--tp-size") == "4" and flag(engine, "--mem-fraction-static") == "0.7"
    assert "--enable-memory-saver" in engine.command()
    assert "--device" not in engine.command() and "--skip-tokenizer-init" not in engine.command()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_routed_experts_travel_in_the_type_that_they_fit_into(tmp_path, monkeypatch, device):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PLUGINS), "/somewhere"]))
    model = Path(__file__).parents[2] / "kit" / "traced_model"
    engine = make_engine(model, tmp_path, device=device, routed_experts=True)
    environment = engine.environment()
    assert "--enable-return-routed-experts" in engine.command()
    assert environment["PYTHONPATH"].split(os.pathsep).count(str(PLUGINS)) == 1
    assert environment[EXPERT_DTYPE_VARIABLE] == "uint8"
    engine = make_engine(model, tmp_path, device=device)
    assert "--enable-return-routed-experts" not in engine.command()
    assert EXPERT_DTYPE_VARIABLE not in engine.environment()


def test_an_fp8_engine_that_waits_for_synced_weights_has_their_layout(model_directory, tmp_path):
    settings = {"quantization": "fp8"}
    waiting = make_engine(model_directory, tmp_path, device="cuda", settings=settings, weights_from_sync=True)
    override = json.loads(flag(waiting, "--json-model-override-args"))
    assert override["quantization_config"]["weight_block_size"] == [128, 128]
    assert flag(waiting, "--load-format") == "dummy" and flag(waiting, "--quantization") is None
    alone = make_engine(model_directory, tmp_path, device="cuda", settings=settings)
    assert flag(alone, "--quantization") == "fp8" and flag(alone, "--load-format") is None
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    (quantized / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    assert flag(make_engine(quantized, tmp_path, device="cuda", settings=settings), "--quantization") is None


def test_groups_of_experts_and_of_attention_are_passed_on(model_directory, tmp_path):
    experts = Path(__file__).parents[2] / "kit" / "traced_model"
    settings = {"tensor_parallel_size": 4}
    assert flag(make_engine(experts, tmp_path, device="cuda", settings=settings), "--ep-size") == "4"
    settings |= {"expert_parallel_size": 1, "attention_data_parallel_size": 2}
    own = make_engine(experts, tmp_path, device="cuda", settings=settings)
    assert flag(own, "--ep-size") == "1" and flag(own, "--attn-dp-size") == "2"
    dense = make_engine(model_directory, tmp_path, device="cuda", settings={"tensor_parallel_size": 4})
    assert flag(dense, "--ep-size") is None and flag(dense, "--attn-dp-size") is None
    for name in ("expert_parallel_size", "attention_data_parallel_size"):
        with pytest.raises(EngineStartError, match=f"{name} above 1 needs CUDA"):
            make_engine(experts, tmp_path, settings={"tensor_parallel_size": 2, name: 2}).command()


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        ("deepseek-v3", "4"),
        ("mixtral-8x7b", "4"),
        ("gpt-oss-20b", "4"),
        ("qwen3-next-80b-a3b", "4"),
        ("granite-4.0-h-tiny", "4"),
        ("granite-4.0-h-micro", None),
        ("nemotron-3-nano-30b-a3b", "4"),
        ("qwen3-8b", None),
    ],
)
def test_every_mixture_of_experts_spreads_them_over_the_engines_gpus(tmp_path, model, groups):
    """By what the model has: the names of few of these classes have "Moe", and dense Granite 4's has it too."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    engine = make_engine(tmp_path, tmp_path, device="cuda", settings={"tensor_parallel_size": 4})
    assert flag(engine, "--ep-size") == groups


def test_experts_of_a_model_without_a_family_are_spread_where_the_settings_say_so(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OtherMoeForCausalLM"], "num_experts": 8}))
    settings = {"tensor_parallel_size": 4}
    assert flag(make_engine(tmp_path, tmp_path, device="cuda", settings=settings), "--ep-size") is None
    settings |= {"expert_parallel_size": 4}
    assert flag(make_engine(tmp_path, tmp_path, device="cuda", settings=settings), "--ep-size") == "4"


def test_speculative_decoding_is_passed_on_with_the_draft_models_weights_safe(model_directory, tmp_path):
    ngram = SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=8)
    plain = make_engine(model_directory, tmp_path, device="cuda", settings={"speculative": ngram}, colocated=True)
    assert flag(plain, "--speculative-algorithm") == "NGRAM" and flag(plain, "--speculative-num-draft-tokens") == "8"
    assert "--enable-draft-weights-cpu-backup" not in plain.command()
    draft = SpeculativeConfig(algorithm="EAGLE3", draft_model_path="/draft", num_steps=3, eagle_topk=1)
    settings = {"speculative": draft, "quantization": "fp8"}
    drafted = make_engine(
        model_directory, tmp_path, device="cuda", settings=settings, colocated=True, weights_from_sync=True
    )
    assert (
        flag(drafted, "--speculative-draft-model-path") == "/draft" and flag(drafted, "--speculative-num-steps") == "3"
    )
    assert flag(drafted, "--speculative-eagle-topk") == "1"
    assert "--enable-draft-weights-cpu-backup" in drafted.command()
    # Only the policy's weights may start empty.
    assert flag(drafted, "--load-format") == "dummy" and flag(drafted, "--speculative-draft-load-format") == "auto"
    with pytest.raises(EngineStartError, match="algorithm=NGRAM needs CUDA"):
        make_engine(model_directory, tmp_path, settings={"speculative": ngram}).command()
    assert flag(make_engine(model_directory, tmp_path), "--speculative-algorithm") is None


def test_ranks_without_numa_nodes_are_told_their_cores(model_directory, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    engine = make_engine(model_directory, tmp_path, settings={"tensor_parallel_size": 2, "threads": 2})
    assert engine.environment()["SGLANG_CPU_OMP_THREADS_BIND"] == "0,1|2,0"


def test_a_dying_server_does_not_wait_for_core_dumps(model_directory, tmp_path, monkeypatch):
    engine = SGLangServer(EngineConfig(device="cpu"), model_path=model_directory, log_file=tmp_path / "log")
    assert engine.environment()["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"] == "0"
    assert engine.environment()["SGLANG_PYSPY_DUMP_BEFORE_CRASH"] == "0"
    monkeypatch.setenv("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "1")
    assert engine.environment()["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"] == "1"


def test_the_learners_process_group_is_not_the_engines(model_directory, tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    environment = make_engine(model_directory, tmp_path).environment()
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} & set(environment)


def test_extra_arguments_come_last(model_directory, tmp_path):
    engine = make_engine(model_directory, tmp_path, settings={"extra_args": ["--page-size", "16"]})
    assert engine.command()[-2:] == ["--page-size", "16"]


def test_device_auto_without_a_driver_is_cpu(monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda self: False)
    assert resolve_device("auto") == "cpu"
    assert resolve_device("cuda") == "cuda"


def test_a_directory_that_is_no_model(tmp_path):
    with pytest.raises(EngineStartError, match="no config.json"):
        make_engine(tmp_path, tmp_path).start()


def test_missing_torchvision_says_where_it_was_looked_for(model_directory, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_RETOOL_TORCHVISION", str(tmp_path / "nothing"))
    with pytest.raises(EngineStartError, match="MEGATRON_RETOOL_TORCHVISION"):
        make_engine(model_directory, tmp_path).start()


def test_a_port_in_use_is_reported_before_anything_starts(model_directory, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        engine = make_engine(model_directory, tmp_path, port=port)
        with pytest.raises(EngineStartError, match=f"port {port} on 127.0.0.1 is in use"):
            engine.start()
    assert not engine.is_alive()


class FakeServer(SGLangServer):
    """Runs another command in place of SGLang."""

    script = ""

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.script]


def test_a_port_that_is_lost_while_the_server_starts_is_replaced(model_directory, tmp_path):
    """SGLang prints a hundred lines behind the one that says so."""
    engine = FakeServer(EngineConfig(device="cpu"), model_path=model_directory, log_file=tmp_path / "engine.log")
    engine.script = (
        "print('[Errno 98] address already in use'); [print('more') for _ in range(100)]; raise SystemExit(3)"
    )
    with pytest.raises(EngineStartError, match="A port it needs is in use"):
        engine.start()
    assert engine.log_file.read_text().count("Errno 98") == 3


def fake(model_directory, tmp_path, script, **settings) -> FakeServer:
    engine = FakeServer(
        EngineConfig(device="cpu", **settings), model_path=model_directory, log_file=tmp_path / "engine.log"
    )
    engine.script = script
    return engine


def test_a_server_that_dies_at_start_is_reported_at_once_with_its_log(model_directory, tmp_path):
    engine = fake(model_directory, tmp_path, "print('RuntimeError: not enough memory'); raise SystemExit(3)")
    began = time.monotonic()
    with pytest.raises(EngineStartError) as error:
        engine.start()
    assert time.monotonic() - began < 10
    message = str(error.value)
    assert "exit code 3" in message and "RuntimeError: not enough memory" in message
    assert "lower rollout.engine.mem_fraction_static" in message and str(tmp_path / "engine.log") in message


def test_a_silent_server_is_ended_at_the_deadline(model_directory, tmp_path):
    engine = fake(model_directory, tmp_path, "import time; time.sleep(60)", start_timeout_seconds=1.0)
    with pytest.raises(EngineStartError, match="not ready after 1 s"):
        engine.start()
    assert not engine.is_alive()


# A server with a worker in a session of its own that ignores SIGTERM: the worst that a stop has to deal with.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1] if len(sys.argv) > 1 else {path!r}, "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
time.sleep(600)
"""


def read_pid(path: Path) -> int:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.02)
    raise AssertionError(f"{path} was not written")


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def gone(pid: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_stop_ends_the_whole_tree(model_directory, tmp_path):
    marker = tmp_path / "pid"
    engine = fake(model_directory, tmp_path, STUBBORN.format(path=str(marker)))
    engine.launch()
    grandchild = read_pid(marker)
    began = time.monotonic()
    engine.stop()
    assert time.monotonic() - began < 10
    assert gone(grandchild, 1.0)
    engine.stop()


def maps_shared_memory(marker: Path, name: str) -> str:
    """What SGLang does: a script that maps a file of /dev/shm and leaves it there."""
    return (
        f"import mmap, os, time\nhandle = open('/dev/shm/{name}', 'w+b')\nhandle.truncate(4096)\n"
        "memory = mmap.mmap(handle.fileno(), 4096)\n"
        f"open({str(marker)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )


def test_stop_removes_the_shared_memory_that_sglang_leaves(model_directory, tmp_path):
    marker, name = tmp_path / "pid", f"sglang_test_{os.getpid()}"
    engine = fake(model_directory, tmp_path, maps_shared_memory(marker, name))
    engine.launch()
    read_pid(marker)
    assert Path("/dev/shm", name).exists()
    engine.stop()
    assert not Path("/dev/shm", name).exists()


@pytest.mark.parametrize("victim", ["server", "guard"])
def test_shared_memory_of_a_killed_server_is_removed(model_directory, tmp_path, monkeypatch, victim):
    """The guard does it; where that one is killed too, whatever removes the run's temporary files."""
    marker, name = tmp_path / "pid", f"sglang_{victim}_{os.getpid()}"
    file = Path("/dev/shm", name)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv(scratch.VARIABLE, raising=False)
    try:
        with scratch.scratch_directory() as directory:
            engine = fake(model_directory, tmp_path, maps_shared_memory(marker, name))
            engine.launch()
            server = read_pid(marker)
            eventually((directory / "shared_memory" / name).exists)
            os.kill(server if victim == "server" else engine.pid, signal.SIGKILL)
            if victim == "server":
                eventually(lambda: not file.exists())
            assert gone(server)
            engine.stop()
        assert not file.exists()
    finally:
        file.unlink(missing_ok=True)


def test_nothing_survives_the_death_of_the_parent(tmp_path):
    marker = tmp_path / "pid"
    guard = Path(process_guard.__file__)
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, subprocess, sys, time\n"
            f"subprocess.Popen([sys.executable, '-S', {str(guard)!r}, str(os.getpid()), '0.2', sys.executable, '-c', "
            f"{STUBBORN.format(path=str(marker))!r}], start_new_session=True)\n"
            "time.sleep(600)",
        ]
    )
    grandchild = read_pid(marker)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert gone(grandchild)


def test_a_stopped_process_below_the_engine_is_seen():
    """One that is only stopped answers nobody and closes no connection: its requests would wait for ever."""
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    parent = subprocess.Popen([sys.executable, "-c", script])
    try:
        while not (children := descendants(parent.pid)):
            time.sleep(0.02)
        assert process_guard.stopped_process(parent.pid) is None
        os.kill(children[0], signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while process_guard.stopped_process(parent.pid) != children[0]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(children[0], signal.SIGKILL)
    finally:
        parent.kill()
        parent.wait()
    assert process_guard.stopped_process(parent.pid) is None


def test_a_thread_that_ends_does_not_take_the_engine_with_it(model_directory, tmp_path):
    import threading

    marker = tmp_path / "pid"
    engine = fake(model_directory, tmp_path, STUBBORN.format(path=str(marker)))
    starter = threading.Thread(target=engine.launch)
    starter.start()
    starter.join()
    grandchild = read_pid(marker)
    time.sleep(2 * process_guard.POLL_SECONDS)
    assert engine.is_alive() and not gone(grandchild, 0.1)
    engine.stop()


def test_a_command_that_does_not_exist(model_directory, tmp_path):
    class Missing(SGLangServer):
        def command(self):
            return ["/no/such/program"]

    engine = Missing(EngineConfig(device="cpu"), model_path=model_directory, log_file=tmp_path / "engine.log")
    with pytest.raises(EngineStartError, match="cannot run /no/such/program"):
        engine.start()
