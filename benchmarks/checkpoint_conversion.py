"""Peak memory and speed of the converters on a generated model, against a plain copy of the same files.

    python benchmarks/checkpoint_conversion.py [--gigabytes 3] [--file-bytes 1e9] [--processes 1] [--tp 1]
                                               [--directory DIR]

Prints, for each direction: seconds and GiB/s; the ratio to copying the same files (target: at most 1.5); peak memory of
all processes together beyond what an idle converter takes, and the bound (1.3 x the largest file + one layer).
Both sides include fsync. The files are removed afterwards; about four times the size is needed on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conversion.files.hf_checkpoint import TensorSpec, plan_files, write_file, write_index
from conversion.model.architecture import Architecture
from conversion.model.weight_map import WeightMap

REPEATS = 3
SCRIPTS = Path(__file__).resolve().parent.parent / "conversion"


def make_model(directory: Path, nbytes: float, file_bytes: int) -> tuple[int, int]:
    """A Qwen2-shaped directory of about ``nbytes`` bfloat16 bytes; bytes of the largest file and of one layer."""
    config = {
        "model_type": "qwen2",
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 8192,
        "vocab_size": 65536,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
    one = WeightMap(Architecture.from_hf_config(config))
    layer = sum(2 * torch.Size(shape).numel() for m in one if m.layer is not None for shape in m.hf_shapes)
    rest = sum(2 * torch.Size(shape).numel() for m in one if m.layer is None for shape in m.hf_shapes)
    config["num_hidden_layers"] = max(1, round((nbytes - rest) / layer))
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    groups = [
        [TensorSpec(n, s, torch.bfloat16) for n, s in zip(m.hf_names, m.hf_shapes, strict=True)]
        for m in WeightMap(Architecture.from_hf_config(config))
    ]
    files = plan_files(groups, file_bytes)
    for name, specs in files:
        write_file(directory / name, specs, ((spec.name, torch.randn(spec.shape).bfloat16()) for spec in specs))
    write_index(directory, files)
    return max((directory / name).stat().st_size for name, _ in files), layer


def timed(function: Callable[[], None]) -> float:
    os.sync()
    start = time.monotonic()
    function()
    return time.monotonic() - start


def copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
        with open(target / path.name, "rb") as stream:
            os.fsync(stream.fileno())


def run(*arguments: str | Path) -> tuple[float, int]:
    """Run a converter.

    Returns:
        seconds that it took by its own account, that is without starting Python; the peak, in bytes, of what its
        processes hold that is not shared with others.
    """
    command = [sys.executable, "-W", "ignore", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    peak, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            peak[0] = max(peak[0], sum(private_bytes(p) for p in family(process.pid)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    said, _ = process.communicate()
    over.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} exited with {process.returncode}")
    seconds = re.search(r" in ([0-9.]+) s ", said)
    return float(seconds[1]) if seconds else 0.0, peak[0]


def family(pid: int) -> Iterator[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        yield parent
        yield from parent.children(recursive=True)
    except psutil.NoSuchProcess:
        return


def private_bytes(process: psutil.Process) -> int:
    try:
        memory = process.memory_info()
        return int(memory.rss - memory.shared)
    except psutil.NoSuchProcess:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--file-bytes", type=float, default=1e9, help="size of a safetensors file")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1, help="target of hf_to_mcore: above 1, columns go through memory")
    parser.add_argument("--directory", type=Path, help="where to work; default: the system's temporary directory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        measure(Path(scratch), options.gigabytes * 1e9, int(options.file_bytes), options.processes, options.tp)


def measure(scratch: Path, nbytes: float, file_bytes: int, processes: int, tp: int) -> None:
    largest, layer = make_model(scratch / "tiny", 0, file_bytes)
    idle = {script: run(SCRIPTS / script, "--help")[1] for script in ("hf_to_mcore.py", "mcore_to_hf.py")}
    largest, layer = make_model(scratch / "hf", nbytes, file_bytes)
    size = sum(path.stat().st_size for path in (scratch / "hf").iterdir())
    bound = 1.3 * largest + layer
    copied = min(timed(lambda: copy(scratch / "hf", scratch / "copy")) for _ in range(REPEATS))
    shutil.rmtree(scratch / "copy")
    print(f"model {size / 2**30:.2f} GiB, largest file {largest / 2**20:.0f} MiB, one layer {layer / 2**20:.0f} MiB")
    print(f"plain copy: {copied:.1f} s, {size / 2**30 / copied:.2f} GiB/s")
    for script, arguments in (
        ("hf_to_mcore.py", ("--hf-dir", scratch / "hf", "--mcore-dir", scratch / "mcore", "--tp", str(tp))),
        ("mcore_to_hf.py", ("--mcore-dir", scratch / "mcore", "--hf-dir", scratch / "back")),
    ):
        command = (SCRIPTS / script, *arguments, "--processes", str(processes), "--overwrite")
        results = []
        for _ in range(REPEATS):
            os.sync()  # what is still being written back from before would be charged to this run
            results.append(run(*command))
        seconds = min(result[0] for result in results)
        memory = max(result[1] for result in results) - idle[script] * max(1, processes)
        print(
            f"{script}, {processes} process(es): {seconds:.1f} s, {size / 2**30 / seconds:.2f} GiB/s, "
            f"{seconds / copied:.2f} x the copy; peak memory {memory / 2**20:.0f} MiB, bound {bound / 2**20:.0f} MiB"
        )


if __name__ == "__main__":
    main()
