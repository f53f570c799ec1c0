"""``sglang-cpu-engine``: SGLang's server on a CPU.

    sglang-cpu-engine --model-path Qwen/Qwen2.5-0.5B-Instruct --port 30000

Takes the arguments of ``python -m sglang.launch_server``, and ``--threads N`` (1).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys

from sglang_cpu_engine import SERVER_ARGUMENTS, SGLANG_VERSION, environment


def server(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """The server's command line and its whole environment."""
    parser = argparse.ArgumentParser(
        prog="sglang-cpu-engine",
        description="SGLang's server on a CPU. All other arguments are those of python -m sglang.launch_server.",
        allow_abbrev=False,
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of each tensor-parallel rank")
    own, others = parser.parse_known_args(arguments)
    if own.threads < 1:
        parser.error(f"--threads={own.threads}: at least 1")
    size = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    size.add_argument("--tp-size", "--tensor-parallel-size", "--tp", type=int, default=1)
    ranks: int = size.parse_known_args(others)[0].tp_size
    variables = environment(os.environ, threads=own.threads, tensor_parallel_size=ranks)
    command = [sys.executable, "-m", "sglang.launch_server", *SERVER_ARGUMENTS, *others]
    return command, {**os.environ, **variables}


def why_not() -> str | None:
    """What is wrong with this environment's SGLang; None where it is right."""
    try:
        result = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return f"SGLang is not installed: pip install sglang=={SGLANG_VERSION}"
    if result != SGLANG_VERSION:
        return f"SGLang {result} is installed, and this needs {SGLANG_VERSION}: pip install sglang=={SGLANG_VERSION}"
    return None


def main() -> None:
    """Become the server."""
    command, variables = server(sys.argv[1:])
    if reason := why_not():
        sys.exit(f"sglang-cpu-engine: {reason}")
    os.execve(command[0], command, variables)


if __name__ == "__main__":
    main()
