"""The command and the environment that it makes, and a real server against transformers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_cpu_engine import PYTHON_PATH, SERVER_ARGUMENTS, WITHOUT_VARIABLE, command, environment

# Where an environment may keep torchvision away from processes that it would break beside a CPU build of torch.
APART = Path(sys.prefix, "sglang_only")
PROMPT, NEW_TOKENS = list(range(5, 45)), 12


def test_the_environment() -> None:
    found = environment({"PYTHONPATH": f"/mine{os.pathsep}{PYTHON_PATH}"}, threads=2)
    assert found["PYTHONPATH"] == f"{PYTHON_PATH}{os.pathsep}/mine"
    assert (found["OMP_NUM_THREADS"], found["CUDA_VISIBLE_DEVICES"]) == ("2", "")
    assert not {"SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_EXTERNAL_MODEL_PACKAGE", WITHOUT_VARIABLE} & set(found)
    others = environment({}, tensor_parallel_size=2, model_class="a.b:C", without=("rotary", "norm"))
    assert len(others["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2
    assert others["SGLANG_CPU_ENGINE_MODEL_CLASS"] == "a.b:C"
    assert others[WITHOUT_VARIABLE] == "norm,rotary"


@pytest.mark.parametrize("size", ["--tp", "--tp-size", "--tensor-parallel-size"])
def test_the_command_line(size: str) -> None:
    line, variables = command.server(["--model-path", "model", "--threads", "2", size, "2"])
    assert line[3:] == [*SERVER_ARGUMENTS, "--model-path", "model", size, "2"]
    assert [len(cores.split(",")) for cores in variables["SGLANG_CPU_OMP_THREADS_BIND"].split("|")] == [2, 2]
    with pytest.raises(SystemExit):
        command.server(["--threads", "0"])


def test_a_version_that_it_is_not_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command.why_not() is None
    pinned = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'"sglang=={command.SGLANG_VERSION}"' in pinned
    monkeypatch.setattr(command, "SGLANG_VERSION", "0.5.99")
    assert "pip install sglang==0.5.99" in str(command.why_not())


SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
DELTA_NETS = {
    "head_dim": 16, "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 32, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {"qwen2": SIZES, "qwen3_5_text": {**SIZES, **DELTA_NETS}}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = tmp_path / "model"
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **MODELS[request.param])
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    kept = json.loads((directory / "config.json").read_text())  # transformers leaves a key out that SGLang reads
    (directory / "config.json").write_text(json.dumps({**MODELS[request.param], **kept}))
    return directory


def asked(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        text = reply.read()
        return json.loads(text) if text else None


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_real_server_computes_what_transformers_does(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(APART) if APART.is_dir() else None]))
    settings = ["--port", str(port), "--dtype", "float32", "--max-total-tokens", "2048", "--skip-tokenizer-init"]
    settings += ["--max-mamba-cache-size", "12"]
    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "sglang_cpu_engine.command", "--model-path", str(model), *settings],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 300
        while True:
            assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            try:
                asked(port, "/health_generate")
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
        sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
        reply = asked(port, "/generate", {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True})
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    log_probs, tokens = zip(*((pair[0], pair[1]) for pair in reply["meta_info"]["output_token_logprobs"]), strict=True)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = reference(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1)
    assert expected.argmax(-1).tolist() == list(tokens)
    torch.testing.assert_close(torch.tensor(log_probs), expected.max(-1).values, rtol=0, atol=1e-5)
