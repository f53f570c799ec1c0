"""A server of the Tinker protocol: clients of its SDK and cookbook train and sample here.

MODEL is the directory of a Hugging Face model, a run (its newest checkpoint), or
one of a run's checkpoints, which is exported to a temporary directory first. Each
training client gets an adapter (LoRA) of its own on that model. Runs, checkpoints
and sessions are kept in --directory: the same command continues with them.

The recipes of the cookbook know only published names: tinker.names says which of
them stands for MODEL. tinker.api_key is the key that calls must show; without it
any key of the right form will do on this machine, and where --host is not this
machine only, a key is made and printed.

examples:
  megatron-retool tinker models/qwen3-8b tinker.names=Qwen/Qwen3-8B
  megatron-retool tinker runs/demo/export --config configs/demo_lora_cpu.yaml
  megatron-retool tinker models/qwen --host 0.0.0.0 learner.lora.rank=64
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
from pathlib import Path

from rich.console import Console

from megatron_retool.commands.running import run_async, with_exported_model
from megatron_retool.commands.settings import port_number
from megatron_retool.data.path_checks import check_directory
from megatron_retool.runs.lock import run_lock

SETTINGS = ("tinker", "model", "learner", "rollout.engine", "rollout.max_concurrent_trajectories", "cluster")
PORT = 8010
DIRECTORY = Path("runs/tinker")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``tinker`` takes on the command line."""
    parser.add_argument("model", metavar="MODEL", help="a model's directory, a run, or a checkpoint of one")
    parser.add_argument("--config", metavar="FILE", help="YAML file in place of the run's config.yaml")
    parser.add_argument(
        "--directory", metavar="DIR", type=Path, default=DIRECTORY, help=f"what is kept (default: {DIRECTORY})"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, only this machine)"
    )
    parser.add_argument("--port", metavar="P", type=port_number, default=PORT, help=f"default: {PORT}; 0: a free one")
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="settings in place of the file's")


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``tinker``; the exit status."""
    from megatron_retool.serving.server import Address
    from megatron_retool.serving.source import context_length, find_source
    from megatron_retool.tinker.settings import served_model, server_config
    from untrusted.http_listener import is_loopback

    check_directory("--directory", options.directory.absolute())
    source = find_source(options.model, None, options.config, options.overrides)
    near = is_loopback(options.host)
    key, shown = source.config.tinker.api_key, "(that of tinker.api_key)"
    if key is None:
        shown = "tml-local"
        if not near:
            key = shown = f"tml-{secrets.token_urlsafe(24)}"
    address = Address(options.host, options.port, key)
    address.check_free()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    say(f"model: {source.description}")
    with tempfile.TemporaryDirectory() as temporary, run_lock(options.directory, "tinker"):
        config = with_exported_model(source.config, Path(temporary) / "model", say)
        config = server_config(config, options.directory)
        context = context_length(config.rollout, config.model)
        model = served_model(config.model, config.learner, config.tinker, source.name, context, on_this_machine=near)

        async def work() -> None:
            from megatron_retool.tinker.deployment import FATAL, TinkerDeployment
            from megatron_retool.tinker.server import TinkerServer
            from megatron_retool.tinker.service import TinkerService

            async with (
                TinkerDeployment(config, context, say) as processes,
                TinkerService(
                    config.tinker, model, processes.learner, processes.sampler, config.trainer.run_dir, fatal=FATAL
                ) as service,
                TinkerServer(service, host=options.host, port=options.port, api_key=key) as server,
            ):
                say(f"{', '.join(model.names)}: served; Ctrl-C ends it, and runs stay as they were saved last")
                say(f"  TINKER_BASE_URL={address.url(server.port)} TINKER_API_KEY={shown}")
                await service.until_it_dies()

        run_async(work())
    return 0
