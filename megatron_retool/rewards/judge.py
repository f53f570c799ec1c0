"""A chat model as the reward function: reward.function=judge.

A response's text is put into the prompt of ``reward.judge.prompt``. Each vote is a request, or a reply that is known
already. The last match of ``verdict`` in a reply is its verdict. The mean of the votes becomes the reward: -1 for
``lowest``, 1 for ``highest``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import sqlite3
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from megatron_retool.chat_endpoint import ChatEndpoint, ChatReply, EndpointError, EndpointRefusal, EndpointSilence
from megatron_retool.config import ConfigError, JudgeConfig
from untrusted import clipped, quoted, without_surrogates

_PLACE = re.compile(r"\{(prompt|response|answer|ground_truth)\}")
_WORDS = {"yes": 1.0, "true": 1.0, "correct": 1.0, "no": 0.0, "false": 0.0, "incorrect": 0.0}
"""Verdict in words -> share of the way from lowest to highest."""
_MOST_PROMPT_BYTES = 2**20
_READ_CHARACTERS = 100_000
"""From the end of a reply: where its verdict is looked for."""


class VerdictError(ValueError):
    """A reply holds no verdict."""


class Judge:
    """Asks the model of ``settings`` about responses, many at a time, on a thread with an event loop of its own.

    Raises:
        ConfigError: the prompt's file cannot be read, or shows the judge no response; the cache cannot be opened.
    """

    def __init__(self, settings: JudgeConfig) -> None:
        self._settings = settings
        self._template = _template(settings.prompt)
        self._verdict = re.compile(settings.verdict)
        self._cache = ReplyCache(settings.cache)
        self._totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._lock = threading.Lock()
        self._asked: dict[bytes, asyncio.Task[ChatReply]] = {}
        self._next_request = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judge", daemon=True)
        self._thread.start()
        self._endpoint, self._places = self._wait(self._open())

    def submit(self, request: dict[str, Any], prompt: str, purpose: str) -> Future[dict[str, Any]]:
        """Ask about a response.

        Args:
            request: what a reward function is given.
            prompt: the trajectory's prompt as text.
            purpose: of the metrics that the requests count in.

        Returns:
            The future of {"result": {"score", "acc", "pred", "judge_verdict", ...}}, or of {"failure": kind, "message"}
            as a reward worker answers it.
        """
        return asyncio.run_coroutine_threadsafe(self._judged(self._text(request, prompt), purpose), self._loop)

    def take_metrics(self, purpose: str) -> dict[str, float]:
        """reward/judge/* of ``purpose`` since the last call."""
        with self._lock:
            totals = self._totals.pop(purpose, Counter())
        settings = self._settings
        cost = totals["prompt_tokens"] * settings.prompt_price + totals["completion_tokens"] * settings.completion_price
        names = ("requests", "cached", "prompt_tokens", "completion_tokens")
        return {**{f"reward/judge/{name}": float(totals[name]) for name in names}, "reward/judge/cost": cost / 1e6}

    def close(self) -> None:
        """End the thread; what is being asked is given up."""
        with contextlib.suppress(TimeoutError):
            self._wait(self._end(), 10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._cache.close()

    def _wait(self, coroutine: Any, timeout: float | None = None) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    async def _open(self) -> tuple[ChatEndpoint, asyncio.Semaphore]:
        settings = self._settings
        endpoint = ChatEndpoint(
            settings.url,
            settings.model,
            key=settings.api_key,
            sampling=settings.sampling,
            retries=settings.retries,
            timeout_seconds=settings.timeout_seconds,
            key_setting="reward.judge.api_key",
            address_settings="reward.judge.url and reward.judge.model",
        )
        return await endpoint.__aenter__(), asyncio.Semaphore(settings.max_concurrent)

    async def _end(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await self._endpoint.__aexit__()

    def _text(self, request: dict[str, Any], prompt: str) -> str:
        truth = request["ground_truth"]
        texts = {
            "prompt": prompt,
            "response": request["solution_str"],
            "answer": request["extra_info"]["final_turn"],
            "ground_truth": truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False, default=str),
        }
        most = self._settings.max_characters
        # In one pass: a response that holds {ground_truth} must not be told the truth.
        return _PLACE.sub(lambda place: without_surrogates(clipped(texts[place[1]], most)), self._template)

    async def _judged(self, text: str, purpose: str) -> dict[str, Any]:
        try:
            replies = await asyncio.gather(*(self._reply(text, vote, purpose) for vote in range(self._settings.votes)))
            shares = np.array([self._share(reply.text) for reply in replies])
        except EndpointSilence as error:
            return {"failure": "timeout", "message": str(error)}
        except (EndpointRefusal, EndpointError) as error:
            return {"failure": "exception", "message": str(error)}
        except VerdictError as error:
            return {"failure": "bad_result", "message": str(error)}
        mean = float(shares.mean())
        result = {"score": 2.0 * mean - 1.0, "acc": float(mean >= 0.5), "pred": None, "judge_verdict": mean}
        if len(shares) > 1:
            result["judge_disagreement"] = float(shares.std())
        return {"result": result}

    async def _reply(self, text: str, vote: int, purpose: str) -> ChatReply:
        settings = self._settings
        key = _key(settings, text, vote)
        reply = self._cache.find(key)
        if reply is not None or key in self._asked:
            with self._lock:
                self._totals[purpose]["cached"] += 1
            return reply if reply is not None else await asyncio.shield(self._asked[key])
        task = self._asked[key] = asyncio.ensure_future(self._ask(text, purpose))
        try:
            reply = await task
        finally:
            del self._asked[key]
        self._cache.keep(key, reply)
        return reply

    async def _ask(self, text: str, purpose: str) -> ChatReply:
        async with self._places:
            rate = self._settings.requests_per_minute
            if rate is not None:
                now = time.monotonic()
                self._next_request = max(now, self._next_request) + 60.0 / rate
                await asyncio.sleep(self._next_request - 60.0 / rate - now)
            reply = await self._endpoint.ask(text)
        with self._lock:
            self._totals[purpose].update(
                requests=1, prompt_tokens=reply.prompt_tokens, completion_tokens=reply.completion_tokens
            )
        return reply

    def _share(self, text: str) -> float:
        """Where a reply's verdict lies between lowest (0) and highest (1)."""
        settings = self._settings
        read = text[-_READ_CHARACTERS:]
        matches = list(self._verdict.finditer(read))
        if not matches:
            raise VerdictError(
                f"no verdict in the judge's reply {quoted(text)}: ask for one in reward.judge.prompt, or change "
                "reward.judge.verdict"
            )
        word = (matches[-1].group(1) or "").strip()
        if word.lower() in _WORDS:
            return _WORDS[word.lower()]
        try:
            value = float(word)
        except ValueError:
            raise VerdictError(f"the judge's verdict {quoted(word)} is neither a number nor yes or no") from None
        if not settings.lowest <= value <= settings.highest:
            raise VerdictError(
                f"the judge's verdict {value:g} lies outside reward.judge.lowest={settings.lowest:g} to "
                f"reward.judge.highest={settings.highest:g}"
            )
        return (value - settings.lowest) / (settings.highest - settings.lowest)


class ReplyCache:
    """Replies by what was asked: in memory, or in a file that several runs may share.

    Raises:
        ConfigError: the file is no cache, or cannot be opened.
    """

    def __init__(self, file: str | None) -> None:
        self._lock = threading.Lock()
        try:
            self._database = sqlite3.connect(file or ":memory:", timeout=30.0, check_same_thread=False)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS replies "
                "(key BLOB PRIMARY KEY, text TEXT, finish_reason TEXT, prompt_tokens INT, completion_tokens INT)"
            )
            self._database.commit()
        except sqlite3.Error as error:
            raise ConfigError(f"reward.judge.cache={file}: {error}: name another file, or set it to null") from error

    def find(self, key: bytes) -> ChatReply | None:
        """The reply that was kept under ``key``."""
        with self._lock:
            query = "SELECT text, finish_reason, prompt_tokens, completion_tokens FROM replies WHERE key = ?"
            row = self._database.execute(query, (key,)).fetchone()
        return None if row is None else ChatReply(*row)

    def keep(self, key: bytes, reply: ChatReply) -> None:
        """Remember a reply. A full disk costs the reply only: the run continues."""
        row = (key, reply.text, reply.finish_reason, reply.prompt_tokens, reply.completion_tokens)
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._database.execute("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?)", row)
            self._database.commit()

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._database.close()


def _template(file: str) -> str:
    path = Path(file)
    try:
        if path.stat().st_size > _MOST_PROMPT_BYTES:
            raise ConfigError(f"reward.judge.prompt={file} has more than {_MOST_PROMPT_BYTES} bytes: shorten it")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"reward.judge.prompt={file} cannot be read: {error}") from error
    if not {"response", "answer"} & set(_PLACE.findall(text)):
        raise ConfigError(
            f"reward.judge.prompt={file} shows the judge no response: put {{response}} or {{answer}} into it"
        )
    return text


def _key(settings: JudgeConfig, text: str, vote: int) -> bytes:
    asked = json.dumps([settings.url, settings.model, settings.sampling, text, vote], sort_keys=True, default=str)
    return hashlib.sha256(asked.encode("utf-8", "surrogatepass")).digest()
