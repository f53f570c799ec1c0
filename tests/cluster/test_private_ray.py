"""The Ray that a run starts: who is answered, on which addresses, and where its token stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVER = """
import os, pathlib, psutil, subprocess, sys
import ray
from megatron_retool.cluster.ray_start import private_token, start_local_ray

client, directory = sys.argv[1:]
with private_token():
    path = os.environ["RAY_AUTH_TOKEN_PATH"]
    token = pathlib.Path(path).read_text()
    print("mode", oct(os.stat(path).st_mode & 0o777), len(token), flush=True)
    options = dict(include_dashboard=False, num_cpus=1, logging_level="ERROR", log_to_driver=False)
    start_local_ray(_temp_dir=directory, **options)
    print("answer", ray.get(ray.remote(lambda: 17).remote()), flush=True)
    tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
    addresses = {c.laddr.ip for p in tree for c in p.net_connections() if c.status == psutil.CONN_LISTEN}
    print("addresses", *sorted(addresses), flush=True)
    shown = [p.pid for p in tree if token in " ".join([*p.cmdline(), *p.environ().values()])]
    files = [f for f in pathlib.Path(directory).rglob("*") if f.is_file() and token.encode() in f.read_bytes()]
    print("shown", len(shown), len(files), flush=True)
    address = ray.get_runtime_context().gcs_address
    clients = {"token": {}, "other": {"RAY_AUTH_TOKEN": "0" * 64}, "none": {"RAY_AUTH_MODE": "disabled"}}
    for name, changes in clients.items():
        environment = os.environ | {"RAY_ADDRESS": address} | changes
        if changes:
            del environment["RAY_AUTH_TOKEN_PATH"]
        command = [sys.executable, "-c", client]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        print("client", name, "works" if "connected" in done.stdout else "refused", flush=True)
    ray.shutdown()
print("left", os.path.exists(path), *(name for name in os.environ if name.startswith("RAY_AUTH")))
"""
CLIENT = """
import os
from ray._raylet import GcsClient
nodes = GcsClient(address=os.environ["RAY_ADDRESS"]).get_all_node_info(timeout=10)
print("connected", len(nodes))
"""


@pytest.mark.slow
def test_only_who_shows_the_runs_own_token_is_answered_and_on_loopback_alone(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_AUTH")}
    environment |= {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    short = Path(f"/tmp/ray_test_{os.getpid()}")  # sockets lie in it, whose paths have to be short
    try:
        done = subprocess.run(
            [sys.executable, "-c", SERVER, CLIENT, str(short)],
            env=environment, capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[2],
        )  # fmt: skip
    finally:
        subprocess.run(["rm", "-rf", str(short)], check=False)
    lines = [line for line in done.stdout.splitlines() if line.split(" ")[0] in SAID]
    assert lines == [
        "mode 0o600 64",
        "answer 17",
        lines[2],
        "shown 0 0",
        "client token works",
        "client other refused",
        "client none refused",
        "left False",
    ], done.stdout + done.stderr
    assert all(address.endswith("127.0.0.1") for address in lines[2].split()[1:]), lines[2]
    assert not (tmp_path / ".ray").exists(), "Ray would make a token that others can read"


SAID = ("mode", "answer", "addresses", "shown", "client", "left")
