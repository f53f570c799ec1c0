"""Hostile snippets, under every isolation that this host allows: contained, and the server answers the next request.

Each attack is bounded, so that a sandbox that failed to contain it would not hurt the machine that runs the tests.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandboxes import SECRET, Sandbox

from code_interpreter.protocol import Outcome


@pytest.fixture(autouse=True)
def server_survives(attacked: Sandbox) -> Iterator[None]:
    yield
    attacked.check_alive()


def command_lines() -> dict[int, str]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


# ------------------------------------------------------------------------------------------------ using things up


def test_a_set_has_one_order_in_every_server(attacked: Sandbox) -> None:
    code = "print(*{str(i) for i in range(20)}, hash('a'))"
    plain = [sys.executable, "-c", code]
    expected = subprocess.run(plain, env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True)
    assert attacked.run(code).stdout == expected.stdout


def test_infinite_loop(attacked: Sandbox) -> None:
    result = attacked.run("while True: pass", run_timeout=0.3)
    assert result.outcome is Outcome.TIME_LIMIT_EXCEEDED
    assert result.return_code is None


def test_loop_in_c_code_that_no_python_signal_interrupts(attacked: Sandbox) -> None:
    assert attacked.run("sum(range(10**18))", run_timeout=0.3).outcome is Outcome.TIME_LIMIT_EXCEEDED


def test_loop_that_ignores_signals(attacked: Sandbox) -> None:
    code = """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
"""
    assert attacked.run(code, run_timeout=0.3).outcome is Outcome.TIME_LIMIT_EXCEEDED


def test_stopping_itself(attacked: Sandbox) -> None:
    code = "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass"
    assert attacked.run(code, run_timeout=0.3).outcome is Outcome.TIME_LIMIT_EXCEEDED


def test_fork_bomb(attacked: Sandbox) -> None:
    code = """
import os, time
count = 0
try:
    for _ in range(300):
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        count += 1
except OSError:
    print("refused", count)
"""
    result = attacked.run(code)
    assert result.stdout.startswith("refused"), result
    assert int(result.stdout.split()[1]) <= 64


def test_thread_bomb(attacked: Sandbox) -> None:
    code = """
import threading, time
try:
    for count in range(300):
        threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
except (RuntimeError, MemoryError):
    print("refused")
"""
    assert attacked.run(code).stdout == "refused\n"


def test_memory_bomb(attacked: Sandbox) -> None:
    code = "data = bytearray(1 << 30)\nfor i in range(0, len(data), 4096): data[i] = 1\nprint('got it')"
    result = attacked.run(code, memory_limit_mb=128)
    assert result.outcome is Outcome.MEMORY_LIMIT_EXCEEDED
    assert "got it" not in result.stdout


def test_memory_bomb_of_several_processes(attacked: Sandbox) -> None:
    if attacked.health["cgroup_version"] is None:
        pytest.skip("without a cgroup each process has the limit for itself")
    code = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        data = bytearray(96 << 20)
        for i in range(0, len(data), 4096): data[i] = 1
        print("one", flush=True)
        time.sleep(0.5)
        os._exit(0)
for _ in range(6): os.wait()
"""
    result = attacked.run(code, memory_limit_mb=128, run_timeout=5.0)
    assert result.outcome is Outcome.MEMORY_LIMIT_EXCEEDED or result.stdout.count("one") < 5, result


def test_a_gigabyte_of_output(attacked: Sandbox) -> None:
    code = "import sys\nblock = 'a' * 65536\nfor _ in range(16384): sys.stdout.write(block)"
    started = time.monotonic()
    result = attacked.run(code)
    assert result.outcome is Outcome.OUTPUT_LIMIT_EXCEEDED
    assert result.truncated and "bytes left out" in result.stdout
    assert len(result.stdout) < 1.1 * 2**20
    assert time.monotonic() - started < 10


def test_output_without_end(attacked: Sandbox) -> None:
    code = """
import os
while True:
    try: os.write(1, b"y" * 65536)
    except OSError: pass
"""
    result = attacked.run(code, run_timeout=1.0)
    assert result.outcome is Outcome.TIME_LIMIT_EXCEEDED and result.truncated


def test_deep_recursion(attacked: Sandbox) -> None:
    python = attacked.run("def f(): return f() + 1\nf()")
    assert "RecursionError" in python.stderr and python.return_code == 1
    native = "import sys\nsys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**5): x = [x]\nrepr(x)"
    result = attacked.run(native, memory_limit_mb=256)
    assert not result.ok


