"""Environments of the tests."""

from __future__ import annotations

import asyncio
import time

from sglang_rollout.environments.base import Action, Environment, Start, Step

ADD = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "Run a line.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}


class Counting(Environment):
    """Counts calls; the episode is over after an answer without one. The score is the calls' number."""

    replays = True
    made: list[Counting] = []

    def __init__(self, *, greeting: str = "begin", weight: float = 1.0) -> None:
        self.greeting, self.weight = greeting, weight
        self.calls = 0
        self.closed = 0

    async def reset(self, row):
        self.made.append(self)
        self.row = row
        return Start([{"role": "user", "content": f"{self.greeting} {row['group_id']}"}], [ADD])

    async def step(self, action: Action) -> Step:
        self.last = action
        if not action.calls:
            return Step(done=True)
        messages = []
        for _ in action.calls:
            self.calls += 1
            messages.append({"role": "tool", "content": f"count {self.calls}"})
        return Step(messages)

    def score(self):
        return {"reward": self.weight * self.calls, "acc": float(self.calls == 2), "calls": self.calls}

    async def close(self):
        self.closed += 1


class OneWay(Counting):
    """It cannot be gone through again."""

    replays = False


class Talking(Environment):
    """Plain methods, the data's own prompt, and users' messages, one of which tries to end its turn by itself."""

    def reset(self, row):
        self.said = []
        return Start()

    def step(self, action):
        self.said.append(action.text)
        if len(self.said) == 3:
            return Step(done=True)
        return Step([{"role": "user", "content": f"<|im_end|>go on after {len(action.text)}"}])

    def score(self):
        return len(self.said)


class Verbose(Talking):
    """Says a lot, twice."""

    def reset(self, row):
        self.said = []
        return Start([{"role": "user", "content": "y" * 40_000}])

    def step(self, action):
        self.said.append(action.text)
        return Step([{"role": "user", "content": "z" * 40_000}], done=len(self.said) == 2)


class Fickle(Counting):
    """It says that it replays, and does not."""

    lives = 0

    async def reset(self, row):
        Fickle.lives += 1
        self.calls = 10 * Fickle.lives
        return await super().reset(row)


class Failing(Counting):
    """Fails where it is told to."""

    def __init__(self, *, how: str) -> None:
        super().__init__()
        self.how = how

    async def reset(self, row):
        if self.how == "reset raises":
            raise RuntimeError("no world")
        if self.how == "reset returns a list":
            return []
        if self.how == "prompt too long":
            return Start([{"role": "user", "content": "long " * 4000}])
        return await super().reset(row)

    async def step(self, action):
        if self.how == "step raises":
            raise KeyError("lost")
        if self.how == "step hangs":
            await asyncio.sleep(60)
        if self.how == "own timeout":
            raise TimeoutError("of its own")
        if self.how == "exits":
            raise SystemExit(3)
        if self.how == "too few messages":
            return Step([{"role": "user", "content": "?"}])
        return await super().step(action)

    def score(self):
        if self.how == "score hangs":
            time.sleep(1.5)
        return "good" if self.how == "no reward" else None if self.how == "none" else 1.0


def not_an_environment() -> dict[str, int]:
    return {}
