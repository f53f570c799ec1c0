"""The code interpreter under load, against a plain ``python -I`` for each request on the same machine.

    python benchmarks/sandbox.py                      # throughput and 10,000 mixed requests
    python benchmarks/sandbox.py --requests 2000      # a shorter mix

Throughput: requests a second of ``import sympy`` and a solve, server against plain interpreter, in alternating rounds
(so that whatever else the machine does meets both alike) and as CPU seconds per request, which such neighbours disturb
less.  Mix: requests of twelve kinds at once, each with a known answer; lost, wrong, and what the server keeps
afterwards (processes, descriptors, memory, files) are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from code_interpreter.client import CodeInterpreterClient
from code_interpreter.process import SandboxServerProcess
from code_interpreter.protocol import ExecutionResult, Outcome
from megatron_retool.config import CodeInterpreterConfig

SYMPY = "import sympy\nx = sympy.symbols('x')\nprint(sympy.solve(x**2 - {0}, x))"


def expected_roots(square: int) -> str:
    root = int(square**0.5)
    return f"[-{root}, {root}]\n"


class Mix:
    """Requests of twelve kinds; ``check`` knows the right answer to each."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draw(self) -> tuple[str, dict[str, Any], Any]:
        """(code, further request fields, function ExecutionResult → right or wrong)."""
        r = self._random
        a, b = r.randint(2, 999), r.randint(2, 99)
        kinds = [
            (4, f"print({a} * {b})", {}, lambda o: o.ok and o.stdout == f"{a * b}\n"),
            (2, f"{a} ** {b}", {"print_last_expression": True}, lambda o: o.stdout == f"{a**b}\n"),
            (2, SYMPY.format(a * a), {}, lambda o: o.stdout == expected_roots(a * a)),
            (2, f"import numpy as np\nprint(np.arange({a}).sum())", {}, lambda o: o.stdout == f"{a * (a - 1) // 2}\n"),
            (2, f"print(undefined_{a})", {}, lambda o: o.return_code == 1 and f"undefined_{a}" in o.stderr),
            (1, f"print({a}", {}, lambda o: o.outcome is Outcome.COMPILE_ERROR),
            (1, "print(sum(map(int, open(0))))", {"stdin": f"{a}\n{b}\n"}, lambda o: o.stdout == f"{a + b}\n"),
            (1, f"print('{b}' * 300000)", {}, lambda o: o.stdout == f"{b}" * 300000 + "\n"),
            (
                1,
                "open('out', 'wb').write(open('in', 'rb').read()[::-1])",
                {"files": {"in": str(a).encode()}, "fetch_files": ["out"]},
                lambda o: o.files == {"out": str(a).encode()[::-1]},
            ),
            (
                1,
                "import os\nif os.fork() == 0:\n    import time; time.sleep(30)\nprint('left')",
                {},
                lambda o: o.stdout == "left\n",
            ),
            (
                1,
                "while True: pass",
                {"run_timeout": 0.2},
                lambda o: o.outcome is Outcome.TIME_LIMIT_EXCEEDED,
            ),
            (1, "x = bytes(1 << 36)", {}, lambda o: o.outcome is Outcome.MEMORY_LIMIT_EXCEEDED),
        ]
        _, code, fields, check = r.choices(kinds, [kind[0] for kind in kinds])[0]
        return code, {"run_timeout": 60.0, **fields}, check


class Watch:
    """What a server's processes use and keep."""

    def __init__(self, server: int) -> None:
        self._server = psutil.Process(server)

    def processes(self) -> list[psutil.Process]:
        return [self._server, *self._server.children(recursive=True)]

    def snapshot(self) -> dict[str, float]:
        processes = self.processes()
        memory = 0
        for process in processes:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            memory += sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        return {
            "processes": len(processes),
            "descriptors": sum(process.num_fds() for process in processes),
            "memory_mb": round(memory / 1024, 1),
            "files": len(list(Path(tempfile.gettempdir()).glob(f"retool-sandbox-{self._server.pid}-*/*"))),
        }

    def cpu_seconds(self) -> float:
        """CPU time of the server and all that it waited for, the ended snippets included."""
        total = 0.0
        for process in self.processes():
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
        return total


async def server_round(client: CodeInterpreterClient, count: int, concurrency: int) -> float:
    """Wall seconds for ``count`` sympy requests."""
    gate = asyncio.Semaphore(concurrency)

    async def one(i: int) -> None:
        async with gate:
            square = (i % 50 + 2) ** 2
            result = await client.run_code(SYMPY.format(square), run_timeout=120)
            assert result.stdout == expected_roots(square), result

    started = time.monotonic()
    await asyncio.gather(*(one(i) for i in range(count)))
    return time.monotonic() - started


async def plain_round(count: int, concurrency: int) -> float:
    """The same with a new interpreter for each request."""
    gate = asyncio.Semaphore(concurrency)

    async def one(i: int) -> None:
        async with gate:
            square = (i % 50 + 2) ** 2
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-c", SYMPY.format(square)), stdout=asyncio.subprocess.PIPE
            )
            assert (await process.communicate())[0].decode() == expected_roots(square)

    started = time.monotonic()
    await asyncio.gather(*(one(i) for i in range(count)))
    return time.monotonic() - started


