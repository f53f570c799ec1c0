"""bash and pytest beside Python, files below /mnt and /tmp, and the libraries that snippets find."""

from __future__ import annotations

import pytest
from sandboxes import Sandbox, start

from code_interpreter.protocol import Outcome

TESTS = """
import pytest
from mine import double

@pytest.mark.parametrize("x", [1, 2])
def test_double(x, tmp_path, capfd):
    (tmp_path / "a").write_text(str(double(x)))
    print(double(x))
    assert capfd.readouterr().out == f"{2 * x}\\n"
"""


def test_bash_runs_a_script_with_its_files_and_stdin(sandbox: Sandbox) -> None:
    code = 'read word\necho "$word" $(cat in/a.txt) "$0"\nyes | head -1\necho out > b.txt\necho low >&2\nexit 3'
    result = sandbox.run(code, language="bash", stdin=b"hi\n", files={"in/a.txt": b"text"}, fetch_files=("b.txt",))
    assert (result.outcome, result.return_code) == (Outcome.FINISHED, 3)
    assert (result.stdout, result.stderr, dict(result.files)) == ("hi text main.sh\ny\n", "low\n", {"b.txt": b"out\n"})


def test_bash_has_the_servers_python(sandbox: Sandbox) -> None:
    result = sandbox.run("python -c 'import numpy; print(6 * 7)'", language="bash", run_timeout=200.0)
    assert result.stdout == "42\n", result


@pytest.mark.parametrize(("code", "said"), [("if [", "syntax error"), ("test 1 -eq 2", ""), ("nosuch", "not found")])
def test_bash_that_fails(sandbox: Sandbox, code: str, said: str) -> None:
    _, body = sandbox.post({"code": code, "language": "bash"})
    assert (body["status"], body["run_result"]["status"], body["outcome"]) == ("Failed", "Finished", "finished")
    assert said in body["run_result"]["stderr"]


def test_bash_over_its_time(sandbox: Sandbox) -> None:
    result = sandbox.run("echo before; sleep 20", language="bash", run_timeout=3.0)
    assert (result.outcome, result.stdout, result.return_code) == (Outcome.TIME_LIMIT_EXCEEDED, "before\n", None)


def test_pytest_collects_the_code(sandbox: Sandbox) -> None:
    files = {"mine.py": b"def double(x): return 2 * x"}
    result = sandbox.run(TESTS, language="pytest", files=files, run_timeout=200.0)
    assert result.ok and "2 passed" in result.stdout, result
    files = {"mine.py": b"def double(x): return x"}
    result = sandbox.run(TESTS, language="pytest", files=files, run_timeout=200.0)
    assert (result.outcome, result.return_code) == (Outcome.FINISHED, 1) and "2 failed" in result.stdout, result


@pytest.mark.parametrize(("language", "name"), [("bash", "main.sh"), ("pytest", "./test_main.py")])
def test_files_do_not_take_the_place_of_the_code(sandbox: Sandbox, language: str, name: str) -> None:
    status, body = sandbox.post({"code": "", "language": language, "files": {name: "YQ=="}})
    assert (status, body["outcome"]) == (422, "invalid_request") and name in body["message"]


def test_files_below_mnt_and_tmp(sandbox: Sandbox) -> None:
    own = sandbox.health["own_directories"]
    assert set(own) == (set() if sandbox.isolation == "rlimits" else {"/mnt", "/tmp"})
    for directory in ("/mnt", "/tmp"):
        code = f"open('{directory}/b', 'w').write(open('{directory}/in/a').read() + '!')"
        paths = (f"{directory}/b", f"{directory}/none")
        result = sandbox.run(code, files={f"{directory}/in/a": b"text"}, fetch_files=paths)
        if directory not in own:
            assert result.outcome is Outcome.INVALID_REQUEST and f"{directory}/in/a" in result.message
            continue
        assert result.ok and dict(result.files) == {f"{directory}/b": b"text!"}, result
        # Of what the host has there, the interpreter alone is left, and it is read-only.
        held = [path for path in sandbox.health["read_only_directories"] if path.startswith(f"{directory}/")]
        found = sandbox.run(f"import os; print(os.listdir('{directory}'))").stdout
        assert found == f"{sorted({path.split('/')[2] for path in held})}\n"
        for path in held:
            for name in (f"{path}/a", path, "/".join(path.split("/")[:3])):
                assert sandbox.run("", files={name: b""}).outcome is Outcome.INVALID_REQUEST
            beside = f"{'/'.join(path.split('/')[:-1])}/b"
            assert sandbox.run(f"print(open('{beside}').read())", files={beside: b"c"}).stdout == "c\n"
            assert "Read-only" in sandbox.run(f"open('{path}/a', 'w')").stderr


def test_server_in_a_snippet(sandbox: Sandbox) -> None:
    code = """
import socket, threading
with socket.create_server(("127.0.0.1", 0)) as server:
    threading.Thread(target=lambda: server.accept()[0].sendall(b"hi"), daemon=True).start()
    print(socket.create_connection(("localhost", server.getsockname()[1]), 10).recv(10))
"""
    if sandbox.isolation != "namespaces":
        pytest.skip("no network namespace, or no name for its loopback")
    assert sandbox.run(code).stdout == "b'hi'\n"


def test_weak_isolation_refuses_absolute_paths() -> None:
    running = start("rlimits", workers=1, preimport=[])
    try:
        result = running.run("print(1)", fetch_files=("/mnt/b",))
        assert result.outcome is Outcome.INVALID_REQUEST and "'/mnt/b'" in result.message
        assert running.run("print(1)", fetch_files=("b",)).ok
    finally:
        running.process.stop()


@pytest.mark.parametrize(
    ("code", "stdout"),
    [
        ("import nltk\nprint(nltk.edit_distance('kitten', 'sitting'))", "3\n"),
        ("import networkx as nx\nprint(nx.shortest_path_length(nx.path_graph(5), 0, 4))", "4\n"),
        ("import pandas\nprint(pandas.Series([1, 2]).sum())", "3\n"),
        ("import scipy.special\nprint(scipy.special.comb(5, 2, exact=True))", "10\n"),
        ("import sympy\nprint(sympy.factor(sympy.Symbol('x') ** 2 - 1))", "(x - 1)*(x + 1)\n"),
    ],
    ids=["nltk", "networkx", "pandas", "scipy", "sympy"],
)
def test_libraries_of_the_runtime(sandbox: Sandbox, code: str, stdout: str) -> None:
    result = sandbox.run(code, run_timeout=200.0)
    assert result.stdout == stdout, result.stderr


def test_plots_need_no_display(sandbox: Sandbox) -> None:
    code = """
import matplotlib.pyplot as plt
plt.plot([1, 2]); plt.savefig("plot.png")
print(plt.get_backend().lower())
"""
    result = sandbox.run(code, fetch_files=("plot.png",), run_timeout=200.0)
    assert result.stdout == "agg\n" and "Fontconfig" not in result.stderr, result.stderr
    assert result.files["plot.png"].startswith(b"\x89PNG")
