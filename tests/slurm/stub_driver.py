"""Stands in for the driver (or one rank of fine-tuning): stub_driver.py BEHAVIOUR RECORDS [the driver's arguments].

Leaves one JSON file for each start and rank in RECORDS and then behaves as told. What it is told about holds for the
job's first start; after a requeue it ends with 0 at once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

REQUEUE = 85


def main() -> int:
    behaviour, records, arguments = sys.argv[1].replace("_", " "), Path(sys.argv[2]), sys.argv[3:]
    start = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    rank = int(os.environ.get("RANK", "0"))
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG")
    record = {
        "arguments": arguments,
        "host": socket.gethostname(),
        "directory": os.getcwd(),
        "terminal": sys.stdout.isatty(),
        "environment": {name: os.environ.get(name) for name in names},
    }
    asked: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: asked.append(number))
    child = subprocess.Popen(["sleep", "600"])  # a sandbox or reward worker: no signal to the driver may end it

    def stop(number: int, frame: object) -> None:
        child.kill()
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    code = act(behaviour, start, asked, run_directory(arguments))
    record |= {"asked": len(asked), "child_lives": child.poll() is None}
    child.kill()
    partial = records / f".start{start}.rank{rank}"
    partial.write_text(json.dumps(record))
    partial.rename(records / f"start{start}.rank{rank}.json")
    return code


def act(behaviour: str, start: int, asked: list[int], run_dir: Path) -> int:
    if behaviour == "fails":
        return 3
    if behaviour == "asks to be requeued":
        return REQUEUE
    if behaviour == "ray":
        see_ray(run_dir)
    if start > 0:
        return 0
    if behaviour == "does not leave":
        (run_dir / "waiting").touch()
        while True:
            time.sleep(0.05)
    if behaviour in ("checkpoints when asked", "ray"):
        (run_dir / "waiting").touch()
        while not asked:
            time.sleep(0.05)
        checkpoint = run_dir / "checkpoints" / "global_step_1"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "COMPLETE").touch()
        return REQUEUE
    return 0


def see_ray(run_dir: Path) -> None:
    """Run a task on every node of the Ray that the batch script has started, and record where each ran."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address="auto", log_to_driver=False)

    @ray.remote(num_cpus=0)
    def where() -> tuple[str, str, str | None]:
        return socket.gethostname(), ray.util.get_node_ip_address(), os.environ.get("GLOO_SOCKET_IFNAME")

    places = [
        where.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
        for node in ray.nodes()
    ]
    (run_dir / "ray_places.json").write_text(json.dumps(sorted(ray.get(places))))
    ray.shutdown()


def run_directory(arguments: list[str]) -> Path:
    runs = next(value.partition("=")[2] for value in arguments if value.startswith("trainer.runs_dir="))
    return Path(runs) / "demo"


if __name__ == "__main__":
    sys.exit(main())
