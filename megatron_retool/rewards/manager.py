"""Scores trajectories: in this process where that is instant, else in a pool of processes that can be killed."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from answer_equality import score as math_reward
from megatron_retool.config import ConfigError, RewardConfig
from megatron_retool.registry import ExtensionError
from megatron_retool.rewards.base import reward_functions
from megatron_retool.rewards.by_data_source import grader_of, missing_grader
from megatron_retool.rewards.judge import Judge
from megatron_retool.rewards.overlong import length_penalties, length_penalty
from megatron_retool.rewards.process import START_SECONDS, WorkerFault, WorkerProcess
from megatron_retool.rollout_rows import AGENT_KEY, ROW_NAMES, own_extra_info, rollouts_of, whole_rollout
from megatron_retool.trajectory import FinishReason, Trajectory

logger = logging.getLogger(__name__)

JUDGE = "judge"
"""The reward function that this module asks itself, many at a time, and not a worker process one after another."""
FAILURES = ("timeout", "exception", "bad_result", "memory", "worker_died")


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids."""


class ScoredPrompt(Protocol):
    """What a reward function gets to know of a prompt."""

    @property
    def data_source(self) -> str:
        """Which data set the prompt comes from."""

    @property
    def ground_truth(self) -> Any:
        """What the reward function compares with."""

    @property
    def extra_info(self) -> dict[str, Any]:
        """Further columns of the prompt's row."""


