"""The server over ``in_process``'s trainer and sampler as a process that can be killed: MODEL DIRECTORY PORT."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from tests.tinker.served import served

if __name__ == "__main__":
    with served(Path(sys.argv[1]), Path(sys.argv[2]), port=int(sys.argv[3])) as found:
        print(found.url, flush=True)
        threading.Event().wait()
