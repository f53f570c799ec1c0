"""The HTTP service: SandboxFusion's API, typed outcomes, files, output, freshness of every request."""

from __future__ import annotations

import base64
import concurrent.futures
import urllib.error
import urllib.request

import pytest
from sandboxes import Sandbox

from code_interpreter.protocol import Outcome


def test_answer_has_the_shape_of_sandbox_fusion(sandbox: Sandbox) -> None:
    status, body = sandbox.post(
        {
            "code": "print(input())",
            "language": "python",
            "compile_timeout": 10,
            "run_timeout": 10,
            "memory_limit_MB": -1,
            "stdin": "hello",
            "files": {},
            "fetch_files": [],
        }
    )
    assert status == 200
    assert body.pop("run_result").keys() == {"status", "execution_time", "return_code", "stdout", "stderr"}
    assert body == {
        "status": "Success",
        "message": "",
        "compile_result": None,
        "executor_pod_name": None,
        "files": {},
        "outcome": "finished",
        "truncated": False,
    }


@pytest.mark.parametrize(
    ("code", "status", "run_status", "return_code", "outcome"),
    [
        ("print(1)", "Success", "Finished", 0, "finished"),
        ("1/0", "Failed", "Finished", 1, "finished"),
        ("import sys; sys.exit(7)", "Failed", "Finished", 7, "finished"),
        ("import sys; sys.exit('words')", "Failed", "Finished", 1, "finished"),
        ("import os; os._exit(3)", "Failed", "Finished", 3, "finished"),
        ("x = (", "Failed", "Finished", 1, "compile_error"),
        ("x = '\ud800'", "Failed", "Finished", 1, "compile_error"),
        ("x = 'a\0b'", "Failed", "Finished", 1, "compile_error"),
        ("import time; time.sleep(9)", "Failed", "TimeLimitExceeded", None, "time_limit_exceeded"),
        ("x = bytes(1 << 40)", "Failed", "Finished", 1, "memory_limit_exceeded"),
        ("raise MemoryError", "Failed", "Finished", 1, "memory_limit_exceeded"),
        ("import ctypes; ctypes.string_at(0)", "Failed", "Finished", -11, "finished"),
        ("", "Success", "Finished", 0, "finished"),
    ],
)
def test_outcomes(
    sandbox: Sandbox, code: str, status: str, run_status: str, return_code: int | None, outcome: str
) -> None:
    limit = 0.4 if "sleep" in code else 15
    _, body = sandbox.post({"code": code, "language": "python", "run_timeout": limit})
    run = body["run_result"]
    assert (body["status"], run["status"], run["return_code"], body["outcome"]) == (
        status,
        run_status,
        return_code,
        outcome,
    )


def test_traceback_shows_the_codes_own_frames_alone(sandbox: Sandbox) -> None:
    result = sandbox.run("def f(x):\n    return 1 / x\n\nf(0)")
    assert [line for line in result.stderr.splitlines() if line.strip(" ~^")] == [  # Pythons underline other parts
        "Traceback (most recent call last):",
        '  File "main.py", line 4, in <module>',
        "    f(0)",
        '  File "main.py", line 2, in f',
        "    return 1 / x",
        "ZeroDivisionError: division by zero",
    ]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"language": "cpp"}, "language"),
        ({"code": 3}, "code"),
        ({"code": None}, "code"),
        ({"run_timeout": -1}, "run_timeout"),
        ({"run_timeout": "soon"}, "run_timeout"),
        ({"stdin": 5}, "stdin"),
        ({"files": ["a"]}, "files"),
        ({"files": {"a.txt": "no base64!"}}, "files"),
        ({"fetch_files": "a.txt"}, "fetch_files"),
        ({"memory_limit_MB": 1.5}, "memory_limit_MB"),
        ({"print_last_expression": 1}, "print_last_expression"),
    ],
)
def test_bad_requests_name_the_field(sandbox: Sandbox, fields: dict, named: str) -> None:
    status, body = sandbox.post({"code": "print(1)", "language": "python", **fields})
    assert (status, body["outcome"], body["status"]) == (422, "invalid_request", "SandboxError")
    assert body["message"].startswith(named)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe"])
