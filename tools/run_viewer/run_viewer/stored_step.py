"""A step of a run on disk: its responses, and what the learner computed of those it trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from run_files import check_run_directory
from run_files.parquet_files import damage_named, read_parquet
from run_files.steps import RowKey, question_of, read_estimates, step_path, stored_steps
from untrusted import load_own_json
from untrusted.errors import InputError

Estimates = Mapping[str, npt.NDArray[np.float32]]

ROW_COLUMNS = ("group_id", "index", "finish_reason", "reward", "reward_info", "tool_calls", "extra_info")
"""With one value a response; the last three are JSON."""
TOKEN_COLUMNS = ("prompt_ids", "response_ids", "loss_mask", "rollout_log_probs", "turn_ids", "weight_versions")
OPTIONAL_COLUMNS = ("segment", "prompt", "timing")
_CALL = {"name": "", "arguments": "", "status": "", "seconds": 0.0, "output_truncated": False, "output_tokens": 0,
         "position": -1, "started": None}  # fmt: skip
"""What a tool call says, and what it is taken to say where it does not, or says something of another kind."""


@dataclass(frozen=True)
class StoredResponse:
    """A row of a step's file; README.md of run_files describes its columns.

    Attributes:
        prompt_ids: int32 [P].
        response_ids, loss_mask, rollout_log_probs, turn_ids, weight_versions: of each response token [R]; int32, bool,
            float32, int16, int32.
        prompt: as text; "" where the file has none.
        timing: JSON; None where the file has none.
    """

    key: RowKey
    prompt_ids: npt.NDArray[np.int32]
    response_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    rollout_log_probs: npt.NDArray[np.float32]
    turn_ids: npt.NDArray[np.int16]
    weight_versions: npt.NDArray[np.int32]
    finish_reason: str
    reward: float
    reward_info: Mapping[str, Any]
    tool_calls: Sequence[Mapping[str, Any]]
    extra_info: Mapping[str, Any]
    prompt: str
    timing: str | None

    @classmethod
    def of_row(cls, row: Mapping[str, Any], problems: list[str] | None = None) -> StoredResponse:
        """The response in a row of ROW_COLUMNS and TOKEN_COLUMNS, and of OPTIONAL_COLUMNS where it has them.

        Args:
            problems: gets a sentence for each column that should be JSON and is not, in whose place nothing is then;
                None: that is an error.

        Raises:
            ValueError: columns of tokens have other lengths than the response, or a text is no JSON.
        """

        def parsed(name: str, kind: type) -> Any:
            try:
                value = kind() if row[name] is None else load_own_json(row[name])
            except ValueError as error:
                if problems is None:
                    raise InputError(f"column {name!r} is no JSON: {error}") from error
                problems.append(f"a column that should be JSON is none: {error}")
                return kind()
            return value if isinstance(value, kind) else kind()

        dtypes = (np.int32, np.int32, np.bool_, np.float32, np.int16, np.int32)
        tokens: dict[str, Any] = {
            name: np.asarray(row[name], dtype) for name, dtype in zip(TOKEN_COLUMNS, dtypes, strict=True)
        }
        result = cls(
            key=(row["group_id"], row["index"], row.get("segment") or 0),
            **tokens,
            finish_reason=str(row["finish_reason"]),
            reward=float(row["reward"]),
            reward_info=parsed("reward_info", dict),
            tool_calls=[_call(call) for call in parsed("tool_calls", list) if isinstance(call, dict)],
            extra_info=parsed("extra_info", dict),
            prompt=row.get("prompt") or "",
            timing=row.get("timing"),
        )
        for name in TOKEN_COLUMNS[2:]:
            if getattr(result, name).shape != result.response_ids.shape:
                raise InputError(
                    f"response {result.name}: {name} has {len(getattr(result, name))} entries for "
                    f"{len(result.response_ids)} response tokens"
                )
        return result

    @property
    def name(self) -> str:
        """Group and index, for messages."""
        return f"{self.key[0]}/{self.key[1]}"

    @property
    def accuracy(self) -> float:
        """The reward function's acc in [0, 1]; without one, whether the reward is positive."""
        given = self.reward_info.get("acc")
        return float(given if isinstance(given, int | float) else self.reward > 0)

    @property
    def num_turns(self) -> int:
        """Messages after the prompt: assistant turns plus tool results, as verl counts them."""
        return int(self.turn_ids.max(initial=-1)) + 1 + len(self.tool_calls)


def _call(stored: Mapping[str, Any]) -> dict[str, Any]:
    result = {}
    for name, default in _CALL.items():
        kind = int | float if default is None or isinstance(default, float) else type(default)
        result[name] = stored[name] if isinstance(stored.get(name), kind) else default
    return result


def question_in(extra_info: Mapping[str, Any], prompt: str = "") -> str:
    """What a response was asked: ``question``, or the last user message of ``prompt``, of its extra_info; else
    ``prompt``, as text."""
    given = extra_info.get("prompt")
    messages = [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []
    return str(extra_info.get("question") or question_of(messages, prompt))


@dataclass(frozen=True)
class ViewedStep:
    """
    Attributes:
        responses: in the order of the file.
        estimates: columns [R] by the row's key, of the responses that were trained on.
    """

    number: int
    responses: list[StoredResponse]
    estimates: Mapping[RowKey, Estimates]

    def find(self, group_id: int, index: int, segment: int = 0) -> StoredResponse:
        """A response.

        Raises:
            ValueError: the step has none such; the message says which it has.
        """
        rows = {response.key: response for response in self.responses}
        if (group_id, index, segment) in rows:
            return rows[group_id, index, segment]
        segments = sorted(third for *rollout, third in rows if rollout == [group_id, index])
        if segments:
            raise InputError(f"--segment {segment}: response {group_id}/{index} has segments {segments}")
        indices = sorted({second for first, second, _ in rows if first == group_id})
        if indices:
            raise InputError(f"--index {index}: group {group_id} of step {self.number} has responses {indices}")
        groups = list(dict.fromkeys(group for group, *_ in rows))
        raise InputError(f"--group {group_id}: step {self.number} has groups {', '.join(map(str, groups))}")


def load_step(run_dir: Path, number: int | None = None) -> ViewedStep:
    """Step ``number``, or the newest.

    Raises:
        FileNotFoundError: there is no such run, or it has not stored the step.
        UnreadableFile: a file is damaged.
    """
    check_run_directory(run_dir)
    folder = run_dir / "rollouts"
    steps = stored_steps(folder)
    if not steps:
        raise FileNotFoundError(f"{folder} has no step_N.parquet: the run has not finished a step yet")
    if number is not None and number not in steps:
        raise FileNotFoundError(
            f"{folder} has no {step_path(folder, number).name}: --step can be one of {steps[0]} to {steps[-1]}"
        )
    number = steps[-1] if number is None else number
    path, learner = step_path(folder, number), step_path(folder, number, "learner")
    responses = []
    for place, row in enumerate(read_parquet(path, [*ROW_COLUMNS, *TOKEN_COLUMNS], OPTIONAL_COLUMNS).to_pylist()):
        with damage_named(f"{path}, row {place}"):
            responses.append(StoredResponse.of_row(row))
    return ViewedStep(number, responses, read_estimates(learner) if learner.is_file() else {})
