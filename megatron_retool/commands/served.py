"""What `serve` and `chat` share: the arguments that say what is served, and its configuration."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_retool.commands.running import with_exported_model
from megatron_retool.commands.settings import at_least
from megatron_retool.config import Config, DataConfig

if TYPE_CHECKING:
    from megatron_retool.serving.source import ServedSource

SERVED_SETTINGS = (
    "model.tokenizer_path", "model.families", "rollout.val", "rollout.multi_turn", "rollout.engine",
    "rollout.max_concurrent_trajectories", "rollout.request_retries", "rollout.request_timeout_seconds", "tools",
)  # fmt: skip


def add_target(parser: argparse.ArgumentParser) -> None:
    """TARGET, what chooses of it, and settings."""
    parser.add_argument("target", metavar="TARGET", help="a model's directory, a run, or a checkpoint of one")
    parser.add_argument("--step", metavar="N", type=at_least(0), help="of the run's checkpoint (default: the newest)")
    parser.add_argument("--config", metavar="FILE", help="YAML file in place of the run's config.yaml")
    system = parser.add_mutually_exclusive_group()
    system.add_argument("--system", metavar="TEXT", help="the system message (default: that of the run's prompts)")
    system.add_argument("--no-system", action="store_true", help="no system message")
    parser.add_argument(
        "--log-dir", metavar="DIR", type=Path, help="keep what engines and sandbox print (default: a temporary one)"
    )
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="settings in place of the file's")


def system_message(options: argparse.Namespace, data: DataConfig, say: Callable[[str], None]) -> str | None:
    """The system message of conversations, which is said; None: they have none."""
    from megatron_retool.serving.system_prompt import choose

    message, said = choose(data, options.system, options.no_system)
    say(said)
    return message


@contextmanager
def served_config(
    options: argparse.Namespace, say: Callable[[str], None]
) -> Iterator[tuple[ServedSource, Config, Path]]:
    """What is served, its configuration with a Hugging Face model as model.path, and the directory for logs.

    A checkpoint's export and all that is written meanwhile lie in a temporary directory, which goes with the block.

    Raises:
        FileNotFoundError, ValueError, ConfigError: as ``find_source`` and ``with_exported_model``.
        EngineStartError: from the block, with a word of how to keep the log.
    """
    from megatron_retool.data.path_checks import check_directory
    from megatron_retool.serving.source import find_source, in_temporary_logs, with_work_directory

    if options.log_dir is not None:
        check_directory("--log-dir", options.log_dir.absolute())
    source = find_source(options.target, options.step, options.config, options.overrides)
    say(f"model: {source.description}")
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        config = with_exported_model(source.config, scratch / "model", say)
        config = with_work_directory(config, scratch)
        with in_temporary_logs() if options.log_dir is None else nullcontext():
            yield source, config, options.log_dir or scratch / "logs"