class RewardManager:
    """Fills ``reward`` and ``reward_info`` of trajectories.

    reward_info: score (before shaping), acc, pred and whatever else the function returned; overlong_penalty where
    shaping is on; overlong_filtered: True where overlong filtering says that the response must give no loss; failure
    and failure_message where the function failed. Keys of others that are there before scoring stay.

    A failure never stops a run: the response gets ``failure_score``, the failure is one of ``FAILURES`` and counted
    (``take_metrics``), for each purpose by itself: validation may run while training generates. A function that cannot
    be loaded does stop it, when the manager is made; ``check_reward`` also calls it.

    ``score`` may be called from several threads.
    """

    def __init__(self, config: RewardConfig, tokenizer: Decoder, max_response_length: int | None = None) -> None:
        """
        Args:
            config: the ``reward`` section.
            tokenizer: decodes responses.
            max_response_length: data.max_response_length, which overlong.mode needs.

        Raises:
            ConfigError: the reward function cannot be loaded, or the overlong settings contradict each other.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._penalty = added_to_reward(config, max_response_length)
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._lock = threading.Lock()
        self._workers: list[WorkerProcess] = []
        self._own = threading.local()
        self._judge = Judge(config.judge) if config.function == JUDGE else None
        # What the worker processes score with: beside a judge, the grader that it is compared with.
        self._scoring = _grading(config) if self._judge is not None else config
        # A thread for each worker: the kernel ties a worker's life to the thread that started it.
        self._threads = ThreadPoolExecutor(max(config.processes, 1), thread_name_prefix="reward")
        try:
            if self._scoring is None:
                pass
            elif self._scoring.function in reward_functions.names:
                reward_functions.bind(self._scoring.function, self._scoring.function_kwargs)
            else:
                self._threads.submit(self._worker).result()
        except ExtensionError as error:
            self.close()
            raise ConfigError(str(error)) from error

    def score(self, trajectories: Sequence[Trajectory], purpose: str = "train") -> None:
        """Score all of them; returns when every one has a reward. ``purpose`` names the counts that they go into.

        The rows of a rollout get one reward, that of their responses end to end. Where an agent has given the reward
        itself, it stands.
        """
        waiting = []
        rollouts = rollouts_of(trajectories)
        for rows in rollouts:
            whole = whole_rollout(rows)
            own = whole.reward_info.get(AGENT_KEY, {}).get("result")
            if own is not None:
                self._fill(rows, whole, dict(own))
                continue
            request = self._request(whole)
            asked = None
            if self._judge is not None:
                prompt = self._tokenizer.decode(_ids(whole.prompt_ids), skip_special_tokens=True)
                asked = self._judge.submit(request, prompt, purpose)
            waiting.append((rows, whole, asked, self._graded(request)))
        for rows, whole, asked, graded in waiting:
            replies = [future.result() for future in (asked, graded) if future is not None]
            info = self._info(replies[0], purpose)
            if len(replies) == 2 and "failure" not in info and "result" in replies[1]:
                info["judge_against_grader"] = float(info["acc"] != replies[1]["result"]["acc"])
            self._fill(rows, whole, info)
        with self._lock:
            self._counts[purpose]["scored"] += len(rollouts)

    def take_metrics(self, purpose: str = "train") -> dict[str, float]:
        """reward/scored and reward/failures/<kind> of ``purpose`` since the last call."""
        with self._lock:
            counts = self._counts.pop(purpose, Counter())
        names = {"scored": "reward/scored", **{kind: f"reward/failures/{kind}" for kind in FAILURES}}
        metrics = {name: float(counts[count]) for count, name in names.items()}
        return metrics if self._judge is None else metrics | self._judge.take_metrics(purpose)

    def close(self) -> None:
        """End the worker processes, and what a judge is being asked."""
        if self._judge is not None:
            self._judge.close()
        with self._lock:
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> RewardManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, trajectory: Trajectory) -> dict[str, Any]:
        extra = trajectory.extra_info
        turns = trajectory.turn_ids
        final = trajectory.response_ids[turns == turns.max()] if len(turns) and turns.max() >= 0 else []
        return {
            "data_source": str(extra.get("data_source", "unknown")),
            "solution_str": self._tokenizer.decode(_ids(trajectory.response_ids), skip_special_tokens=False),
            "ground_truth": extra.get("ground_truth"),
            "extra_info": {
                **{name: extra[name] for name in ROW_NAMES if name in extra},
                **own_extra_info(extra),
                "final_turn": self._tokenizer.decode(_ids(final), skip_special_tokens=True),
                "num_turns": trajectory.num_turns,
                "tool_calls": [{"name": call.name, "status": call.status} for call in trajectory.tool_calls],
                "finish_reason": trajectory.finish_reason.value,
                **{name: trajectory.reward_info[name] for name in ("tools",) if name in trajectory.reward_info},
            },
        }

    def _graded(self, request: dict[str, Any]) -> Future[dict[str, Any]] | None:
        """The future of a worker's reply; a whole number is graded at once. None: only the judge is asked."""
        if self._scoring is None:
            return None
        if self._scoring.function == "math":
            with contextlib.suppress(Exception):  # a worker says what is wrong with it
                info = math_reward.quick_score(**request)
                if info is not None:
                    done: Future[dict[str, Any]] = Future()
                    done.set_result({"result": info})
                    return done
        return self._threads.submit(self._reply, request)

    def _info(self, reply: dict[str, Any], purpose: str) -> dict[str, Any]:
        """A response's reward_info from a worker's or the judge's reply."""
        if "result" in reply:
            return dict(reply["result"])
        with self._lock:
            self._counts[purpose][reply["failure"]] += 1
        return {
            "score": self._config.failure_score,
            "acc": 0.0,
            "pred": None,
            "failure": reply["failure"],
            "failure_message": reply["message"],
        }

    def _reply(self, request: dict[str, Any]) -> dict[str, Any]:
        """What a worker says; where it is lost at it, another one is asked once more."""
        message = ""
        for _ in range(2):
            try:
                return self._worker().ask(request, self._config.timeout_seconds)
            except WorkerFault as fault:
                message = str(fault)
                logger.warning("reward: a worker is lost (%s) and replaced", message)
        return {"failure": "worker_died", "message": message}

    def _worker(self) -> WorkerProcess:
        worker: WorkerProcess | None = getattr(self._own, "worker", None)
        if worker is None or not worker.alive:
            if worker is not None:
                worker.kill()
                with self._lock:
                    if worker in self._workers:
                        self._workers.remove(worker)
            assert self._scoring is not None
            worker = WorkerProcess(self._scoring)
            self._own.worker = worker
            with self._lock:
                self._workers.append(worker)
        return worker

    def _fill(self, rows: Sequence[Trajectory], trajectory: Trajectory, info: dict[str, Any]) -> None:
        """The same for all ``rows`` of a rollout; ``trajectory`` is the whole of it."""
        info = dict(info)
        penalty = 0.0
        if self._penalty is not None:
            penalty = self._penalty(len(trajectory.response_ids))
            info["overlong_penalty"] = penalty
        if self._config.overlong.filter and trajectory.finish_reason is FinishReason.LENGTH:
            info["overlong_filtered"] = True
        for row in rows:
            row.reward = float(info["score"]) + penalty
            # What rollout wrote there stays: where a branch of ARPO began.
            row.reward_info = {**row.reward_info, **info}


