"""Peak memory and speed of the converters on a generated model, against a plain copy of the same files.

    python benchmarks/checkpoint_conversion.py [--model NAME] [--gigabytes 3] [--file-bytes 1e9] [--workers 1]
                                               [--tp 1] [--cold] [--rounds 3] [--directory DIR]

Prints, for each direction: seconds and GiB/s; the ratio to copying the same files (target: at most 1.5); peak memory
beyond what an idle converter takes, and the bound (1.3 x the largest file + one layer); the processor's seconds.
A round is a copy and a conversion in each direction, and the shortest of each counts. Both sides include fsync; with
--cold nothing of what they read is in memory when they begin. The way back also verifies its source's checksums. The
files are removed afterwards; about three times the size is needed on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conversion.files.hf_checkpoint import FileWriter, TensorSpec, plan_files, write_index
from conversion.model.architecture import Architecture
from conversion.model.weight_map import WeightMap
from megatron_retool.parity.admission.requests import read_config

SCRIPTS = Path(__file__).resolve().parent.parent / "conversion"


QWEN2_SHAPED: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 8192,
    "vocab_size": 65536,
    "tie_word_embeddings": False,
}


def weight_map(config: dict[str, Any], layers: int) -> WeightMap:
    """Of a model of ``config`` with so many layers, of its kinds."""
    types = config.get("layer_types")
    kinds = {} if types is None else {"layer_types": [types[number % len(types)] for number in range(layers)]}
    return WeightMap(Architecture.from_hf_config({**config, **kinds, "num_hidden_layers": layers}))


def tensors(of: WeightMap) -> list[list[TensorSpec]]:
    """bfloat16, and buffers float32, as checkpoints have them."""
    return [
        [TensorSpec(n, of.hf_shapes[n], torch.float32 if group[0].rule.is_buffer else torch.bfloat16) for n in names]
        for names, group in of.exported_groups()
    ]


def make_model(directory: Path, config: dict[str, Any], nbytes: float, file_bytes: int) -> tuple[int, int]:
    """A directory of about ``nbytes`` bytes; bytes of the largest file and of one layer."""
    some, more = (sum(spec.nbytes for g in tensors(weight_map(config, layers)) for spec in g) for layers in (8, 12))
    layer = (more - some) // 4  # the mean of four: kinds may take turns
    of = weight_map(config, max(2, round(8 + (nbytes - some) / layer)))
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(of.architecture.hf_config))
    (directory / "tokenizer.json").write_text("{}")
    files = plan_files(tensors(of), file_bytes)
    numbers = torch.randn(2**22).bfloat16()
    for name, specs in files:
        with FileWriter(directory / name, specs) as writer:
            for spec in specs:
                wanted = numbers.to(spec.dtype)
                writer.write(
                    spec.name, (wanted[: rest // wanted.itemsize] for rest in range(spec.nbytes, 0, -wanted.nbytes))
                )
    write_index(directory, files)
    return max((directory / name).stat().st_size for name, _ in files), layer


@dataclass(frozen=True)
class Measured:
    """Seconds of the clock, seconds of the processor, and bytes at most in memory."""

    seconds: float
    processor: float
    memory: int


def evict(directory: Path) -> None:
    """Drop a directory's files from memory."""
    for path in directory.rglob("*"):
        if path.is_file():
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy(source: Path, target: Path) -> Measured:
    start, used = time.monotonic(), time.process_time()
    target.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
        with open(target / path.name, "rb") as stream:
            os.fsync(stream.fileno())
    return Measured(time.monotonic() - start, time.process_time() - used, 0)


def run(*arguments: str | Path) -> Measured:
    """Run a converter: its seconds are those of its own account, that is without starting Python."""
    command = [sys.executable, "-W", "ignore", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    peak, over, before = [0], threading.Event(), resource.getrusage(resource.RUSAGE_CHILDREN)

    def watch() -> None:
        while not over.wait(0.01):
            peak[0] = max(peak[0], private_bytes(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    said, _ = process.communicate()
    over.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} exited with {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = re.search(r" in ([0-9.]+) s ", said)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Measured(float(seconds[1]) if seconds else 0.0, processor, peak[0])


def private_bytes(pid: int) -> int:
    try:
        memory = psutil.Process(pid).memory_info()
        return int(memory.rss - memory.shared)
    except psutil.NoSuchProcess:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=3.0, help="as many layers as make this")
    parser.add_argument(
        "--model", help="a published model's name, or a config.json: its kinds of layers and their sizes"
    )
    parser.add_argument("--file-bytes", type=float, default=1e9, help="size of a safetensors file")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1, help="target of hf_to_mcore: above 1, columns go through memory")
    parser.add_argument("--cold", action="store_true", help="with nothing of the source in memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="where to work; default: the system's temporary directory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        measure(Path(scratch), options)


def measure(scratch: Path, options: argparse.Namespace) -> None:
    ways = {
        "hf_to_mcore.py": ("--hf-dir", scratch / "hf", "--mcore-dir", scratch / "mcore", "--tp", str(options.tp)),
        "mcore_to_hf.py": ("--mcore-dir", scratch / "mcore", "--hf-dir", scratch / "back"),
    }
    idle = {script: run(SCRIPTS / script, "--help") for script in ways}
    config = QWEN2_SHAPED if options.model is None else read_config(options.model)[0]
    largest, layer = make_model(scratch / "hf", dict(config), options.gigabytes * 1e9, int(options.file_bytes))
    size = sum(path.stat().st_size for path in (scratch / "hf").iterdir())
    bound = 1.3 * largest + layer
    copies: list[Measured] = []
    results: dict[str, list[Measured]] = {script: [] for script in ways}

    def ready(source: Path, *targets: Path) -> None:
        for target in targets:
            shutil.rmtree(target, ignore_errors=True)
        os.sync()  # what is still being written back from before would be charged to what comes
        if options.cold:
            evict(source)

    for _ in range(options.rounds):
        ready(scratch / "hf", scratch / "back", scratch / "mcore")
        copies.append(copy(scratch / "hf", scratch / "copy"))
        for script, arguments in ways.items():
            ready(Path(arguments[1]), scratch / "copy")
            results[script].append(run(SCRIPTS / script, *arguments, "--workers", str(options.workers)))
    copied = min(found.seconds for found in copies)
    print(f"model {size / 2**30:.2f} GiB, largest file {largest / 2**20:.0f} MiB, one layer {layer / 2**20:.0f} MiB")
    print(
        f"plain copy: {copied:.1f} s, {size / 2**30 / copied:.2f} GiB/s; "
        f"processor {min(found.processor for found in copies):.1f} s"
    )
    for script, found in results.items():
        seconds = min(result.seconds for result in found)
        memory = max(result.memory for result in found) - idle[script].memory
        processor = min(result.processor for result in found) - idle[script].processor
        print(
            f"{script}, {options.workers} worker(s): {seconds:.1f} s, {size / 2**30 / seconds:.2f} GiB/s, "
            f"{seconds / copied:.2f} x the copy; peak memory {memory / 2**20:.0f} MiB, bound {bound / 2**20:.0f} MiB; "
            f"processor {processor:.1f} s"
        )


if __name__ == "__main__":
    main()
