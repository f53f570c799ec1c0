"""Starting the ranks of fine-tuning, and what each of them does first."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from conversion.files.directory import COMPLETE_NAME
from megatron_retool.config import Config, ConfigError, LearnerConfig, load_config, save_config
from megatron_retool.data.path_checks import check_stage_files
from megatron_retool.errors import OperationError
from megatron_retool.runs.checkpoints import remove_unfinished, set_aside
from megatron_retool.runs.leave import LeaveRequest, passed_on
from megatron_retool.runs.loggers import check_loggers
from megatron_retool.sft.run import Run

_MODULE = "megatron_retool.sft"
"""What torchrun's agent starts as a rank, and what tells ranks from other children."""


def fine_tune(config: Config, console: Console | None = None, leave: LeaveRequest | None = None) -> bool:
    """Run ``config.sft`` in this process, or in ``learner.world_size`` processes that it starts.

    Args:
        leave: when set, on any rank, the step under way is finished and checkpointed, and training stops there.

    Returns:
        Whether all stages are done.

    Raises:
        ConfigError, DataError: a setting or a file is wrong (before any training).
        RuntimeError: a rank failed; the message is the rank's own.
        KeyboardInterrupt: stopped by a signal; every rank has ended.
    """
    _check(config)
    leave = leave or LeaveRequest()
    if "RANK" in os.environ:
        return Run(config, leave, console).run()
    if config.learner.world_size == 1:
        try:
            return Run(config, leave, console).run()
        finally:
            remove_unfinished(config.trainer.run_dir)  # of a save that was stopped, which no process writes any more
    if config.cluster.nodes > 1:
        raise ConfigError(
            f"cluster.nodes={config.cluster.nodes}: start the command on every node with torchrun or srun; by itself "
            "it starts processes only on its own host"
        )
    if config.trainer.resume_mode == "disable":
        set_aside(config.trainer.run_dir)
    config.trainer.run_dir.mkdir(parents=True, exist_ok=True)
    save_config(config, config.trainer.run_dir / "config.yaml")
    try:
        with tempfile.TemporaryDirectory() as private:
            with_secrets = Path(private) / "config.yaml"  # the run's own, which others may read, lacks them
            save_config(config, with_secrets, secrets=True)
            _launch(config.learner, with_secrets, leave)
    finally:
        remove_unfinished(config.trainer.run_dir)
    return (config.trainer.run_dir / COMPLETE_NAME).exists()


def _check(config: Config) -> None:
    check_loggers(config.trainer)
    if not config.model.path:
        raise ConfigError("model.path is not set: give the Hugging Face directory of the model to fine-tune")
    check_stage_files(config.sft, config.demo, config.model)


def _launch(learner: LearnerConfig, config_file: Path, leave: LeaveRequest) -> None:
    """Start the ranks under torchrun's agent, in this process, and wait for them."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The agent reports a failed rank at length; only its message is passed on below.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=learner.world_size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        # SIGINT and SIGTERM are this command's own, whose way out ends the ranks as well.
        signals_to_handle="SIGQUIT",
    )
    environment = _environment(OMP_NUM_THREADS=str(learner.threads), GLOO_SOCKET_IFNAME=_loopback())
    with environment, passed_on(leave, _ranks):
        try:
            elastic_launch(settings, sys.executable)("-u", "-m", _MODULE, str(config_file))
        except SignalException:
            raise KeyboardInterrupt from None
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise OperationError(_failure_message(rank, failure)) from None


def _ranks() -> list[int]:
    """Process ids of the ranks that this process has started."""
    result = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if _MODULE in child.cmdline():
                result.append(child.pid)
    return result


def _failure_message(rank: int, failure: Any) -> str:
    data = failure.error_file_data.get("message")
    if isinstance(data, dict) and data.get("message"):
        kind, _, text = data["message"].partition(": ")
        return text if kind in ("ConfigError", "DataError") else f"rank {rank}: {data['message']}"
    return f"rank {rank} ended with exit code {failure.exitcode}; see its output above"


@contextlib.contextmanager
def _environment(**variables: str | None) -> Iterator[None]:
    """Set variables that are not set, for the length of the block."""
    added = {name: value for name, value in variables.items() if value is not None and name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _loopback() -> str | None:
    # All ranks are on this host; a host name that does not resolve must not stop them.
    return "lo" if Path("/sys/class/net/lo").exists() else None


def _end_with_parent() -> None:
    """Let the kernel end this rank when the process that started it is gone (Linux)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)


def worker(config_file: str) -> int:
    """One rank under torchrun. Leaving is no failure to torchrun, which would end the other ranks: 0 as well."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    _end_with_parent()
    handler = get_error_handler()
    handler.initialize()
    try:
        with LeaveRequest() as leave:
            fine_tune(load_config(config_file), leave=leave)
    except (ConfigError, OSError) as error:
        handler.record_exception(error)
        return 1
    except Exception as error:
        handler.record_exception(error)
        from megatron_retool.data.files import DataError

        if isinstance(error, DataError):
            return 1
        raise
    return 0