def test_filling_the_disk(attacked: Sandbox) -> None:
    code = """
written = 0
try:
    for number in range(8):
        with open(f"part{number}", "wb") as file:
            for _ in range(40):
                file.write(bytes(1 << 20)); file.flush(); written += 1
except OSError as error:
    print("refused after", written)
"""
    result = attacked.run(code, memory_limit_mb=256)
    if attacked.isolation in ("namespaces",):
        assert not result.ok or result.stdout.startswith("refused"), result
    single = "with open('big', 'wb') as f:\n    for _ in range(200): f.write(bytes(1 << 20)); f.flush()"
    assert not attacked.run(single, memory_limit_mb=256).ok


def test_descriptors_used_up(attacked: Sandbox) -> None:
    code = "x = []\ntry:\n    for _ in range(5000): x.append(open('/dev/null'))\nexcept OSError: print('refused')"
    assert attacked.run(code).stdout == "refused\n"


def test_directories_nested_too_deep_to_remove(attacked: Sandbox) -> None:
    code = """
import os
for _ in range(1200):
    os.mkdir("d"); os.chdir("d")
os.chmod(".", 0)
print("deep")
"""
    assert attacked.run(code).stdout == "deep\n"


# ------------------------------------------------------------------------------------------------ looking around


def test_host_files(attacked: Sandbox, tmp_path: Path) -> None:
    if not attacked.hides_files:
        pytest.skip("rlimits without Landlock: announced by a warning")
    secret = tmp_path / "secret.txt"
    secret.write_text("host secret")
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    own = Path(__file__).resolve()
    code = f"""
import os
for path in ("/etc/shadow", "/etc/hostname", {str(secret)!r}, {str(own)!r}, "/proc/1/root" + {str(secret)!r},
             "/proc/self/root" + {str(secret)!r}, "/proc/self/cwd/../../../../.." + {str(secret)!r}, "/root/.bashrc"):
    try:
        with open(path, "rb") as file: print("READ", path, file.read(20))
    except OSError: pass
for path in ({str(tmp_path)!r}, "/home", "/var/log", "/run"):
    try: print("LISTED", path, os.listdir(path))
    except OSError: pass
"""
    result = attacked.run(code)
    assert result.ok and result.stdout == "", result


def test_environment_of_the_server(attacked: Sandbox) -> None:
    code = """
import glob, os
text = repr(dict(os.environ))
for path in glob.glob("/proc/*/environ") + ["/proc/self/environ", "/proc/1/environ"]:
    try: text += open(path, "rb").read().decode(errors="replace")
    except OSError: pass
print(text)
"""
    result = attacked.run(code)
    assert result.ok and "PATH" in result.stdout
    assert SECRET not in result.stdout and "SANDBOX_TEST" not in result.stdout


MEMORY_SCAN = """
import re
found = set()
for line in open("/proc/self/maps"):
    limits, rights, *_ = line.split()
    start, end = (int(part, 16) for part in limits.split("-"))
    if not rights.startswith("rw") or end - start > 1 << 28: continue
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        try:
            memory.seek(start)
            found.update(re.findall(rb"SECRET-[0-9a-f]{32}", memory.read(end - start)))
        except (OSError, ValueError): pass
print("found", sorted(found))
"""


def test_memory_holds_nothing_of_the_server_or_of_earlier_requests(attacked: Sandbox) -> None:
    earlier = f"SECRET-{uuid.uuid4().hex}"
    for _ in range(3):
        attacked.run(f"text = {earlier!r}\nprint(text)", stdin=earlier.encode(), files={"f.txt": earlier.encode()})
    result = attacked.run(MEMORY_SCAN)
    assert result.stdout == "found []\n", result
    control = attacked.run(f"kept = {earlier!r}\n" + MEMORY_SCAN)
    assert earlier in control.stdout, "the scan must be able to find what is there"


def test_loopback_network(attacked: Sandbox) -> None:
    abstract = f"\0sandbox-test-{uuid.uuid4().hex}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(abstract)
        unix.listen()
        code = f"""
import socket
import subprocess
import sys
for family, address in ((socket.AF_INET, ("127.0.0.1", {tcp.getsockname()[1]})), (socket.AF_UNIX, {abstract!r})):
    try:
        with socket.socket(family) as s:
            s.settimeout(1)
            s.connect(address)
            print("CONNECTED", address)
    except OSError: pass
for family in (socket.AF_NETLINK, socket.AF_PACKET, socket.AF_VSOCK):
    try: socket.socket(family, socket.SOCK_RAW).close(); print("OPENED", family)
    except OSError: pass
"""
        result = attacked.run(code)
    assert result.ok and result.stdout == "", result


