"""Whatever an agent does with its history, every trained token is trained once, in the context that sampled it."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_rollout.gateway.conversation import ConversationCall
from sglang_rollout.gateway.errors import ApiError
from sglang_rollout.gateway.session_tree import seed_of
from tests.sglang_rollout.gateway.scripted_sampler import RandomSampler

DEEDS = ("go on", "edit", "drop", "swap", "back", "compact", "retry", "cut", "ids", "strip", "two at once", "choices")
TOOLS = [{"type": "function", "function": {"name": "code_interpreter", "parameters": {"type": "object"}}}]
TEXTS = ("42", "no <|im_end|>", "\n")
STARTS = [
    [{"role": "user", "content": "question #1#"}],
    [{"role": "system", "content": "Be brief. #1#"}, {"role": "user", "content": "question #2#"}],
]
MARK = re.compile(r"#\d+#|<.im_start.>assistant")


def marks(text: str) -> tuple[str, ...]:
    """What was said by others than the policy, and where it spoke."""
    return tuple(MARK.findall(text))


class RandomAgent:
    """Keeps a history and does one deed after another to it."""

    def __init__(self, session, sampler, draw) -> None:
        self.session, self.sampler, self.draw = session, sampler, draw
        self.history = copy.deepcopy(draw(st.sampled_from(STARTS)))
        self.earlier = [self.history]
        self.answered, self.marks = 0, 9
        self.asked: Counter[tuple[str, ...]] = Counter()

    def new(self, text: str) -> str:
        """``text`` with a number that no other message has."""
        self.marks += 1
        return f"{text} #{self.marks}#"

    async def ask(self, history, choices: int = 1) -> None:
        """Go on from ``history`` with one of the answers, and what follows it."""
        call = ConversationCall(
            history, tools=self.draw(st.sampled_from([None, TOOLS])), choices=choices, max_tokens=20
        )
        answers = await self.session.answer(call)
        self.answered += choices
        shown = ["<|im_start|>assistant" if each["role"] == "assistant" else each["content"] for each in history]
        self.asked[marks("".join([*shown, "<|im_start|>assistant"]))] += choices
        answer = self.draw(st.sampled_from(answers))
        results = [
            {
                "role": "tool",
                "tool_call_id": each.id,
                "content": self.draw(st.sampled_from(["42", "no <|im_end|>", ""])),
            }
            for each in answer.calls
        ]
        self.history = [*history, answer.message(), *(results or [{"role": "user", "content": self.new("go on")}])]
        self.earlier.append(self.history)

    async def do(self, deed: str) -> None:
        history = copy.deepcopy(self.history)
        place = self.draw(st.integers(0, len(history) - 1))
        if deed == "edit":
            of_policy = history[place]["role"] == "assistant"
            history[place]["content"] += " or not" if of_policy else self.new(" or not")
        elif deed == "drop" and len(history) > 2:
            del history[place]
        elif deed == "swap" and place:
            history[place - 1], history[place] = history[place], history[place - 1]
        elif deed == "back":
            history = copy.deepcopy(self.draw(st.sampled_from(self.earlier)))
        elif deed == "compact":
            history = [history[0], {"role": "user", "content": self.new("What was:")}, *history[max(place, 1) :]]
        elif deed == "retry" and len(self.earlier) > 1:
            history = copy.deepcopy(self.earlier[-2])
        elif deed == "ids":
            for message in history:
                for call in message.get("tool_calls", ()):
                    call["id"] = "wrong"
        elif deed == "strip":
            for message in history:
                if message["role"] == "assistant":
                    message["content"] = ""
        if deed == "cut":
            self.sampler.held = asyncio.Event()
            task = asyncio.create_task(self.session.answer(ConversationCall(history, max_tokens=20)))
            for _ in range(3):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ApiError):
                await task
            self.sampler.held = None
        elif deed == "two at once":
            await asyncio.gather(self.ask(history), self.ask(copy.deepcopy(history)))
        else:
            await self.ask(history, choices=3 if deed == "choices" else 1)


def check(segments, log) -> None:
    """The invariants of session_tree.py, against what the engine saw."""
    where = {}
    for number, each in enumerate(log):
        for place, log_prob in enumerate(each.result.log_probs):
            where[np.float32(log_prob)] = (number, place)
    trained = []
    for segment in segments:
        row = [*segment.prompt_ids.tolist(), *segment.response_ids.tolist()]
        assert not segment.rollout_log_probs[~segment.loss_mask].any()
        assert (segment.turn_ids[~segment.loss_mask] == -1).all() and segment.turn_ids[0] == 0
        assert segment.loss_mask[0]
        for position in np.flatnonzero(segment.loss_mask):
            number, place = where[segment.rollout_log_probs[position]]
            sampled = log[number]
            ids = sampled.result.output_ids
            assert row[: len(segment.prompt_ids) + position] == sampled.context + ids[:place]
            assert segment.response_ids[position] == ids[place]
            assert segment.weight_versions[position] == sampled.result.weight_versions[place]
            trained.append((number, place))
    assert sorted(trained) == sorted(where.values())


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), deeds=st.lists(st.sampled_from(DEEDS), min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_every_token_is_trained_once_in_its_context(tokenizer, open_session, data, deeds, seed):
    async def run() -> None:
        sampler = RandomSampler(tokenizer, seed)
        session = open_session(sampler)
        agent = RandomAgent(session, sampler, data.draw)
        for deed in deeds:
            before = len(session.segments())
            with contextlib.suppress(ApiError):  # the template refuses some histories
                await agent.do(deed)
            assert len(session.segments()) >= before
        segments = await session.close()
        check(segments, sampler.log)
        assert Counter(marks(tokenizer.decode(each.context)) for each in sampler.log) == agent.asked
        assert sum(len(segment.calls) for segment in segments) == agent.answered == len(sampler.log)

    asyncio.run(run())


def test_a_conversation_that_only_grows_is_one_segment(tokenizer, open_session):
    async def run() -> None:
        sampler = RandomSampler(tokenizer, 3)
        session = open_session(sampler)
        history = STARTS[1]
        for turn in range(6):
            (answer,) = await session.answer(ConversationCall(history, tools=TOOLS, max_tokens=50))
            results = [{"role": "tool", "tool_call_id": call.id, "content": f"{turn}"} for call in answer.calls]
            history = [*history, answer.message(), *(results or [{"role": "user", "content": "more"}])]
        (segment,) = await session.close()
        assert segment.calls == (0, 1, 2, 3, 4, 5)
        check([segment], sampler.log)

    asyncio.run(run())


def test_a_known_turn_keeps_its_ids_in_a_new_history(tokenizer, open_session):
    """The turn is letters that tokenising its text would join; after a summary it still is."""

    async def run() -> None:
        sampler = RandomSampler(tokenizer)
        sampler.parts = sampler.parts[-1:]
        sampler.random.randint = lambda low, high: 2
        sampler.random.random = lambda: 0.0
        session = open_session(sampler)
        question = {"role": "user", "content": "question"}
        (answer,) = await session.answer(ConversationCall([question]))
        summary = [{"role": "user", "content": "In short."}, answer.message(), {"role": "user", "content": "And?"}]
        await session.answer(ConversationCall(summary))
        first, second = await session.close()
        letters = sampler.log[0].result.output_ids
        assert len(letters) == 9
        text = " ".join(map(str, second.prompt_ids.tolist()))
        assert " ".join(map(str, letters)) in text
        assert tokenizer.decode(second.prompt_ids.tolist()).count("wordword<|im_end|>\n<|im_start|>user\nAnd?") == 1
        check([first, second], sampler.log)

    asyncio.run(run())


def test_stripped_thinking_begins_a_segment(tokenizer, open_session):
    async def run() -> None:
        sampler = RandomSampler(tokenizer)
        session = open_session(sampler)
        sampler.parts = [tokenizer.encode("<think>\nhm\n</think>\nword", add_special_tokens=False)]
        sampler.random.randint = lambda low, high: 1
        sampler.random.random = lambda: 0.0
        history = [{"role": "user", "content": "question"}]
        (answer,) = await session.answer(ConversationCall(history))
        said = answer.message()
        said["content"] = said["content"].partition("</think>\n")[2]
        await session.answer(ConversationCall([*history, said, {"role": "user", "content": "And?"}]))
        _, second = await session.close()
        assert "<think>" not in tokenizer.decode(second.prompt_ids.tolist())

    asyncio.run(run())


def test_answers_of_one_history_have_seeds_of_their_own(tokenizer, open_session):
    async def run() -> None:
        sampler = RandomSampler(tokenizer)
        session = open_session(sampler, seed=11)
        history = [{"role": "user", "content": "question"}]
        await session.answer(ConversationCall(history, choices=3))
        await session.answer(ConversationCall(history))
        await session.answer(ConversationCall([{"role": "user", "content": "another"}]))
        await session.answer(ConversationCall(history, seed=5))
        seeds = [each.seed for each in sampler.log]
        assert len(set(seeds[:4])) == 4 and seeds[0] == seeds[4] == 11 and seeds[5] == 5

    asyncio.run(run())


def test_a_call_that_is_cut_leaves_its_seed_to_the_next(tokenizer, open_session):
    """Who asks again gets the answer that it would have had: how often a client gave up is nothing of a seeded run."""

    async def run() -> None:
        sampler = RandomSampler(tokenizer)
        session = open_session(sampler, seed=11)
        history = [{"role": "user", "content": "question"}]
        sampler.held = asyncio.Event()
        waiting = [asyncio.create_task(session.answer(ConversationCall(history))) for _ in range(3)]
        while sampler.started < 3:
            await asyncio.sleep(0)
        for place in (0, 1):
            waiting[place].cancel()
        await asyncio.gather(*waiting[:2], return_exceptions=True)
        with pytest.raises(ApiError):
            await session.answer(ConversationCall(history, choices=99))
        sampler.held.set()
        await waiting[2]
        await session.answer(ConversationCall(history, choices=2))
        await session.answer(ConversationCall(history))
        assert [each.seed for each in sampler.log] == [seed_of(11, draw) for draw in (2, 0, 1, 3)]

    asyncio.run(run())
