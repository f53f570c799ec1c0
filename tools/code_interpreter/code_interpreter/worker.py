"""One worker: takes a request at a time, makes a fresh isolated process for it, watches the clock, and reports.

A worker never reads what a request carries: code, input and output pass by in file descriptors between the server and
the process made for the request.  So a worker's memory, which every later process starts as a copy of, holds nothing
of earlier requests.

Messages on the channel (SOCK_SEQPACKET, JSON). Server to worker: {"id", "timeout", "memory_bytes", "collect"} with the
descriptors request, stdin, stdout, stderr and, for a notebook, records, for a session its socket; or {"cancel": id}.
Worker to server: {"id", "file", "size"} with a descriptor for each collected file, then {"id", "state", "wait_status",
"seconds", "flags", "error", "memory_exceeded"}.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NoReturn

from code_interpreter import (
    console,
    descendants,
    filesystem,
    first_process,
    isolation,
    landlock,
    linux,
    notebook,
    seccomp,
    snippet,
)
from code_interpreter.child_signal import ChildSignal
from code_interpreter.plan import IsolationPlan
from code_interpreter.settings import INTERPRETER_FLAGS

MESSAGE_BYTES = 1 << 16
_MOST_DESCRIPTORS = 5
_KILL_GRACE_SECONDS = 5.0
_TIDY_SECONDS = 0.05
_IN_BUBBLEWRAP = f"{filesystem.SANDBOX}/modules"
"""Where the modules lie that a new interpreter needs."""
_START = (
    f"import sys; sys.path.insert(0, {_IN_BUBBLEWRAP!r}); "
    "from code_interpreter.snippet import main; sys.path.pop(0); main()"
)


class Worker:
    """Owns one uid, network namespace, mount namespace and cgroup, as far as the plan has them."""

    def __init__(self, plan: IsolationPlan, index: int, channel: socket.socket, zygote_bytes: tuple[int, int]) -> None:
        """Take possession of what the plan gives each worker.

        Args:
            plan: what isolates.
            index: number of the worker, from 0.
            channel: SOCK_SEQPACKET to the server.
            zygote_bytes: address space and resident memory that the zygote had when it was ready.

        Raises:
            OSError: the host refuses a part of the plan.
        """
        self._plan = plan
        self._settings = plan.settings
        self._channel = channel
        self._address_space, self._resident = zygote_bytes
        self._uid = plan.uid(index)
        self._forks = plan.kind != "bubblewrap"
        """Whether a snippet starts as a copy of this process, with the imported modules, or as a new interpreter."""
        self._first: tuple[int, int] | None = None
        """Pid 1 of the present snippet's pid namespace, and what keeps it waiting."""
        self._children = ChildSignal()
        self._cgroup = None
        if plan.cgroups is not None:
            self._cgroup = plan.cgroups.create_worker(f"worker-{index}", self._settings.max_processes + 3)
            self._cgroup.join()
        if plan.kind == "namespaces":
            linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWUTS)
            linux.sethostname("sandbox")
            with contextlib.suppress(OSError):  # the snippet then cannot talk to itself, which is no danger
                linux.start_loopback()
            self._own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
            self._has_program = first_process.runs(filesystem.FIRST_PROCESS)
            self._workspace: filesystem.MemoryWorkspace | filesystem.DirectoryWorkspace
            self._workspace = filesystem.MemoryWorkspace(
                self._settings.workspace_mb, self._uid or 0, plan.python_directories
            )
            _set_environment(filesystem.HOME, filesystem.temporary_directory())
        else:
            linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
            self._workspace = filesystem.DirectoryWorkspace(f"{plan.scratch}/worker-{index}", self._uid)
        # bubblewrap needs the capabilities itself and takes them from the code; to keep one, it must be in the set.
        if self._forks and not plan.keep_read_search:
            linux.drop_bounding_set()
        isolated_network = plan.kind != "rlimits"
        self._families = seccomp.LOCAL_AND_INTERNET if isolated_network else ()
        # Made here once: a snippet's process pays for each page of memory that it touches.
        self._filter = seccomp.build_filter(self._families) if plan.seccomp else b""
        self._own_modules = snippet.own_modules()

    def serve(self) -> NoReturn:
        """Answer requests until the server closes the channel."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        while True:
            while not poll.poll(0) and self._workspace.tidy(_TIDY_SECONDS):
                pass
            try:
                message, descriptors, _, _ = socket.recv_fds(self._channel, MESSAGE_BYTES, _MOST_DESCRIPTORS)
            except ConnectionError:
                os._exit(0)
            if not message:
                os._exit(0)
            request = json.loads(message)
            if "cancel" in request:  # came too late: that request is answered already
                continue
            answer = {"id": request["id"], "state": "failed", "error": None}
            try:
                with self._workspace.fresh() as directory:
                    answer.update(self._run(request, descriptors, directory))
                    if request["collect"] and answer["state"] != "failed":
                        self._collect(request["id"], descriptors[0], directory)
            except Exception as error:
                answer.update(state="failed", error=f"the worker failed: {type(error).__name__}: {error}")
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            self._channel.send(json.dumps(answer).encode())

    def _run(self, request: dict[str, Any], descriptors: list[int], directory: str) -> dict[str, Any]:
        status_reader, status_writer = os.pipe()
        if self._cgroup is not None:
            # Pages of the zygote that the snippet writes to are copied at the snippet's expense: leave room for them.
            self._cgroup.set_memory_limit(request["memory_bytes"] + self._resident)
        started = time.monotonic()
        try:

            def be_snippet() -> None:
                try:
                    self._become_snippet(request, descriptors, status_writer, directory)
                except BaseException as error:
                    os.write(status_writer, snippet.SETUP_FAILED + repr(error).encode(errors="replace")[:1000])
                    raise

            child = self._fork(be_snippet)
            os.close(status_writer)
            status_writer = -1
            state, wait_status = self._wait(child, started + request["timeout"], request["id"])
            seconds = time.monotonic() - started
            self._end_descendants()
            os.set_blocking(status_reader, False)
            try:
                flags = os.read(status_reader, 2048)
            except BlockingIOError:
                flags = b""
        finally:
            os.close(status_reader)
            if status_writer >= 0:
                os.close(status_writer)
        answer = {
            "state": state,
            "wait_status": wait_status,
            "seconds": seconds,
            "flags": "",
            "memory_exceeded": self._cgroup is not None and self._cgroup.was_memory_exceeded(),
        }
        if flags.startswith(snippet.STARTED):
            answer["flags"] = flags[1:64].decode("latin-1")
        elif state == "ended" and not answer["memory_exceeded"]:
            reason = flags.removeprefix(snippet.SETUP_FAILED).decode(errors="replace")
            answer.update(state="failed", error=f"the sandbox could not be set up: {reason or 'it ended at once'}")
        return answer

    def _fork(self, be_snippet: Callable[[], None]) -> int:
        if self._plan.kind != "namespaces":
            return linux.fork(be_snippet)
        linux.unshare(linux.CLONE_NEWPID)
        try:
            self._start_first_process()
            return linux.fork(be_snippet)
        except OSError:
            self._end_namespace()
            raise
        finally:
            linux.setns(self._own_pid_namespace, linux.CLONE_NEWPID)

    def _start_first_process(self) -> None:
        """Pid 1 of the new namespace, with which the kernel ends the rest: it waits until this process ends it or dies.

        The snippet is not that process, because pid 1 is spared by signals from within: it could not kill itself.
        """
        reader, writer = os.pipe()

        def wait() -> None:
            os.close(writer)
            os.read(reader, 1)

        self._first = -1, writer
        try:
            if self._has_program:
                program, actions = filesystem.FIRST_PROCESS, [(os.POSIX_SPAWN_DUP2, reader, 0)]
                self._first = os.posix_spawn(program, [program], {}, file_actions=actions), writer
            else:
                self._first = linux.fork(wait), writer
        finally:
            os.close(reader)

    def _end_namespace(self) -> None:
        if self._first is None:
            return
        process, writer = self._first
        self._first = None
        os.close(writer)
        if process > 0:
            self._wait(process, time.monotonic(), None)

    def _wait(self, child: int, deadline: float, request_id: int | None) -> tuple[str, int]:
        """Wait for ``child`` to end, or end it at the deadline or at the server's wish.

        Returns:
            "ended", "timeout" or "cancelled", and the wait status.
        """
        poll = select.poll()
        poll.register(self._children, select.POLLIN)
        poll.register(self._channel, select.POLLIN)
        state = "ended"
        while True:
            ended, wait_status = os.waitpid(child, os.WNOHANG)
            if ended:
                return state, wait_status
            left = deadline - time.monotonic()
            ready = dict(poll.poll(math.ceil(left * 1000))) if left > 0 else {}
            self._children.drain()
            if state == "ended" and self._channel.fileno() in ready:
                message = self._channel.recv(MESSAGE_BYTES)
                if message and json.loads(message).get("cancel") != request_id:
                    continue  # of an earlier request, which was answered before
                state = "cancelled"
            elif left <= 0 and state == "ended":
                state = "timeout"
            elif left <= 0:
                os._exit(1)  # it cannot be killed: give the whole worker up, the server starts another
            else:
                continue
            os.kill(child, signal.SIGKILL)
            poll.unregister(self._channel)
            deadline = time.monotonic() + _KILL_GRACE_SECONDS

    def _end_descendants(self) -> None:
        """End what the snippet left behind."""
        if self._plan.kind == "namespaces":
            self._end_namespace()
            return
        if self._uid is not None:
            isolation.kill_user(self._uid)
        if not descendants.end():
            os._exit(1)  # they cannot be killed: give the whole worker up, the server starts another

    def _become_snippet(self, request: dict[str, Any], descriptors: list[int], status: int, directory: str) -> NoReturn:
        self._children.forget()
        request_fd, *streams = descriptors[:4]
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        records = descriptors[4] if len(descriptors) > 4 else -1
        kept = sorted({2, request_fd, status, max(records, 2)})
        for low, high in zip(kept, [*kept[1:], 1 << 20], strict=True):
            os.closerange(low + 1, high)
        if not self._forks:
            self._execute_bubblewrap((request_fd, status, records), directory)

        os.setsid()  # kill(0, …) reaches the whole process group, across pid namespaces
        header, offset = snippet.read_header(request_fd)
        if self._plan.kind == "namespaces":
            linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS)
            filesystem.mount_proc()
            home, temporary = filesystem.HOME, filesystem.temporary_directory()
        else:
            home, temporary = f"{directory}/home", f"{directory}/tmp"
            _set_environment(home, temporary)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # The kernel, short of memory, takes the snippet and not its worker.
        with contextlib.suppress(OSError):
            score = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
            os.write(score, b"1000")
            os.close(score)
        self._drop_privileges()
        snippet.set_limits(header["limits"], self._address_space)
        os.chdir(home)
        snippet.write_files(request_fd, offset, header["files"], home)
        os.close(request_fd)
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        if self._plan.landlock:
            readable = [*filesystem.readable_paths(), *self._plan.python_directories, f"/proc/{os.getpid()}"]
            landlock.restrict(readable, [home, temporary], filesystem.device_paths())
        if self._plan.seccomp:
            shares_uid = self._plan.kind == "rlimits" and self._uid is None
            seccomp.install(seccomp.build_filter(self._families, os.getpid()) if shares_uid else self._filter)
        self._leave_nothing_of_the_sandbox()
        os.write(status, snippet.STARTED)
        os._exit(snippet.run(header, status, records))

    def _leave_nothing_of_the_sandbox(self) -> None:
        snippet.forget(self._own_modules)
        numpy_random = sys.modules.get("numpy.random")  # which numpy imports when it is first asked for
        if numpy_random is not None:
            numpy_random.seed()  # random reseeds itself after a fork, NumPy's global generator does not
        gc.enable()

    def _drop_privileges(self) -> None:
        if self._plan.keep_read_search:
            linux.prctl(linux.PR_SET_KEEPCAPS, 1)
        self._become_user()
        if self._plan.user_namespace:
            # In a namespace of its own the snippet has no rights over the mounts, and its processes count only for it.
            linux.unshare(linux.CLONE_NEWUSER)
            isolation.write_id_maps(1000, 0, 0)
        if self._plan.keep_read_search:
            linux.keep_read_search_only()
        else:
            linux.clear_capabilities()
        # These come last: a change of uid resets them. Dumpable lets the code read its own /proc/self.
        linux.prctl(linux.PR_SET_DUMPABLE, 1)
        linux.die_with_parent(signal.SIGKILL)

    def _become_user(self) -> None:
        if self._uid is not None:
            os.setgroups([])
            os.setresgid(self._uid, self._uid, self._uid)
            os.setresuid(self._uid, self._uid, self._uid)

    def _execute_bubblewrap(self, descriptors: tuple[int, int, int], directory: str) -> NoReturn:
        self._become_user()
        linux.die_with_parent(signal.SIGKILL)
        command = isolation.bubblewrap_command(self._plan, directory)
        for module in (snippet, notebook, console):
            inside = f"{_IN_BUBBLEWRAP}/{module.__name__.replace('.', '/')}.py"
            command += ["--ro-bind", os.path.abspath(str(module.__file__)), inside]
        for name, value in snippet.INTERPRETER_ENVIRONMENT.items():
            command += ["--setenv", name, value]
        command += ["--remount-ro", "/"]
        if self._plan.seccomp:
            filter_fd = os.memfd_create("seccomp", 0)
            os.write(filter_fd, self._filter)
            os.lseek(filter_fd, 0, os.SEEK_SET)
            command += ["--seccomp", str(filter_fd)]
        for descriptor in descriptors:
            if descriptor >= 0:
                os.set_inheritable(descriptor, True)
        command += [sys.executable, *INTERPRETER_FLAGS, "-X", "utf8", "-c", _START, *map(str, descriptors)]
        os.execvpe("bwrap", command, {"PATH": isolation.SEARCH_PATH})

    def _collect(self, request_id: int, request_fd: int, directory: str) -> None:
        """Send the server the files that the request asks for, opened with the snippet's own rights."""

        def send_files() -> None:
            header, _ = snippet.read_header(request_fd)
            self._become_user()
            for path in header["fetch_files"]:
                try:
                    file = filesystem.open_regular_file(directory, path)
                except OSError:
                    continue
                message = {"id": request_id, "file": path, "size": os.fstat(file).st_size}
                socket.send_fds(self._channel, [json.dumps(message).encode()], [file])
                os.close(file)

        os.waitpid(linux.fork(send_files), 0)


def _set_environment(home: str, temporary: str) -> None:
    os.environ.clear()
    os.environ.update(snippet.environment(home, temporary))
    tempfile.tempdir = None  # remembered from before the environment changed


def run_worker(plan: IsolationPlan, index: int, channel: socket.socket, zygote_bytes: tuple[int, int]) -> NoReturn:
    """Entry of a freshly forked worker process."""
    linux.die_with_parent(signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        worker = Worker(plan, index, channel, zygote_bytes)
    except OSError as error:
        message = {"id": None, "state": "failed", "error": f"worker {index} could not start: {error}"}
        channel.send(json.dumps(message).encode())
        os._exit(1)
    worker.serve()
