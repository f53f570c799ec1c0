"""README's example prints what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_the_example_prints_what_it_says(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    program, printed = re.search(r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", text, re.S).groups()
    found = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout == printed
