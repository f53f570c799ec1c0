"""A server of the official package: over its pipes, or, with a file for its port, over HTTP."""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("notes")
kept: list[str] = []


@server.tool()
def keep(text: str, times: int = 1) -> str:
    """Keep a text.

    Args:
        text: What to keep.
        times: How often.
    """
    kept.extend([text] * times)
    return f"{len(kept)} kept by {os.environ.get('NOTES_OWNER', 'nobody')}"


@server.tool()
def where() -> dict[str, int]:
    """Tell the process."""
    return {"pid": os.getpid()}


@server.tool()
def fail(reason: str) -> str:
    """Raise."""
    raise ValueError(reason)


@server.tool()
def sleep(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "awake"


@server.tool()
def die() -> str:
    """End the process."""
    os._exit(3)


if len(sys.argv) > 1:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run("stdio")