async def throughput(url: str, watch: Watch, rounds: int) -> dict[str, float]:
    cores = len(os.sched_getaffinity(0))
    server_count, plain_count = 100 * cores, 8 * cores
    server_rates, plain_rates, server_cpu, plain_cpu = [], [], 0.0, 0.0
    async with CodeInterpreterClient(url) as client:
        await server_round(client, 4 * cores, 2 * cores)
        for _ in range(rounds):
            before = watch.cpu_seconds()
            server_rates.append(server_count / await server_round(client, server_count, 2 * cores))
            server_cpu += watch.cpu_seconds() - before
            before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
            plain_rates.append(plain_count / await plain_round(plain_count, cores))
            plain_cpu += sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before
    server, plain = statistics.median(server_rates), statistics.median(plain_rates)
    server_ms, plain_ms = 1000 * server_cpu / (rounds * server_count), 1000 * plain_cpu / (rounds * plain_count)
    return {
        "cores": cores,
        "server_requests_per_second": round(server, 1),
        "plain_requests_per_second": round(plain, 2),
        "ratio_requests_per_second": round(server / plain, 1),
        "server_cpu_ms_per_request": round(server_ms, 1),
        "plain_cpu_ms_per_request": round(plain_ms, 1),
        "ratio_cpu": round(plain_ms / server_ms, 1),
    }


async def mixed(url: str, watch: Watch, count: int, concurrency: int, seed: int) -> dict[str, Any]:
    mix = Mix(seed)
    outcomes: Counter[str] = Counter()
    wrong: list[tuple[str, ExecutionResult]] = []
    latencies: list[float] = []
    async with CodeInterpreterClient(url, give_up_seconds=600) as client:
        gate = asyncio.Semaphore(concurrency)

        async def one(code: str, fields: dict[str, Any], check: Any) -> None:
            async with gate:
                started = time.monotonic()
                result = await client.run_code(code, **fields)
                latencies.append(time.monotonic() - started)
            outcomes[result.outcome.value] += 1
            if not check(result):
                wrong.append((code, result))

        async def batch(number: int) -> float:
            started = time.monotonic()
            await asyncio.gather(*(one(*mix.draw()) for _ in range(number)))
            return time.monotonic() - started

        await batch(2 * concurrency)  # every worker has started
        await asyncio.sleep(1)
        outcomes.clear()
        latencies.clear()
        before = watch.snapshot()
        seconds = await batch(count)
        await asyncio.sleep(1)
        after = watch.snapshot()
    for code, result in wrong[:5]:
        print(f"wrong: {code[:80]!r} -> {str(result)[:300]}", file=sys.stderr)
    latencies.sort()
    return {
        "requests": count,
        "concurrency": concurrency,
        "answered": sum(outcomes.values()),
        "lost": count - sum(outcomes.values()),
        "wrong": len(wrong),
        "outcomes": dict(outcomes),
        "requests_per_second": round(count / seconds, 1),
        "latency_p50_ms": round(1000 * latencies[len(latencies) // 2], 1),
        "latency_p99_ms": round(1000 * latencies[int(0.99 * len(latencies))], 1),
        "kept_before": before,
        "kept_after": after,
    }


def queue_p99(metrics: str) -> str:
    """The bucket of the server's own histogram that holds the 99th percentile of the wait for a worker."""
    buckets = []
    for line in metrics.splitlines():
        if line.startswith("sandbox_queue_seconds_bucket"):
            name, value = line.rsplit(" ", 1)
            buckets.append((name.split('"')[1], float(value)))
    total = buckets[-1][1]
    return next(f"<= {bound} s" for bound, value in buckets if value >= 0.99 * total)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000, help="of the mix")
    parser.add_argument("--concurrency", type=int, default=128, help="of the mix")
    parser.add_argument("--workers", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3, help="of the throughput comparison; 0 leaves it out")
    parser.add_argument("--isolation", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    config = CodeInterpreterConfig(workers=options.workers, isolation=options.isolation, memory_limit_mb=512)
    with SandboxServerProcess(config) as server:
        watch = Watch(server.pid)
        async with CodeInterpreterClient(server.url) as client:
            health = await client.health()
        report: dict[str, Any] = {key: health[key] for key in ("isolation", "cgroup_version", "import_seconds")}
        if options.rounds:
            report["throughput"] = await throughput(server.url, watch, options.rounds)
            print(json.dumps(report["throughput"], indent=1), flush=True)
        if options.requests:
            report["mix"] = await mixed(server.url, watch, options.requests, options.concurrency, options.seed)
            import urllib.request

            with urllib.request.urlopen(f"{server.url}/metrics") as response:
                report["mix"]["queue_wait_p99"] = queue_p99(response.read().decode())
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