def test_bodies_that_are_no_json_object(sandbox: Sandbox, body: bytes) -> None:
    assert sandbox.post(body)[0] == 422


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("1 + 1", "2\n"),
        ("x = 5\nx", "5\n"),
        ("'text'", "'text'\n"),
        ("print(3)", "3\n"),
        ("None", ""),
        ("x = 5", ""),
        ("for i in range(2): i", ""),
        ("print(1)\n2", "1\n2\n"),
        ("def f(): return 4\nf()  # comment", "4\n"),
        ("1; 2", "2\n"),
        ("", ""),
    ],
)
def test_last_expression_is_printed_on_request(sandbox: Sandbox, code: str, printed: str) -> None:
    assert sandbox.run(code, print_last_expression=True).stdout == printed
    if printed and "print" not in code:
        assert sandbox.run(code, print_last_expression=False).stdout == ""


def test_line_numbers_are_right_with_the_last_expression_printed(sandbox: Sandbox) -> None:
    result = sandbox.run("x = 0\n\n\n1 / x", print_last_expression=True)
    assert '"main.py", line 4' in result.stderr


def test_stdin_of_any_length(sandbox: Sandbox) -> None:
    text = "".join(f"line {i}\n" for i in range(200_000))
    result = sandbox.run("import sys\nprint(sum(len(line) for line in sys.stdin))", stdin=text.encode())
    assert result.stdout == f"{len(text)}\n"


def test_stdin_that_is_not_read(sandbox: Sandbox) -> None:
    assert sandbox.run("print(1)", stdin=b"x" * 1_000_000).stdout == "1\n"
    with_end = sandbox.run("print(input()); print(input())", stdin=b"only one")
    assert "EOFError" in with_end.stderr


def test_half_a_megabyte_of_output_is_complete(sandbox: Sandbox) -> None:
    result = sandbox.run("print('a' * 524288)")
    assert result.ok and not result.truncated and result.stdout == "a" * 524288 + "\n"


def test_longer_output_loses_its_middle_and_says_so(sandbox: Sandbox) -> None:
    result = sandbox.run("print('start'); print('a' * 3_000_000); print('end')")
    assert result.ok and result.truncated and "stdout truncated: 3000011 bytes" in result.message
    assert result.stdout.startswith("start\n") and result.stdout.endswith("a\nend\n")
    assert "bytes left out" in result.stdout


def test_output_before_a_time_out_is_kept(sandbox: Sandbox) -> None:
    result = sandbox.run("print('before', flush=True)\nwhile True: pass", run_timeout=1.0)
    assert (result.outcome, result.stdout) == (Outcome.TIME_LIMIT_EXCEEDED, "before\n")


def test_binary_output(sandbox: Sandbox) -> None:
    result = sandbox.run(r"import sys; sys.stdout.buffer.write(b'\xff\x00ok\xc3'); sys.stderr.buffer.write(b'\xfe')")
    assert result.ok and result.stdout == "\ufffd\x00ok\ufffd" and result.stderr == "\ufffd"


def test_unicode(sandbox: Sandbox) -> None:
    result = sandbox.run("print('π ≈ 3', input())", stdin="日本".encode())
    assert result.stdout == "π ≈ 3 日本\n"


def test_multiprocessing_that_starts_new_interpreters(sandbox: Sandbox) -> None:
    code = """
import multiprocessing
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool: print(pool.map(abs, [-5]))
"""
    assert sandbox.run(code).stdout == "[5]\n"


def test_streams_that_the_code_replaces_or_closes(sandbox: Sandbox) -> None:
    assert sandbox.run("import io, sys\nprint('seen')\nsys.stdout = io.StringIO()\nprint('x')").stdout == "seen\n"
    assert sandbox.run("import sys\nprint('seen')\nsys.stdout.close()").ok


def test_order_of_output_of_child_processes(sandbox: Sandbox) -> None:
    code = "import os, subprocess\nprint('a', flush=True)\nsubprocess.run(['echo', 'b'])\nprint('c')"
    assert sandbox.run(code).stdout == "a\nb\nc\n"


