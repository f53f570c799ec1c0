"""Waits until every node of a job has joined Ray with all its GPUs, and names those that have not.

python -m megatron_retool.cluster.ray_nodes --address IP:PORT --expect node1,node2 --gpus-per-node 8 --timeout 300
"""

from __future__ import annotations

import argparse
import logging
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def problems(expected: Sequence[str], nodes: Sequence[Mapping[str, Any]], gpus_per_node: int) -> list[str]:
    """What is missing, one line for each node.

    Args:
        expected: node names, as given to ``ray start --node-name``.
        nodes: the answer of ``ray.nodes()``.
        gpus_per_node: GPUs that each node must offer.
    """
    alive = {node["NodeName"]: node for node in nodes if node["Alive"]}
    result = []
    for name in expected:
        if name not in alive:
            result.append(f"{name} has not joined Ray")
            continue
        gpus = int(alive[name]["Resources"].get("GPU", 0))
        if gpus < gpus_per_node:
            result.append(f"{name} offers {gpus} GPUs to Ray, {gpus_per_node} are needed")
    return result


def wait_for_nodes(
    expected: Sequence[str],
    gpus_per_node: int,
    timeout: float,
    list_nodes: Callable[[], Sequence[Mapping[str, Any]]],
    poll_seconds: float = 0.5,
) -> list[str]:
    """Poll until nothing is missing or ``timeout`` seconds are over; the problems that remain."""
    deadline = time.monotonic() + timeout
    while True:
        remaining = problems(expected, list_nodes(), gpus_per_node)
        # A node's GPUs never grow after it has joined.
        waiting = any("has not joined" in problem for problem in remaining)
        if not waiting or time.monotonic() > deadline:
            return remaining
        time.sleep(poll_seconds)


def main(arguments: list[str] | None = None) -> int:
    """Wait until the expected nodes have joined Ray; 1 where some have not in time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True, help="IP:PORT of the head's GCS")
    parser.add_argument("--expect", required=True, help="comma-separated node names")
    parser.add_argument("--gpus-per-node", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for the head, and then for the others")
    options = parser.parse_args(arguments)

    import ray

    expected = options.expect.split(",")
    start = time.monotonic()
    connected = _connect(ray, options.address, options.timeout)
    if connected is not None:
        print(f"error: {expected[0]} (the head): no Ray at {options.address}: {connected}", file=sys.stderr)
        return 1
    remaining = wait_for_nodes(expected, options.gpus_per_node, options.timeout, ray.nodes)
    ray.shutdown()
    if remaining:
        print(f"error: after {time.monotonic() - start:.0f} s: {'; '.join(remaining)}", file=sys.stderr)
        return 1
    gpus = f" with {options.gpus_per_node} GPUs each" if options.gpus_per_node else ""
    print(f"Ray is up on {len(expected)} nodes{gpus} after {time.monotonic() - start:.0f} s")
    return 0


def _connect(ray: Any, address: str, timeout: float) -> str | None:
    """Join the cluster as a driver, retrying while the head is still starting. The last error, or None."""
    deadline = time.monotonic() + timeout
    host, _, port = address.rpartition(":")
    while True:
        try:
            # Ray itself would wait in steps of many seconds, and complain in between.
            socket.create_connection((host, int(port)), timeout=1.0).close()
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
            return None
        except (ConnectionError, RuntimeError, OSError) as error:
            ray.shutdown()
            if time.monotonic() > deadline:
                return str(error).splitlines()[0]
            time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
