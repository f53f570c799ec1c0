"""`serve` and `chat` as processes of a test, marked so that what they leave behind can be found."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
import uuid

from tests.end_to_end.conftest import MARKER, ROOT


def start(*words: str, key: str | None = None) -> tuple[subprocess.Popen[str], str]:
    marker = uuid.uuid4().hex
    environment = {**os.environ, MARKER: marker, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if key is not None:
        environment["MEGATRON_RETOOL_API_KEY"] = key
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_retool", *words],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, marker


def lines_until(process: subprocess.Popen[str], word: str, seconds: float = 300) -> str:
    """Standard output up to the line with ``word``."""
    lines: queue.Queue[str] = queue.Queue()
    assert process.stdout is not None
    threading.Thread(target=lambda: [lines.put(line) for line in process.stdout], daemon=True).start()
    deadline, text = time.monotonic() + seconds, ""
    while word not in text:
        try:
            text += lines.get(timeout=1)
        except queue.Empty:
            assert process.poll() is None and time.monotonic() < deadline, text + process.stderr.read()
    return text
