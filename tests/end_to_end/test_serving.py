"""A run's checkpoint behind the APIs and on the terminal, on SGLang's CPU engine."""

from __future__ import annotations

import os
import re
import signal

import httpx
import openai
import pytest

from tests.end_to_end.conftest import FinishedRun, pids_of, wait_until_gone
from tests.serving.processes import lines_until, start

QUESTION = [{"role": "user", "content": "What is 17 * 23?"}]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_checkpoint_is_served_and_its_engine_comes_back(demo_run: FinishedRun) -> None:
    # The run's engine is seeded (trainer.deterministic): equal questions have equal answers.
    process, marker = start("serve", str(demo_run.run_dir), "--step", "2", "--port", "0", "--tools")
    try:
        told = lines_until(process, "health")
        assert "exporting" in told and "step 2" in told
        url = re.search(r"ANTHROPIC_BASE_URL=(\S+)", told)[1]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", timeout=300, max_retries=0)
        greedy = {"model": "any", "temperature": 0, "messages": QUESTION, "max_tokens": 40}
        first = client.chat.completions.create(**greedy)
        assert first.usage.completion_tokens > 0
        (engine, *_) = pids_of(marker, "sglang.launch_server")
        os.kill(engine, signal.SIGKILL)
        again = client.chat.completions.create(**greedy)
        assert again.choices[0].message.content == first.choices[0].message.content
        message = {"model": "any", "max_tokens": 40, "messages": QUESTION, "stop_sequences": ["1"]}
        answer = httpx.post(f"{url}/v1/messages", json=message, timeout=600)
        assert answer.status_code == 200 and answer.json()["type"] == "message"
        health = httpx.get(f"{url}/health").json()
        assert health["status"] == "ok" and health["calls"] >= 3
    finally:
        process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    assert wait_until_gone(marker, 10) == {}
    assert not (demo_run.run_dir / "weight_sync").exists()