def test_writing_outside(attacked: Sandbox) -> None:
    name = f"escaped-{uuid.uuid4().hex}"
    places = ["/tmp", "/usr", "/usr/lib", "/var/tmp", "/dev/shm", "/etc", "/root", "/", str(Path(__file__).parent)]
    code = f"""
import os
for place in {places!r}:
    try: open(os.path.join(place, {name!r}), "w").write("x")
    except OSError: pass
"""
    assert attacked.run(code).ok
    assert [place for place in places if os.path.exists(os.path.join(place, name))] == []


def test_changing_the_interpreter_for_later_requests(attacked: Sandbox) -> None:
    code = """
import math, os, random, sys
for path in (random.__file__, os.__file__, sys.executable):
    try: open(path, "a").write("raise SystemExit('poisoned')"); print("WROTE", path)
    except OSError: pass
math.pi = 3
"""
    assert attacked.run(code).stdout == ""
    assert attacked.run("import math\nprint(math.pi)").stdout.startswith("3.14159")


def test_proc_tricks(attacked: Sandbox) -> None:
    server = attacked.process.pid
    code = f"""
import os
for path in ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches", "/proc/kcore",
             "/proc/{server}/mem", "/proc/{server}/root/etc/passwd", "/proc/{server}/cwd/pyproject.toml", "/dev/kmsg",
             "/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/kernel/uevent_helper", "/dev/mem", "/dev/vda"):
    for flags in (os.O_WRONLY, os.O_RDONLY):
        try: os.close(os.open(path, flags)); print("OPENED", path, flags)
        except OSError: pass
"""
    if attacked.isolation == "rlimits" and not attacked.hides_files:
        pytest.skip("rlimits without Landlock: announced by a warning")
    result = attacked.run(code)
    opened = [line for line in result.stdout.splitlines() if "/proc/sys/" not in line or line.endswith(" 1")]
    assert result.ok and opened == [], result


# ------------------------------------------------------------------------------------------------ breaking out


def test_signalling_the_server(attacked: Sandbox) -> None:
    outside = {attacked.process.pid, os.getpid(), os.getppid()} - {1}  # a sandbox has a process 1 of its own
    code = f"""
import os, signal
for target in {outside}:
    try: os.kill(target, 0); print("CAN SIGNAL", target)
    except OSError: pass
"""
    result = attacked.run(code)
    assert result.ok and result.stdout == "", result


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGUSR1])
def test_a_signal_to_itself_ends_the_code(attacked: Sandbox, number: signal.Signals) -> None:
    result = attacked.run(f"import os, time\nos.kill(os.getpid(), {number.value})\ntime.sleep(1)\nprint('alive')")
    assert result.outcome is Outcome.FINISHED and not result.ok and result.stdout == "", result
    assert result.return_code in (-number, 128 + number), result  # bubblewrap says it as a shell does


def test_watching_files_of_the_host(attacked: Sandbox) -> None:
    if any("not filtered" in warning for warning in attacked.health["warnings"]):
        pytest.skip("system calls are not filtered")
    result = attacked.run("import ctypes\nprint(ctypes.CDLL(None).inotify_init1(0))")
    assert result.ok and result.stdout == "-1\n", result


def test_signalling_the_process_group(attacked: Sandbox) -> None:
    attacked.run("import os, signal\nos.kill(0, signal.SIGTERM)")
    attacked.run("import os, signal\nif os.fork() == 0: os.kill(0, signal.SIGKILL)\nos.wait()")
    assert "sandbox_worker_restarts 0.0" in attacked.get("/metrics")


def test_surviving_grandchildren(attacked: Sandbox) -> None:
    seconds = f"61.{uuid.uuid4().int % 10**12}"
    code = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for descriptor in range(10):
            try: os.close(descriptor)
            except OSError: pass
        os.execvp("sleep", ["sleep", "{seconds}"])
    os._exit(0)
