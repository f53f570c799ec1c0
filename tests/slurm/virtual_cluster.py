"""A real Slurm (munged, slurmctld, two slurmd) in a temporary directory, for as long as a test session lasts.

Each node has network, host name, process and mount namespaces of its own, joined by a bridge: distinct addresses and
host names, a private /dev/shm and temporary directory, and killing a node's first process kills all that runs on it,
as a power cut does. Everything outside the namespaces (the repository, the cluster's directory) is the file system that
all nodes share.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from megatron_retool.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "ip", "unshare")

_SLURM_CONF = """\
ClusterName=virtual
SlurmctldHost={controller_host}({controller_address})
SlurmctldPort={port}
AuthType=auth/munge
# Nodes refuse a requeued job until its old credential has expired, two minutes by default.
AuthInfo=socket={directory}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=sched_interval=1,sched_min_interval=100000,batch_sched_delay=0,bf_interval=2
JobRequeue=1
KillWait=20
SlurmctldTimeout=30
SlurmdTimeout=30
SlurmdPort={slurmd_port}
{nodes}
PartitionName=main Nodes=ALL Default=YES DefaultTime=30 MaxTime=INFINITE State=UP OverSubscribe=NO
"""

_CGROUP_CONF = """\
CgroupPlugin=cgroup/v1
CgroupAutomount=no
ConstrainCores=no
ConstrainRAMSpace=no
ConstrainDevices=no
"""

# The first process of a node. It waits for its network card, which is pushed in from outside.
_NODE_INIT = """\
set -eu
hostname {name}
mount --make-rprivate /
mount -t tmpfs tmpfs /dev/shm
mount --bind {directory}/tmp.{name} {directory}/tmp
mount --bind {directory}/hosts /etc/hosts
ip link set lo up
for _ in $(seq 100); do ip link show {link} >/dev/null 2>&1 && break; sleep 0.05; done
ip link set {link} name eth0
ip address add {address}/24 dev eth0
ip link set eth0 up
ip route add default via {controller_address}
# Not exec: the first process of a namespace has to collect the orphans, which slurmd does not.
slurmd -D -f {directory}/slurm.conf -N {name} &
wait
"""


_NAMESPACES = ("--net", "--uts", "--pid", "--mount", "--fork", "--mount-proc")


class SlurmUnavailable(RuntimeError):
    """The reason why no Slurm can be started on this machine."""


class VirtualCluster:
    """Two Slurm nodes, node1 and node2, on this machine.

    Attributes:
        directory: holds configuration, logs and state. ``directory / "tmp"`` is private to each node.
        environment: variables under which Slurm's commands find this cluster.

    Raises:
        SlurmUnavailable: Slurm is not installed, this user is not root, or namespaces or the bridge are refused.
    """

    def __init__(self, directory: Path, nodes: int = 2) -> None:
        missing = [program for program in PROGRAMS if shutil.which(program, path=_search_path()) is None]
        if missing:
            raise SlurmUnavailable(f"{', '.join(missing)} not installed (bash .ci/install_packages.sh)")
        if os.geteuid() != 0:
            raise SlurmUnavailable("starting slurmctld, slurmd and network namespaces needs root")
        self.directory = directory
        self.nodes = [f"node{index + 1}" for index in range(nodes)]
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH", "RAY"))},
            "PATH": _search_path(),
            "SLURM_CONF": str(directory / "slurm.conf"),
        }
        self._identity = f"{random.randrange(16**4):04x}"
        self._subnet = f"10.{random.randrange(64, 128)}.{random.randrange(256)}"
        self._bridge = f"mrb{self._identity}"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        controller = f"{self._subnet}.254"
        self.directory.chmod(0o755)  # munge wants its socket reachable for everybody
        try:
            self._ip("link", "add", self._bridge, "type", "bridge")
            self._ip("address", "add", f"{controller}/24", "dev", self._bridge)
            self._ip("link", "set", self._bridge, "up")
            _run(["unshare", *_NAMESPACES, "true"])
        except subprocess.CalledProcessError as error:
            raise SlurmUnavailable(f"no virtual nodes: {' '.join(error.cmd)}: {error.stderr.strip()}") from error
        (self.directory / "state").mkdir()
        (self.directory / "tmp").mkdir()
        names = "\n".join(
            f"NodeName={name} NodeAddr={self.address(name)} CPUs=4 RealMemory=8000 State=UNKNOWN" for name in self.nodes
        )
        self._write(
            "slurm.conf",
            _SLURM_CONF.format(
                controller_host=socket.gethostname(),
                controller_address=controller,
                directory=self.directory,
                port=free_port(),
                slurmd_port=free_port(),
                nodes=names,
            ),
        )
        self._write("cgroup.conf", _CGROUP_CONF)
        hosts = [f"{self.address(name)} {name}" for name in self.nodes]
        self._write("hosts", "\n".join(["127.0.0.1 localhost", f"{controller} {socket.gethostname()}", *hosts, ""]))
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        munge = [f"--{name}={self.directory}/munge.{name.split('-')[0]}" for name in ("socket", "pid-file", "log-file")]
        self._spawn(
            "munged", ["munged", "--foreground", "--force", *munge, f"--key-file={key}",
                       f"--seed-file={self.directory}/munge.seed"],
        )  # fmt: skip
        _wait(lambda: (self.directory / "munge.socket").exists(), 20, "munged opens its socket", self)
        self._spawn("slurmctld", ["slurmctld", "-D", "-f", str(self.directory / "slurm.conf")])
        for name in self.nodes:
            self.start_node(name)
        self.wait_for_idle()

    def start_node(self, name: str) -> None:
        """Start (or reboot) a node: its namespaces, network card and slurmd."""
        link = f"mrn{self._identity}{name[4:]}"
        (self.directory / f"tmp.{name}").mkdir(exist_ok=True)
        script = _NODE_INIT.format(
            name=name, directory=self.directory, link=link, address=self.address(name),
            controller_address=f"{self._subnet}.254",
        )  # fmt: skip
        self._spawn(name, ["unshare", *_NAMESPACES, "--kill-child", "bash", "-c", script])
        init = _wait(lambda: _children(self._daemons[name].pid), 10, f"{name} starts", self)[0]
        # A card keeps its hardware address over a reboot, and the other nodes remember it.
        hardware = f"02:00:{self._identity[:2]}:{self._identity[2:]}:00:{int(name[4:]):02x}"
        self._ip("link", "add", f"{link}h", "type", "veth", "peer", "name", link, "address", hardware)
        self._ip("link", "set", link, "netns", str(init))
        self._ip("link", "set", f"{link}h", "master", self._bridge, "up")

    def kill_node(self, name: str) -> None:
        """Cut the node's power: every process on it dies at once, unannounced."""
        daemon = self._daemons.pop(name)
        for pid in _children(daemon.pid):
            os.kill(pid, signal.SIGKILL)
        daemon.wait()

    def on_node(self, name: str, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command inside a running node, outside Slurm."""
        init = _children(self._daemons[name].pid)[0]
        return self.run(["nsenter", "--target", str(init), "--net", "--uts", "--pid", "--mount", *command])

    def processes(self, name: str) -> list[str]:
        """Command lines of all processes on a node."""
        listing = self.on_node(name, ["ps", "-ww", "-eo", "args", "--no-headers"]).stdout.splitlines()
        return [line for line in listing if not line.startswith("ps ")]

    def address(self, name: str) -> str:
        return f"{self._subnet}.{int(name[4:])}"

    def node_state(self, name: str) -> str:
        return self.run(["sinfo", "--noheader", "--nodes", name, "--format", "%T"], check=False).stdout.strip()

    def wait_for_idle(self, timeout: float = 60) -> None:
        """Wait until every node is up and has no job."""
        _wait(lambda: all(self.node_state(name) == "idle" for name in self.nodes), timeout, "all nodes are idle", self)

    def run(
        self, command: list[str], check: bool = True, env: dict[str, str] | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands (or any other) against this cluster and collect its output."""
        environment = self.environment | (env or {})
        result = subprocess.run(
            command, check=False, env=environment, timeout=timeout, text=True,
            stdin=subprocess.DEVNULL, capture_output=True,
        )  # fmt: skip
        if check and result.returncode:
            raise AssertionError(f"{command} ended with {result.returncode}:\n{result.stdout}\n{result.stderr}")
        return result

    def job(self, job_id: str) -> dict[str, str]:
        """``scontrol show job`` as a mapping."""
        fields = self.run(["scontrol", "--oneliner", "show", "job", job_id]).stdout
        return dict(re.findall(r"(\w+)=(\S*)", fields))

    def wait_for_job(self, job_id: str, state: str, timeout: float) -> dict[str, str]:
        """Wait until the job is in ``state``. A job that ends otherwise fails the test with its output."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE")
        deadline = time.monotonic() + timeout
        while True:
            job = self.job(job_id)
            if job["JobState"] == state:
                return job
            if job["JobState"] in ended or time.monotonic() > deadline:
                found = f"job {job_id} is {job['JobState']} ({job.get('Reason')}), not {state}"
                raise AssertionError(f"{found}; its output:\n{_tail(job['StdOut'])}")
            time.sleep(0.2)

    def describe(self) -> str:
        """The daemons' last words, for a failure's message."""
        logs = sorted(self.directory.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{_tail(log, 15)}" for log in logs)

    def close(self) -> None:
        """Stop every daemon and everything on the nodes, and remove the bridge."""
        for name in [name for name in self.nodes if name in self._daemons]:
            self.kill_node(name)
        for daemon in self._daemons.values():
            daemon.terminate()
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        self.run(["ip", "link", "delete", self._bridge], check=False)

    def _spawn(self, name: str, command: list[str]) -> None:
        with open(self.directory / f"{name}.out.log", "ab") as output:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],  # nothing outlives an interrupted test session
                env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self.directory,
                start_new_session=True,
            )  # fmt: skip

    def _ip(self, *arguments: str) -> None:
        _run(["ip", *arguments], env=self.environment)

    def _write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text, encoding="utf-8")


def _run(command: list[str], env: dict[str, str] | None = None) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout


def _search_path() -> str:
    # Debian keeps the daemons and ip in sbin, which a user's PATH may lack.
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _tail(path: str | Path, lines: int = 60) -> str:
    try:
        return "\n".join(Path(path).read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return str(error)


def _wait(condition, timeout: float, what: str, cluster: VirtualCluster):
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {timeout:.0f} s in vain until {what}\n{cluster.describe()}")
        time.sleep(0.1)
    return value
