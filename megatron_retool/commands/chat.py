"""Talk to a model on the terminal; the tools that it calls and what they answer are shown.

TARGET is the directory of a Hugging Face model, a run (its newest checkpoint, or
that of --step), or one of a run's checkpoints, which is exported to a temporary
directory first. Engine, tools and sampling (rollout.val) are as the run's
config.yaml says, the system message as in its prompts; a model of no run has
the defaults and no system message.

/reset starts over, /quit ends. Ctrl-C stops an answer.

With --prompt one question is answered: only its answer goes to standard output,
all the rest to standard error.

examples:
  megatron-retool chat runs/demo
  megatron-retool chat runs/demo --step 40 --prompt "What is 47 * 86 + 31?"
  megatron-retool chat models/qwen --no-tools --system "Be brief." rollout.val.temperature=0
"""

from __future__ import annotations

import argparse

from rich.console import Console

from megatron_retool.commands.running import run_async
from megatron_retool.commands.served import SERVED_SETTINGS, add_target, served_config, system_message
from megatron_retool.commands.settings import at_least

SETTINGS = SERVED_SETTINGS
EXIT_STATUS = {1: "an error, which the last line says; --prompt has no answer"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``chat`` takes on the command line."""
    add_target(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="answer this and end")
    parser.add_argument("--no-tools", action="store_true", help="the model gets none")
    parser.add_argument("--seed", metavar="N", type=at_least(0), help="of the draws (default: they differ every time)")


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``chat``; the exit status."""
    from megatron_retool.serving.chat import Chat, Lines
    from megatron_retool.serving.service import Service

    notes = console
    if options.prompt is not None:
        notes = Console(stderr=True, soft_wrap=console.soft_wrap, emoji=False)

    def say(text: str) -> None:
        notes.print(text, style="dim", markup=False, highlight=False)

    with served_config(options, say) as (_, config, logs):
        tools = not options.no_tools and bool(config.rollout.multi_turn.tools)
        system = system_message(options, config.data, say)

        async def work() -> bool:
            async with (
                Service(config, say, log_directory=logs, tools=tools) as service,
                Chat(service, console, notes, system=system, seed=options.seed) as chat,
            ):
                if service.tools is not None:
                    say(f"tools: {', '.join(service.tools.names)}")
                if options.prompt is not None:
                    return await chat.ask(options.prompt) is not None
                await chat.talk(Lines())
                return True

        return 0 if run_async(work()) else 1