os.wait()
time.sleep(0.1)
print("left")
"""
    assert attacked.run(code).stdout == "left\n"
    assert attacked.run(code + "while True: pass", run_timeout=0.3).outcome is Outcome.TIME_LIMIT_EXCEEDED
    assert [line for line in command_lines().values() if seconds in line] == []


def test_ptrace_and_other_processes_memory(attacked: Sandbox) -> None:
    code = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for name, arguments in (("ptrace", (16, {attacked.process.pid}, 0, 0)), ("ptrace", (0, 0, 0, 0)),
                        ("process_vm_readv", (os.getpid(), 0, 0, 0, 0, 0))):
    if getattr(libc, name)(*arguments) != -1: print("ALLOWED", name, arguments)
    elif ctypes.get_errno() != 1: print("NOT FILTERED", name, ctypes.get_errno())
"""
    result = attacked.run(code)
    assert result.ok and result.stdout == "", result


def test_privileged_system_calls(attacked: Sandbox) -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for flags in (0x10000000, 0x00020000, 0x40000000, 0x20000000):
    if libc.unshare(flags) != -1: print("UNSHARED", hex(flags))
if libc.mount(b"none", b"/tmp", b"tmpfs", 0, 0) != -1: print("MOUNTED")
if libc.umount2(b"/proc", 2) != -1: print("UNMOUNTED")
if libc.chroot(b"/") != -1: print("CHROOTED")
for number in (0, 1, 100):
    try: os.setuid(number); print("BECAME", number) if number != os.getuid() else None
    except OSError: pass
print([line for line in open("/proc/self/status") if line.startswith("CapEff")][0].split()[1])
"""
    result = attacked.run(code)
    capabilities = int(result.stdout.strip(), 16)
    assert result.ok and capabilities & ~(1 << 2) == 0, result


def test_set_uid_programs_gain_nothing(attacked: Sandbox) -> None:
    code = "print([l for l in open('/proc/self/status') if l.startswith('NoNewPrivs')][0].split()[1])"
    assert attacked.run(code).stdout == "1\n"


def test_symbolic_links_and_special_files_are_not_fetched(attacked: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("host secret")
    code = f"""
import os
os.symlink({str(secret)!r}, "link.txt")
os.symlink("/etc/passwd", "passwd.txt")
os.symlink({str(tmp_path)!r}, "directory")
os.symlink("/", "root")
os.mkfifo("pipe")
os.mkdir("plain"); open("plain/file.txt", "w").write("mine")
"""
    paths = ("link.txt", "passwd.txt", "directory/secret.txt", "root/etc/passwd", "pipe", "plain/file.txt", "missing")
    result = attacked.run(code, fetch_files=paths)
    assert result.ok and dict(result.files) == {"plain/file.txt": b"mine"}


@pytest.mark.parametrize(
    "path", ["../escape", "/etc/escape", "/mnt/../etc/escape", "/mnt", "a/../../escape", "a/..", ".", "", "a/", "x\0y"]
)
def test_path_traversal(attacked: Sandbox, path: str) -> None:
    for field in ({"files": {path: "YQ=="}}, {"fetch_files": [path]}):
        status, body = attacked.post({"code": "print(1)", "language": "python", **field})
        assert (status, body["outcome"]) == (422, "invalid_request")


def test_forging_the_outcome(attacked: Sandbox) -> None:
    code = """
import os
for descriptor in range(3, 20):
    try: os.write(descriptor, b"CME" * 100)
    except OSError: pass
print("still here")
"""
    result = attacked.run(code)
    assert result.stdout == "still here\n" and result.outcome is not Outcome.SANDBOX_ERROR


# ------------------------------------------------------------------------------------------------ leaving things


def test_nothing_is_left_for_the_next_request(attacked: Sandbox) -> None:
    code = """
import os
for path in ("left.txt", os.path.join(os.environ["TMPDIR"], "left.txt"), "/dev/shm/left.txt", "/tmp/left-here.txt"):
    try: open(path, "w").write("x")
    except OSError: pass
import builtins; builtins.left = 1
"""
    assert attacked.run(code).ok
    look = """
import builtins, os
left = [name for name in os.listdir(os.environ["TMPDIR"]) if name.startswith("left")]
print(os.listdir("."), left, hasattr(builtins, "left"), os.path.exists("/dev/shm/left.txt"))
"""
    assert attacked.run(look).stdout == "['main.py'] [] False False\n"


def test_shared_memory_is_not_left(attacked: Sandbox) -> None:
    if attacked.isolation == "rlimits":
        pytest.skip("System V shared memory belongs to the host's ipc namespace")
    make = "import ctypes\nprint(ctypes.CDLL(None).shmget(0x5e7, 4096, 0o1666))"
    find = "import ctypes\nprint(ctypes.CDLL(None).shmget(0x5e7, 4096, 0))"
    assert int(attacked.run(make).stdout) >= 0
    assert attacked.run(find).stdout == "-1\n"