def added_to_reward(config: RewardConfig, max_response_length: int | None) -> Callable[[int], float] | None:
    """What the section ``overlong`` adds to the reward of a response of so many tokens; None: nothing.

    Raises:
        ConfigError: its mode cannot be loaded, or its settings do not fit one another.
    """
    overlong = config.overlong
    if overlong.mode == "none":
        return None
    if max_response_length is None:
        raise ConfigError(f"reward.overlong.mode={overlong.mode} needs data.max_response_length")
    try:
        bound = length_penalties.bind(overlong.mode, overlong.kwargs, settings=overlong)
        for length in (0, max_response_length):
            length_penalty(bound, length, max_response_length)
    except ExtensionError as error:
        raise ConfigError(str(error)) from error
    return lambda length: length_penalty(bound, length, max_response_length)


def check_reward(config: RewardConfig, prompt: ScoredPrompt | None = None) -> None:
    """Load a function of one's own in a process of its own, and score one answer to ``prompt``: its truth in a box.

    For a built-in function, only the keyword arguments are checked.

    Raises:
        ConfigError: the function cannot be loaded or called with reward.function_kwargs, raises, ends its process,
            takes too long, or returns what is no reward.
    """
    if config.function == JUDGE:
        _check_judge(config, prompt)
        return
    try:
        if config.function in reward_functions.names:
            reward_functions.bind(config.function, config.function_kwargs)
            return
        worker = WorkerProcess(config)
    except ExtensionError as error:
        raise ConfigError(str(error)) from error
    if prompt is None:
        worker.kill()
        return
    try:
        request = _made_up(prompt)
        reply = worker.ask(request, max(config.timeout_seconds, START_SECONDS))
    except WorkerFault as fault:
        reply = {"failure": "worker_died", "message": str(fault)}
    finally:
        worker.kill()
    if "result" not in reply:
        raise ConfigError(
            f"reward.function={config.function}: {reply['failure']} on a prompt of {prompt.data_source!r}, answered by "
            f"its ground truth: {reply['message']}. Correct the function, reward.function_kwargs, or the data's "
            "columns that it reads"
        )


def _made_up(prompt: ScoredPrompt) -> dict[str, Any]:
    """An answer to ``prompt``: its truth in a box."""
    answer = f"\\boxed{{{prompt.ground_truth}}}"
    return {
        "data_source": prompt.data_source,
        "solution_str": answer,
        "ground_truth": prompt.ground_truth,
        "extra_info": {
            "data_source": prompt.data_source,
            "ground_truth": prompt.ground_truth,
            **prompt.extra_info,
            "final_turn": answer,
            "num_turns": 1,
            "tool_calls": [],
            "finish_reason": FinishReason.STOP.value,
        },
    }


def _grading(config: RewardConfig) -> RewardConfig | None:
    """What scores beside the judge; None: nothing does."""
    grader = config.judge.grader
    return None if grader == "none" else dataclasses.replace(config, function=grader)


def _check_judge(config: RewardConfig, prompt: ScoredPrompt | None) -> None:
    """As ``check_reward``, with one request to the judge where there is a prompt."""
    grading = _grading(config)
    if grading is not None:
        check_reward(grading, prompt)
    with contextlib.closing(Judge(config.judge)) as judge:
        reply = {} if prompt is None else judge.submit(_made_up(prompt), "", "check").result()
    if "failure" in reply:
        raise ConfigError(f"reward.function=judge does not answer as it should: {reply['message']}")


def check_data_sources(config: RewardConfig, data_sources: Iterable[str]) -> None:
    """Raise ConfigError if reward.function=by_data_source has no grader for one of ``data_sources``."""
    if config.function == "by_data_source":
        for data_source in sorted(set(data_sources)):
            if grader_of(data_source) is None:
                raise ConfigError(f"reward.function={config.function}: {missing_grader(data_source)}")


def _ids(ids: Any) -> list[int]:
    return [int(token) for token in ids]
