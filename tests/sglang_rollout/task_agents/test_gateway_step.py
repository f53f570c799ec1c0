"""benchmarks/gateway_step.py without a run: which steps are the agent's, and what it makes of their metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from benchmarks import gateway_step
from sglang_rollout.groups import Changes
from sglang_rollout.rollout_manager import RolloutManager


def written(run_dir, steps):
    """metrics.jsonl of steps whose built-in half takes 2 s and 1 s of generation for 1,000 tokens."""
    with open(run_dir / "metrics.jsonl", "w") as file:
        for step in steps:
            row = {"step": step, "timing_s/step": 2.0, "timing_s/gen": 1.0, "rollout/sampled_tokens": 1000.0}
            if step % 2:
                slower = 10.0 if step == 1 else 1.1
                row |= {"timing_s/step": 2.0 * slower, "timing_s/gen": 1.2, "rollout/sampled_tokens": 1200.0}
                row["agent/outcome/finished"] = 1.0
            file.write(json.dumps(row) + "\n")


def test_the_report_is_of_whole_pairs_after_the_first(tmp_path, capsys):
    written(tmp_path, range(1, 10))
    gateway_step.report(tmp_path)
    step, generation, pairs = capsys.readouterr().out.splitlines()
    assert step == "step: 2.20 s through the gateway, 2.00 s built-in: 1.100 times, 0.917 for each sampled token"
    assert generation.endswith("1.20 s through the gateway, 1.00 s built-in: 1.200 times, 1.000 for each sampled token")
    assert pairs.startswith("3 pairs;")


def test_steps_that_do_not_alternate_are_no_measurement(tmp_path):
    written(tmp_path, range(1, 10))
    lines = (tmp_path / "metrics.jsonl").read_text().replace("agent/outcome/finished", "another").splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    with pytest.raises(AssertionError):
        gateway_step.pairs(tmp_path)


def test_every_other_stream_is_the_agents_and_ends_with_its_caller(monkeypatch):
    seen = []

    async def stream(self, prompts, sampling):
        try:
            for prompt in prompts:
                seen.append((self.task_agents, prompt, (yield [prompt])))
        finally:
            seen.append("ended")

    def made(self):
        self.task_agents = "agents"

    monkeypatch.setattr(RolloutManager, "__init__", made)
    monkeypatch.setattr(RolloutManager, "stream", stream)
    changes = Changes(abort=[7])

    async def scenario():
        manager = gateway_step.AlternatingManager()
        for _ in range(3):
            async with contextlib.aclosing(manager.stream([1, 2, 3], None)) as groups:
                assert [await anext(groups), await groups.asend(changes)] == [[1], [2]]
            assert seen[-1] == "ended"
        return [group async for group in manager.stream([4], None)]

    assert asyncio.run(scenario()) == [[4]]
    assert [each for each in seen if each != "ended"] == [
        ("agents", 1, changes),
        (None, 1, changes),
        ("agents", 1, changes),
        (None, 4, None),
    ]
