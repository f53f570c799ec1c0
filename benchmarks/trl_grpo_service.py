"""The code interpreter and the reward of a configuration over HTTP, for the trainer of benchmarks/trl_grpo.py.

    POST /<secret>/tool   {"code": …}                      -> {"text": what the policy reads of the call}
    POST /<secret>/score  {"rows": [N], "response_ids": [N][…]} -> {"scores": [N], "accuracies": [N], "sampled_tokens"}

A row is the number of a prompt. Both go the way that they go in a run: calls through the tool registry and the limits
of a tool result, scores through the reward manager.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from aiohttp import web

from code_interpreter.client import CodeInterpreterClient
from code_interpreter.process import SandboxServerProcess
from megatron_retool.config import Config
from megatron_retool.data.prompts import PromptRow
from megatron_retool.rewards.manager import RewardManager
from megatron_retool.trajectory import FinishReason, Trajectory
from sglang_rollout.agent.chosen_format import make_format
from sglang_rollout.agent.turn_glue import TurnGlue
from tools.registry import ToolRegistry
from tools.tool import TrajectoryInfo


class ToolAndReward:
    """Serves them on the loopback address from a thread of its own, until it is closed.

    Args:
        config: rollout.multi_turn, tools and reward of it.
        tokenizer: of the model.
        prompts: those that responses are to; a request names them by their places.

    Raises:
        SandboxServerError: the sandbox does not start.
    """

    def __init__(self, config: Config, tokenizer: Any, prompts: Sequence[PromptRow]) -> None:
        self.url = ""
        self._config = config
        self._prompts = prompts
        multi_turn = config.rollout.multi_turn
        self._glue = TurnGlue(tokenizer, make_format(multi_turn), multi_turn.max_tool_response_tokens)
        self._around = around_result(tokenizer, self._glue)
        self._header = turn_header(self._glue)
        self._tokenizer = tokenizer
        self._rewards = RewardManager(config.reward, tokenizer, config.data.max_response_length)
        token = secrets.token_urlsafe(32)
        self._sandbox = SandboxServerProcess(config.tools.code_interpreter, token=token)
        self._token = token

    def __enter__(self) -> ToolAndReward:
        started: Future[str] = Future()
        self._sandbox.start()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
        self._thread.start()
        try:
            self.url = started.result()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._close()

    def _close(self) -> None:
        self._rewards.close()
        self._sandbox.stop()

    async def _serve(self, started: Future[str]) -> None:
        try:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            client = CodeInterpreterClient([self._sandbox.url], token=self._token)
            tools = self._config.rollout.multi_turn.tools
            async with ToolRegistry.from_config(self._config.tools, tools, code_interpreter=client) as registry:
                self._tools = await registry.open(TrajectoryInfo(0, 0))
                # Whoever reaches the port could run code in the sandbox.
                secret = secrets.token_urlsafe(32)
                application = web.Application(client_max_size=2**30)
                application.router.add_post(f"/{secret}/tool", self._tool)
                application.router.add_post(f"/{secret}/score", self._score)
                runner = web.AppRunner(application, access_log=None)
                await runner.setup()
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                started.set_result(f"http://127.0.0.1:{runner.addresses[0][1]}/{secret}")
                await self._stop.wait()
                await runner.cleanup()
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            raise

    async def _tool(self, request: web.Request) -> web.Response:
        result = await self._tools.call("code_interpreter", await request.json())
        before, after = self._around
        text = self._tokenizer.decode(self._glue.render([result.text]).ids, skip_special_tokens=False)
        return web.json_response({"text": text.removeprefix(before).removesuffix(after)})

    async def _score(self, request: web.Request) -> web.Response:
        body = await request.json()
        responses = [
            as_trajectory(self._prompts[row], index, ids, self._glue.end_of_turn_id, self._header)
            for index, (row, ids) in enumerate(zip(body["rows"], body["response_ids"], strict=True))
        ]
        await asyncio.to_thread(self._rewards.score, responses)
        return web.json_response(
            {
                "scores": [response.reward for response in responses],
                "accuracies": [response.accuracy for response in responses],
                "sampled_tokens": sum(int(response.loss_mask.sum()) for response in responses),
            }
        )


def around_result(tokenizer: Any, glue: TurnGlue) -> tuple[str, str]:
    """What the chat template writes before and after a tool's result, up to the next turn."""
    texts = [tokenizer.decode(glue.render([result]).ids, skip_special_tokens=False) for result in ("0", "1")]
    before = os.path.commonprefix(texts)
    after = os.path.commonprefix([text[::-1] for text in texts])[::-1]
    return before, after


def turn_header(glue: TurnGlue) -> list[int]:
    """The ids between a tool message and the turn that follows it."""
    ids = glue.render(["0"]).ids
    return ids[len(ids) - ids[::-1].index(glue.end_of_turn_id) :]


def turns_of(ids: Sequence[int], end_of_turn: int, header: Sequence[int]) -> list[int]:
    """For each token of a response the number of its turn, -1 where the policy did not sample it.

    Args:
        end_of_turn: the token that ends a turn.
        header: ids that come before every turn but the first.
    """
    turns: list[int] = []
    turn, sampled = 0, True
    for place, token in enumerate(ids):
        turns.append(turn if sampled else -1)
        if sampled:
            sampled = token != end_of_turn
        elif list(ids[place + 1 - len(header) : place + 1]) == list(header):
            turn, sampled = turn + 1, True
    return turns


def as_trajectory(prompt: PromptRow, index: int, ids: Sequence[int], end: int, header: Sequence[int]) -> Trajectory:
    """A response as the reward manager takes it; its log-probs are not known and 0.

    Args:
        end, header: as of ``turns_of``.
    """
    turns = np.asarray(turns_of(ids, end, header), dtype=np.int16)
    known = {"data_source": prompt.data_source, "ground_truth": prompt.ground_truth, "uid": prompt.uid}
    return Trajectory(
        prompt_ids=np.asarray(prompt.prompt_ids, dtype=np.int32),
        response_ids=np.asarray(ids, dtype=np.int32),
        loss_mask=turns >= 0,
        rollout_log_probs=np.zeros(len(ids), dtype=np.float32),
        turn_ids=turns,
        weight_versions=np.where(turns >= 0, 0, -1).astype(np.int32),
        group_id=prompt.group_id,
        index=index,
        finish_reason=FinishReason.STOP if len(ids) and ids[-1] == end else FinishReason.LENGTH,
        extra_info={**known, **prompt.extra_info},
    )
