"""An environment of the package verifiers as an agent, through the real gateway with a scripted engine."""

from __future__ import annotations

import signal

import pytest

from tests.sglang_rollout.task_agents.test_examples import call, played

pytest.importorskip("verifiers", reason="needs the package verifiers: bash scripts/setup.sh")

ENVIRONMENT = '''
import verifiers as vf
from datasets import Dataset


def multiply(first: int, second: int) -> str:
    """Multiply two whole numbers."""
    return str(first * second)


def right(completion, answer) -> float:
    return float(completion[-1]["content"] == f"It is {answer}.")


def load_environment(size):
    rows = [{"question": f"What is {6 * (n + 1)} * 7?", "answer": str(42 * (n + 1))} for n in range(size)]
    rubric = vf.Rubric(funcs=[right], weights=[0.5])
    return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[multiply], rubric=rubric, max_turns=4)
'''


@pytest.fixture
def settings(tmp_path, monkeypatch):
    (tmp_path / "some_sums.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    return {"environment": "some-sums", "arguments": {"size": 3}}


def test_a_verifiers_environment_leads_its_rollouts(tokenizer, settings):
    read = []

    def says(text: str) -> str:
        read.append(text)
        first = int(text.partition("What is ")[2].partition(" *")[0])
        found = text.rpartition("<tool_response>\n")[2].partition("\n</tool_response>")[0]
        return f"It is {found}." if found.isdigit() else call("multiply", first=first, second=7)

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    asked = {}
    for uid in ("a", "b", "c", "d", "a"):
        task = {"uid": uid, "purpose": "train"}
        end, texts, turns = played(tokenizer, "verifiers_environment", says, task=task, **settings)
        assert end.outcome == "finished" and turns == [2], end
        found = {name: end.result[name] for name in ("score", "right", "num_turns", "multiply_calls")}
        assert found == {"score": 0.5, "right": 1.0, "num_turns": 2.0, "multiply_calls": 1.0}
        question = texts[0][0].partition("What is ")[2].partition("?")[0]
        assert asked.setdefault(uid, question) == question
    assert len(set(asked.values())) > 1 and "Multiply two whole numbers." in read[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_verifiers_knows_by_the_errors_words_that_a_context_is_full(tokenizer, settings):
    task = {"uid": "a", "purpose": "validation"}
    end, texts, _ = played(tokenizer, "verifiers_environment", lambda read: "no", task=task, room=20, **settings)
    assert end.outcome == "finished" and not texts
