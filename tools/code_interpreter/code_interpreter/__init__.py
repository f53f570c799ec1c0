"""A code interpreter for untrusted snippets: SandboxFusion's HTTP API over warm, isolated processes.

Python, pytest, bash and notebooks; docs/sandbox.md of megatron-retool has what is served and what differs.

    client ──HTTP──▶ server ──▶ pool ──channel──▶ worker ──fork──▶ snippet (one for each request)
                       │                             ▲
                       └──starts──▶ warden ──▶ zygote ──fork on demand

The zygote imports the numerical libraries once.  A snippet starts as a copy of it, in namespaces of its own, without
privileges, under rlimits, a cgroup and a system-call filter; what it reads and writes are in-memory files that pass
from the server straight to it.  The warden chooses the isolation that the host allows (isolation.py) and cleans up
however the server ends.

Use ``client.CodeInterpreterClient`` to run code and ``process.SandboxServerProcess`` to start a server.
"""
