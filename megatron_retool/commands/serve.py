"""A model behind OpenAI's and Anthropic's APIs: Chat Completions, Responses, Messages.

TARGET is the directory of a Hugging Face model, a run (its newest checkpoint, or
that of --step), or one of a run's checkpoints, which is exported to a temporary
directory first. Engines, tools and sampling (rollout.val) are as the run's
config.yaml says; a model of no run has the defaults. A call without a system
message gets that of the run's prompts.

With --tools the server runs the run's tools itself: a call that brings no tools
of its own gets the model's final answer. Without, tools are the client's alone.

A key given by --api-key, or by the environment's MEGATRON_RETOOL_API_KEY (which
other users of the machine do not see), must be shown by every call. Where --host
is not this machine alone, there is a key in any case.

examples:
  megatron-retool serve runs/demo
  megatron-retool serve runs/demo --step 40 --tools --port 8123
  megatron-retool serve models/qwen --host 0.0.0.0 rollout.engine.count=2
"""

from __future__ import annotations

import argparse
import os
import secrets

from rich.console import Console
from rich.markup import escape

from megatron_retool.commands.running import run_async
from megatron_retool.commands.served import SERVED_SETTINGS, add_target, served_config, system_message
from megatron_retool.commands.settings import port_number

SETTINGS = SERVED_SETTINGS
PORT = 8000
KEY_VARIABLE = "MEGATRON_RETOOL_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``serve`` takes on the command line."""
    add_target(parser)
    parser.add_argument("--tools", action="store_true", help="run the run's tools on the server's side")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, only this machine)"
    )
    parser.add_argument("--port", metavar="P", type=port_number, default=PORT, help=f"default: {PORT}; 0: a free one")
    parser.add_argument("--api-key", metavar="KEY", help=f"what calls must show (default: {KEY_VARIABLE})")


def key_of(option: str | None, variable: str | None, *, private: bool) -> tuple[str | None, str]:
    """The key that calls must show, and what the terminal shows in its place.

    An empty text is no key, as an unset shell variable gives one.

    Args:
        option: what --api-key gives.
        variable: the value of the environment's MEGATRON_RETOOL_API_KEY.
        private: only this machine reaches the address; elsewhere a key is made where none is given.
    """
    if option:
        return option, "(that of --api-key)"
    if variable and option is None:
        return variable, f"${KEY_VARIABLE}"
    if private:
        return None, "any"
    key = secrets.token_urlsafe(24)
    return key, key


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``serve``; the exit status."""
    from megatron_retool.serving.server import Address, serve
    from megatron_retool.serving.service import Service
    from untrusted.http_listener import is_loopback

    key, shown = key_of(options.api_key, os.environ.get(KEY_VARIABLE), private=is_loopback(options.host))
    address = Address(options.host, options.port, key)
    address.check_free()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    with served_config(options, say) as (source, config, logs):
        system = system_message(options, config.data, say)

        def started(url: str) -> None:
            console.print(f"[bold]{escape(source.name)}[/] is served; Ctrl-C ends it", highlight=False)
            say(f"  OpenAI     OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={shown}")
            say(f"  Anthropic  ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={shown}")
            say(f"  health     {url}/health")

        async def work() -> None:
            async with Service(config, say, log_directory=logs, tools=options.tools) as service:
                if service.tools is not None:
                    say(f"tools run here: {', '.join(service.tools.names)}")
                await serve(service, source.name, address, started, system)

        run_async(work())
    return 0
