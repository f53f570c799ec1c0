"""`megatron-retool tinker` as a person starts it: Megatron-Core learns, SGLang samples, the public client asks."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from code_interpreter.process import SandboxServerProcess
from megatron_retool.config import CodeInterpreterConfig
from tests.end_to_end.conftest import ROOT, FinishedRun, kill_driver, wait_until_gone
from tests.serving.processes import lines_until, start
from tests.tinker.cookbook import COOKBOOK, run_with_cookbook
from tests.tinker.served import NAME, make_model

tinker = pytest.importorskip("tinker", reason="the client of Tinker is not installed (pyproject.toml, extra test)")
from tinker import types  # noqa: E402

from tests.tinker.test_public_client import lesson, log_probs, loss_of, taught  # noqa: E402

IDS = [(7 * place) % 60 + 20 for place in range(24)]
PROMPT = types.ModelInput.from_ints(IDS)


def server(root: Path, model: Path, name: str = NAME):
    """The process, its marker and its URL."""
    words = [
        "tinker", str(model), "--directory", str(root / "kept"), "--port", "0",
        f"tinker.names={name}", "learner.dtype=float32", "learner.lora.rank=8", "rollout.engine.dtype=float32",
        "rollout.engine.max_total_tokens=16384", "rollout.engine.max_running_requests=16",
        "rollout.engine.random_seed=1",
    ]  # fmt: skip
    process, marker = start(*words)
    text = lines_until(process, "TINKER_BASE_URL=")
    return process, marker, text.partition("TINKER_BASE_URL=")[2].split()[0]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_client_trains_and_samples_and_goes_on_after_a_kill(tmp_path: Path):
    make_model(tmp_path / "model")
    process, marker, url = server(tmp_path, tmp_path / "model")
    try:
        client = tinker.ServiceClient(base_url=url, api_key="tml-local")
        run = client.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
        losses = taught(run, IDS, 6)
        assert losses[-1] < 0.8 * losses[0]

        sampler = client.create_sampling_client(model_path=run.save_weights_for_sampler("first").result().path).result()
        learned = log_probs(run, IDS)
        sampled = np.array(sampler.compute_logprobs(PROMPT).result()[1:])
        np.testing.assert_allclose(sampled, learned, atol=2e-5)
        taught(run, IDS, 2)
        assert np.abs(log_probs(run, IDS) - learned).max() > 1e-2
        assert sampler.compute_logprobs(PROMPT).result()[1:] == sampled.tolist()

        seeded = types.SamplingParams(max_tokens=6, seed=3)
        once, again = (sampler.sample(PROMPT, 3, seeded).result() for _ in range(2))
        assert [each.tokens for each in once.sequences] == [each.tokens for each in again.sequences]
        assert len({tuple(each.tokens) for each in once.sequences}) == 3

        with pytest.raises(tinker.RequestFailedError, match="there is no such loss"):
            run.forward_backward([lesson(IDS)], "hinge").result()

        path = run.save_state("middle").result().path
        expected = taught(run, IDS, 2)
    finally:
        kill_driver(process, marker)
    process, marker, url = server(tmp_path, tmp_path / "model")
    try:
        client = tinker.ServiceClient(base_url=url, api_key="tml-local")
        resumed = client.create_training_client_from_state_with_optimizer(path).result()
        np.testing.assert_allclose(taught(resumed, IDS, 2), expected, rtol=1e-6)
        assert loss_of(resumed.forward([lesson(IDS)], "cross_entropy").result()) < expected[-1]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert not wait_until_gone(marker, 10)
    finally:
        process.kill()


@pytest.mark.rare
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not COOKBOOK.is_dir(), reason="the cookbook is not installed: bash scripts/setup.sh")
def test_the_cookbooks_loop_trains_the_demo_with_its_tool(demo_run: FinishedRun, tmp_path: Path):
    """Whether it learns takes a well taught model and 20 steps: docs/tinker.md has the figures."""
    name, steps = "Qwen/Qwen3-4B-Instruct-2507", 2
    model = demo_run.run_dir / "sft_hf"
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).symlink_to(model)
    process, marker, url = server(tmp_path, model, name)
    sandbox = SandboxServerProcess(CodeInterpreterConfig(workers=2))
    try:
        sandbox.start()
        words = [
            f"data={demo_run.run_dir}/data/train.parquet", f"log_path={tmp_path}/log", f"max_steps={steps}",
            "lora_rank=8", "groups_per_batch=4", "group_size=4",
        ]  # fmt: skip
        program = str(ROOT / "examples" / "tinker_tool_use.py")
        run_with_cookbook([program, *words], tmp_path, url, SANDBOX_URL=f"{sandbox.url}/run_code")
    finally:
        sandbox.stop()
        kill_driver(process, marker)
    found = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    found = [each for each in found if "env/all/reward/total" in each]
    assert len(found) == steps
    for each in found:
        assert each["env/all/turns_per_episode"] > 1, "no response called the tool"
        # The first order of the divergence between what the engine sampled from and the learner trains.
        assert abs(each["optim/kl_sample_train_v1"]) < 1e-5
