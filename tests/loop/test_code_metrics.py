import json

import pytest

from megatron_retool.loop.code_metrics import MAX_CLASSIFIED, code_metrics, code_of, evenly_chosen, lines_of
from megatron_retool.loop.metrics import rollout_metrics
from megatron_retool.trajectory import FinishReason, ToolCall, Trajectory


def call(code, status="ok", position=-1):
    return ToolCall("code_interpreter", json.dumps({"code": code}), status, 0.1, position=position)


UNREADABLE = ToolCall("code_interpreter", '{"code": "print(1)', "parse_error", 0.0)
LOOKUP = ToolCall("search", '{"query": "code"}', "ok", 0.1)


def response(tokens, right, *calls):
    return Trajectory(
        [1], [3] * tokens, [True] * tokens, [-0.5] * tokens, [0] * tokens, [0] * tokens, 0, 0, FinishReason.STOP,
        reward=1.0 if right else -1.0, reward_info={"acc": float(right)}, tool_calls=list(calls),
    )  # fmt: skip


SEARCH = "for i in range(9):\n    if i * i == 4:\n        print(i)"
ROWS = [
    # Two lines that fail, then one (a comment and an empty line apart) that runs.
    response(100, True, call("x = 1\nprint(y)", "error", 20), call("# again\n\nprint(1)", "ok", 60)),
    # Three lines and one that run, one that does not.
    response(50, False, call(SEARCH, "ok", 30), call("print(2)", "ok", 40), call("print(", "error", 45)),
    # Nothing that is code: a call that could not be read, and another tool's.
    response(40, False, UNREADABLE, LOOKUP),
    response(10, True),
]


def test_numbers_worked_out_by_hand():
    assert code_metrics(ROWS) == pytest.approx(
        {
            "code/ratio": 2 / 4,
            "code/lines_per_response": 8 / 4,
            "code/lines_per_call": 8 / 5,
            "code/correct_calls": 3,
            "code/pass_rate": 3 / 5,
            "code/pass_rate/right": 1 / 2,
            "code/pass_rate/wrong": 2 / 3,
            "code/last_pass_rate/right": 1.0,
            "code/last_pass_rate/wrong": 0.0,
            "code/first_call_position": (20 / 100 + 30 / 50) / 2,
            "code/purpose/calculation": 3 / 5,
            "code/purpose/search": 1 / 5,
            "code/purpose/verification": 0.0,
            "code/purpose/plot": 0.0,
            "code/purpose/unparsed": 1 / 5,
            # Of three responses with a call that failed, the first mends it.
            "code/self_correction_rate": 1 / 3,
        }
    )
    assert code_metrics(ROWS).items() <= rollout_metrics(ROWS).items()


@pytest.mark.parametrize("rows", [[], [response(5, True)], ROWS[2:]])
def test_without_code_there_is_nothing(rows):
    assert code_metrics(rows) == {}


def test_what_no_response_has_is_left_out():
    metrics = code_metrics([response(8, False, call("print(1)"))])
    assert not {"code/pass_rate/right", "code/first_call_position", "code/self_correction_rate"} & metrics.keys()
    assert metrics["code/pass_rate/wrong"] == 1.0


def test_a_call_that_could_not_be_read_is_corrected_by_one_that_runs():
    assert code_metrics([response(8, True, UNREADABLE, LOOKUP, call("1"))])["code/self_correction_rate"] == 1.0
    # Neither one that ran before it nor another tool's.
    assert code_metrics([response(8, True, call("1"), UNREADABLE, LOOKUP)])["code/self_correction_rate"] == 0.0


@pytest.mark.parametrize("status", ["error", "timeout", "unknown_tool", "bad_arguments"])
def test_code_that_was_not_run_to_its_end_has_failed(status):
    metrics = code_metrics([response(8, True, call("print(1)", status))])
    assert metrics["code/pass_rate"] == metrics["code/self_correction_rate"] == 0.0


@pytest.mark.parametrize(
    "arguments", ["", "{", "[1]", "3", '{"code": 3}', '{"query": "x"}', "[" * 100_000], ids=lambda text: text[:9]
)
def test_arguments_without_code(arguments):
    assert code_of(ToolCall("code_interpreter", arguments, "bad_arguments", 0.0)) is None


def test_right_is_told_by_accuracy_and_without_one_by_the_reward():
    rows = [response(8, True, call("1")), response(8, False, call("1")), response(8, True, call("1"))]
    rows[0].reward_info = {"acc": 0.4}
    rows[1].reward_info = {"acc": 0.5}
    rows[2].reward_info = {}
    rows[2].reward, rows[2].tool_calls[0].status = -0.1, "error"
    metrics = code_metrics(rows)
    assert metrics["code/pass_rate/right"] == 1.0 and metrics["code/pass_rate/wrong"] == 0.5


def test_purposes_of_a_large_step_are_those_of_calls_from_all_over_it():
    assert evenly_chosen(range(10), 4) == [0, 2, 5, 7] and evenly_chosen(range(3), 4) == [0, 1, 2]
    # The first half calculates, the second searches.
    programs = [f"print({number})" for number in range(MAX_CLASSIFIED)] + [SEARCH] * MAX_CLASSIFIED
    metrics = code_metrics([response(1, True, *map(call, programs))])
    assert metrics["code/purpose/calculation"] == metrics["code/purpose/search"] == 0.5


def test_lines():
    assert lines_of("") == lines_of("\n  \n# a comment\n") == 0
    assert lines_of("import math\n\nprint(math.pi)  # a number\n") == 2
