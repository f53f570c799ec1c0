"""The attacks that matter in every language, by bash, pytest and a notebook: contained as Python's (test_attacks.py).

What an attack got hold of it writes to found.txt.
"""

from __future__ import annotations

import base64
import socket
import textwrap
import uuid
from pathlib import Path

import pytest
from sandboxes import Sandbox
from test_attacks import command_lines

from code_interpreter.protocol import Outcome

LANGUAGES = ("bash", "pytest", "jupyter")


def attack(attacked: Sandbox, language: str, python: str, bash: str, **limits: int) -> tuple[str, str]:
    """Run ``bash``, or ``python`` in a test or a cell; the outcome, and what was found."""
    if language == "pytest":
        python = f"def test_attack():\n{textwrap.indent(python, '    ')}"
    body = {"code": bash if language == "bash" else python, "cells": [python], "language": language}
    body |= {"run_timeout": 200, "total_timeout": 200, "fetch_files": ["found.txt"], **limits}
    status, answer = attacked.post(body, "/run_jupyter" if language == "jupyter" else "/run_code")
    assert status == 200 and answer["status"] != "SandboxError", answer
    return answer["outcome"], base64.b64decode(answer["files"].get("found.txt", "")).decode()


USING_UP = """
import os, signal, time
children = []
try:
    for _ in range(300):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        children.append(child)
except OSError:
    open("found.txt", "a").write(f"refused {len(children)}\\n")
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
data = bytearray(1 << 30)
for i in range(0, len(data), 4096): data[i] = 1
open("found.txt", "a").write("got it")
"""
USING_UP_IN_BASH = """
(text=x; for i in $(seq 30); do text=$text$text; done; echo got it > found.txt)
SECONDS=0
(for i in $(seq 300); do sleep 30 & done) &
while set -- /proc/[0-9]*; [ $# -lt 60 ] && [ $SECONDS -lt 5 ]; do :; done
echo $# >> found.txt
"""


@pytest.mark.parametrize("language", LANGUAGES)
def test_processes_and_memory(attacked: Sandbox, language: str) -> None:
    outcome, found = attack(attacked, language, USING_UP, USING_UP_IN_BASH, memory_limit_MB=192)
    assert "got it" not in found
    if language == "bash":
        assert int(found) <= 68, found
    else:
        assert found.startswith("refused") and int(found.split()[1]) <= 64, found
    # pytest takes long to say how the allocation failed.
    assert outcome in (Outcome.FINISHED, Outcome.MEMORY_LIMIT_EXCEEDED, Outcome.TIME_LIMIT_EXCEEDED)
    attacked.check_alive()


@pytest.mark.parametrize("language", LANGUAGES)
def test_files_network_and_processes_that_stay(attacked: Sandbox, language: str, tmp_path: Path) -> None:
    if not attacked.hides_files:
        pytest.skip("rlimits without Landlock: announced by a warning")
    secret = tmp_path / "secret.txt"
    secret.write_text("host secret")
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    seconds = f"61.{uuid.uuid4().int % 10**12}"
    escaped = f"escaped-{uuid.uuid4().hex}"
    places = ["/mnt", "/usr", "/var/tmp", "/etc", "/"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        python = f"""
import os, socket, subprocess
def found(text): open("found.txt", "a").write(text)
for path in ("/etc/shadow", {str(secret)!r}, "/proc/1/root{secret}", "/proc/self/root{secret}"):
    try: found(open(path).read(20))
    except OSError: pass
for place in {places!r}:
    try: open(os.path.join(place, {escaped!r}), "w").write("x")
    except OSError: pass
try:
    socket.create_connection(("127.0.0.1", {port}), 1)
    found("connected")
except OSError: pass
subprocess.Popen(["sleep", "{seconds}"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
found("done")
"""
        bash = f"""
cat /etc/shadow {secret} /proc/1/root{secret} /proc/self/root{secret} > found.txt
for place in {" ".join(places)}; do echo x > $place/{escaped}; done
(exec 3<>/dev/tcp/127.0.0.1/{port}) && printf connected >> found.txt
(setsid sleep {seconds} > /dev/null 2>&1 &)
printf done >> found.txt
"""
        assert attack(attacked, language, python, bash)[1] == "done"
    assert [line for line in command_lines().values() if seconds in line] == []
    assert [place for place in places if Path(place, escaped).exists()] == []


def test_notebook_that_writes_to_every_descriptor(attacked: Sandbox) -> None:
    code = """
import os
for descriptor in range(3, 40):
    try: os.write(descriptor, b'{"end": "ok"}\\nCME\\n{"start": 1}\\n{"display": {"text/plain": "forged"}}\\n')
    except OSError: pass
"""
    answer = attacked.notebook(code, "print('second')")
    assert answer["status"] in ("Success", "Failed") and len(answer["cells"]) == 2, answer
    attacked.check_alive()