def test_files_in_and_out(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 1000
    code = """
data = open("in/data.bin", "rb").read()
open("out.bin", "wb").write(data[::-1])
open("main2.py", "w").write("")
print(len(data), open("note.txt").read())
"""
    result = sandbox.run(
        code, files={"in/data.bin": data, "note.txt": b"hi"}, fetch_files=("out.bin", "main2.py", "never.txt")
    )
    assert result.stdout == "256000 hi\n"
    assert dict(result.files) == {"out.bin": data[::-1], "main2.py": b""}


def test_input_files_can_be_imported(sandbox: Sandbox) -> None:
    assert sandbox.run("import mine\nprint(mine.value)", files={"mine.py": b"value = 5"}).stdout == "5\n"


def test_files_are_fetched_after_a_time_out(sandbox: Sandbox) -> None:
    code = "open('kept.txt', 'w').write('kept')\nwhile True: pass"
    result = sandbox.run(code, run_timeout=1.0, fetch_files=("kept.txt",))
    assert result.outcome is Outcome.TIME_LIMIT_EXCEEDED and dict(result.files) == {"kept.txt": b"kept"}


def test_requests_do_not_share_random_numbers(sandbox: Sandbox) -> None:
    code = "import random, numpy as np\nprint(random.random(), np.random.rand())"
    draws = [sandbox.run(code).stdout.split() for _ in range(3)]
    assert len({first for first, _ in draws}) == len({second for _, second in draws}) == 3


def test_modules_are_imported_already(sandbox: Sandbox) -> None:
    result = sandbox.run("import sys\nprint('numpy' in sys.modules, any(m.startswith('tools') for m in sys.modules))")
    assert result.stdout == "True False\n"


def test_a_module_that_a_library_loads_on_use_is_not_loaded_for_each_request(sandbox: Sandbox) -> None:
    assert sandbox.run("import sys\nprint('numpy.random' in sys.modules)").stdout == "False\n"


def test_usual_libraries_work(sandbox: Sandbox) -> None:
    code = """
import numpy as np, multiprocessing, subprocess, sys, tempfile, threading, concurrent.futures
print(round(float(np.linalg.det(np.eye(3) * 2)), 6))
with multiprocessing.Pool(2) as pool: print(pool.map(abs, [-1, -2]))
with concurrent.futures.ThreadPoolExecutor(2) as pool: print(list(pool.map(abs, [-3])))
with tempfile.NamedTemporaryFile("w+") as file: file.write("x"); file.flush(); print(open(file.name).read())
print(subprocess.run([sys.executable, "-c", "print(9)"], capture_output=True, text=True).stdout.strip())
import colorsys; print(colorsys.rgb_to_hsv(0, 0, 0)[0])
"""
    result = sandbox.run(code)
    assert result.stdout == "8.0\n[1, 2]\n[3]\nx\n9\n0.0\n", result


def test_main_module_behaves_as_a_script(sandbox: Sandbox) -> None:
    code = """
import sys, os, dataclasses, pickle
@dataclasses.dataclass
class Point:
    x: int
print(__name__, sys.argv, pickle.loads(pickle.dumps(Point(3))).x, os.path.exists(os.getcwd()))
if __name__ == "__main__": print("main")
print(open(__file__).read().count("marker"))
import atexit; atexit.register(lambda: print("bye"))
"""
    assert sandbox.run(code).stdout == "__main__ ['main.py'] 3 True\nmain\n1\nbye\n"


def test_many_at_once(sandbox: Sandbox) -> None:
    def square(i: int) -> bool:
        return sandbox.run(f"print({i} ** 2)").stdout == f"{i * i}\n"

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert all(pool.map(square, range(64)))


def test_pages(sandbox: Sandbox) -> None:
    assert sandbox.get("/v1/ping") == '"pong"'
    sandbox.run("print(1)")
    metrics = sandbox.get("/metrics")
    assert 'sandbox_requests_total{outcome="finished"}' in metrics and "sandbox_queue_seconds_bucket" in metrics
    assert sandbox.health["isolation"] in ("namespaces", "bubblewrap", "rlimits")
    assert sandbox.health["status"] == ("degraded" if sandbox.isolation == "rlimits" else "ok")


@pytest.mark.parametrize("header", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"}])
@pytest.mark.parametrize("path", ["/run_code", "/session/create", "/health"])
def test_pages_of_other_sites_are_refused(sandbox: Sandbox, path: str, header: dict[str, str]) -> None:
    body = None if path == "/health" else b'{"code": "print(1)"}'
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(urllib.request.Request(sandbox.process.url + path, body, header), timeout=10)


def test_request_of_a_client_that_knows_sandbox_fusion_alone(sandbox: Sandbox) -> None:
    """Fields with null, and files with null content, as its schema allows."""
    content = base64.b64encode(b"1").decode()
    body = {"code": "print(open('a').read())", "language": "python", "stdin": None, "files": {"a": content, "b": None}}
    assert sandbox.post(body)[1]["run_result"]["stdout"] == "1\n"
