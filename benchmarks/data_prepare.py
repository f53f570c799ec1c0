"""Memory and time of `data prepare dapo-math-17k` at the data set's full size, against loading the file as a whole.

    python benchmarks/data_prepare.py [--rows 1791700] [--prompts 17398] [--directory DIR] [--without-pandas]

Makes a parquet file with DAPO-Math-17k's columns (each prompt about a hundred times, in any order, row groups of half
a million rows), then reduces it to its distinct prompts, each way in a process of its own: this project's command,
pyarrow's ``read_table`` with a Python set, and pandas' ``read_parquet`` with ``drop_duplicates``. Printed is each
process's peak of resident memory, and how much that is above what its imports take. All must find as many prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

GROUP_ROWS = 500_000


def make_file(path: Path, rows: int, prompts: int) -> None:
    """The file; what is held in memory are its distinct rows and one row group's places."""
    random = np.random.default_rng(0)
    words = [f"w{number}" for number in range(5000)]

    def row(number: int) -> dict[str, Any]:
        question = " ".join(words[place] for place in random.integers(0, len(words), random.integers(30, 90)))
        return {
            "data_source": "math_dapo",
            "prompt": [{"content": f"Solve problem {number}: {question}", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(number), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"{number:032x}"},
        }

    distinct = pa.Table.from_pylist([row(number) for number in range(prompts)])
    order = np.arange(rows) % prompts
    random.shuffle(order)
    with pq.ParquetWriter(path, distinct.schema) as writer:
        for first in range(0, rows, GROUP_ROWS):
            writer.write_table(distinct.take(order[first : first + GROUP_ROWS]), row_group_size=GROUP_ROWS)


def this_project(path: Path, directory: Path) -> int:
    from megatron_retool.__main__ import main

    sys.stdout = sys.stderr
    assert main(["data", "prepare", "dapo-math-17k", "--from", str(path), "--output", str(directory)]) == 0
    sys.stdout = sys.__stdout__
    return pq.ParquetFile(directory / "train.parquet").metadata.num_rows


def with_pyarrow(path: Path, directory: Path) -> int:
    table = pq.read_table(path)
    seen: set[str] = set()
    kept = []
    for place, prompt in enumerate(_prompts(table)):
        if prompt not in seen:
            seen.add(prompt)
            kept.append(place)
    pq.write_table(table.take(kept), directory / "pyarrow.parquet")
    return len(kept)


def _prompts(table: pa.Table) -> Iterator[str]:
    for chunk in table["prompt"].chunks:
        yield from (prompt[0]["content"] for prompt in chunk.to_pylist())


def with_pandas(path: Path, directory: Path) -> int:
    import pandas

    frame = pandas.read_parquet(path)
    frame["text"] = [prompt[0]["content"] for prompt in frame["prompt"]]
    frame = frame.drop_duplicates("text").drop(columns="text")
    frame.to_parquet(directory / "pandas.parquet")
    return len(frame)


WAYS: dict[str, Callable[[Path, Path], int]] = {
    "this project": this_project,
    "pyarrow.read_table": with_pyarrow,
    "pandas.read_parquet": with_pandas,
}


def resident_mib(name: str) -> float:
    """VmRSS, now, or VmHWM, the peak. (getrusage's peak begins with that of the process that started this one.)"""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition(f"{name}:")[2].split()[0]) / 1024


def measure(way: str, path: Path, directory: Path) -> None:
    """In a process of its own: print the figures of one way as JSON."""
    import pandas  # noqa: F401

    import megatron_retool.data.prepare.run  # noqa: F401

    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak counts from here on
    imports, began, cpu = resident_mib("VmRSS"), time.perf_counter(), time.process_time()
    result = WAYS[way](path, directory)
    figures = {
        "rows": result,
        "peak_mib": resident_mib("VmHWM"),
        "above_imports_mib": resident_mib("VmHWM") - imports,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
    }
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_791_700)
    parser.add_argument("--prompts", type=int, default=17_398)
    parser.add_argument("--directory", type=Path, help="for the files, which are removed afterwards (default: TMPDIR)")
    parser.add_argument("--without-pandas", action="store_true", help="its load takes gigabytes")
    parser.add_argument("--measure", nargs=2, metavar=("WAY", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        way, file = arguments.measure
        measure(way, Path(file), Path(file).parent)
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        path = Path(name) / "dapo-math-17k.parquet"
        make_file(path, arguments.rows, arguments.prompts)
        print(f"{arguments.rows:,} rows of {arguments.prompts:,} prompts, {path.stat().st_size / 1e6:.0f} MB")
        ours = None
        for way in WAYS:
            if way == "pandas.read_parquet" and arguments.without_pandas:
                continue
            command = [sys.executable, __file__, "--measure", way, str(path)]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            figures = json.loads(done.stdout.splitlines()[-1])
            assert figures["rows"] == arguments.prompts, f"{way}: {figures['rows']} prompts"
            ours = ours or figures
            print(
                f"{way:20} {figures['peak_mib']:7.0f} MiB at its peak, {figures['above_imports_mib']:7.0f} above its "
                f"imports, {figures['seconds']:6.1f} s ({figures['cpu_seconds']:.1f} s of CPU); this project's peak is "
                f"{ours['peak_mib'] / figures['peak_mib']:.2f} of it"
            )


if __name__ == "__main__":
    main()
