from __future__ import annotations

import json
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from code_interpreter.protocol import ExecutionRequest, ExecutionResult, InvalidRequest, Outcome

names = st.text("abc._-", min_size=1, max_size=5).filter(lambda name: name not in (".", ".."))
paths = st.lists(names, min_size=1, max_size=3)


@given(
    st.builds(
        ExecutionRequest,
        code=st.text(),
        language=st.sampled_from(["python", "pytest", "bash"]),
        run_timeout=st.floats(0.01, 1000),
        memory_limit_mb=st.none() | st.integers(1, 10**6),
        stdin=st.text().map(lambda text: text.encode("utf-8", "surrogatepass")),
        files=st.dictionaries(
            paths.map("/".join) | paths.map(lambda parts: "/mnt/" + "/".join(parts)), st.binary(max_size=50), max_size=3
        ).filter(lambda files: not any(f"{other}/".startswith(f"{path}/") for path, other in permutations(files, 2))),
        fetch_files=st.lists(paths.map("/".join), max_size=3, unique=True).map(tuple),
        print_last_expression=st.none() | st.booleans(),
    )
)
def test_requests_survive_the_way_over_http(request: ExecutionRequest) -> None:
    assert ExecutionRequest.from_json(json.loads(json.dumps(request.to_json()))) == request


@given(
    st.builds(
        ExecutionResult,
        outcome=st.sampled_from([o for o in Outcome if o not in (Outcome.BUSY, Outcome.INVALID_REQUEST)]),
        stdout=st.text(),
        stderr=st.text(),
        return_code=st.none() | st.integers(-64, 255),
        seconds=st.floats(0, 100),
        message=st.text(),
        truncated=st.booleans(),
        files=st.dictionaries(st.text(), st.binary(max_size=50), max_size=3),
    )
)
def test_results_survive_the_way_over_http(result: ExecutionResult) -> None:
    back = ExecutionResult.from_json(json.loads(json.dumps(result.to_json())))
    if result.outcome is Outcome.SANDBOX_ERROR:
        assert (back.outcome, back.message) == (result.outcome, result.message)
    else:
        assert back == result


@pytest.mark.parametrize(
    ("status", "run_status", "outcome"),
    [
        ("Success", "Finished", Outcome.FINISHED),
        ("Failed", "Finished", Outcome.FINISHED),
        ("Failed", "TimeLimitExceeded", Outcome.TIME_LIMIT_EXCEEDED),
        ("Failed", "Error", Outcome.SANDBOX_ERROR),
        ("SandboxError", None, Outcome.SANDBOX_ERROR),
    ],
)
def test_answers_of_sandbox_fusion_itself(status: str, run_status: str | None, outcome: Outcome) -> None:
    run = run_status and {"status": run_status, "stdout": "x", "stderr": None, "return_code": 0, "execution_time": 1.0}
    result = ExecutionResult.from_json({"status": status, "message": "", "run_result": run, "files": {}})
    assert result.outcome is outcome
    assert result.stdout == ("x" if run else "") and result.stderr == ""


@pytest.mark.parametrize("body", [None, [], "text", {}, {"detail": "Not Found"}])
def test_what_is_no_answer(body: object) -> None:
    with pytest.raises(ValueError, match="not an answer"):
        ExecutionResult.from_json(body)


@given(st.text(max_size=20) | st.text("./amnt", max_size=12).map("/mnt/".__add__))
def test_no_accepted_path_leaves_the_directory(path: str) -> None:
    import os.path

    try:
        ExecutionRequest.from_json({"code": "", "fetch_files": [path]})
    except InvalidRequest:
        return
    assert os.path.normpath(os.path.join("/box", path)).startswith(("/box/", "/mnt/", "/tmp/"))


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (["l", "l/x"], "'l' is a file, and a directory"),
        (["l/x/y", "./l//x"], "'l/x' is a file, and a directory"),
        (["/tmp/a/b", "/tmp/./a"], "'/tmp/a' is a file, and a directory"),
        (["a", "./a"], "'./a' names the same place"),
        (["a/b", "a//b"], "'a//b' names the same place"),
        (["/mnt/a", "/mnt//a"], "'/mnt//a' names the same place"),
        ([""], "'' is neither"),
        (["."], "'.' is neither"),
        (["a/"], "'a/' is neither"),
        (["/"], "'/' is neither"),
        (["/etc/passwd"], "'/etc/passwd' is neither"),
        (["//tmp/a"], "'//tmp/a' is neither"),
        (["/tmp/"], "'/tmp/' is neither"),
        (["../a"], "'../a' is neither"),
        (["/tmp/../etc/a"], "is neither"),
        (["a\0b"], "is neither"),
        (["é" * 128], "is neither"),
        (["é/" * 400 + "a"], "is neither"),
        (["a/" * 600 + "a"], "is longer than 1024 bytes"),
        (["\ud800"], "is not valid Unicode"),
        ([f"{number}" for number in range(8193)], "more than 8192 files and directories"),
        ([f"{number}/" * 40 + "a" for number in range(300)], "more than 8192 files and directories"),
    ],
)
def test_files_that_cannot_be_written_side_by_side(paths: list[str], said: str) -> None:
    with pytest.raises(InvalidRequest, match="^files: ") as refusal:
        ExecutionRequest.from_json({"code": "", "files": dict.fromkeys(paths, "")})
    assert said in str(refusal.value)
    assert len(str(refusal.value)) < 400


def test_files_that_lie_in_one_directory() -> None:
    files = dict.fromkeys(["a/b", "a/c", "/tmp/a/b", "/mnt/a", "a..b/..c"], "")
    assert list(ExecutionRequest.from_json({"code": "", "files": files}).files) == list(files)
