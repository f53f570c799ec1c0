"""The doctor as a whole: which steps, on which GPUs, what is shown, what is written."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from megatron_retool.installation import ROOT
from megatron_retool.machine import gpu_count, machine, versions
from megatron_retool.parity.doctor.catalogue import select
from megatron_retool.parity.doctor.outcome import StepOutcome
from megatron_retool.parity.doctor.report import DoctorReport
from megatron_retool.parity.doctor.runner import run_steps
from megatron_retool.parity.doctor.session import DoctorSession
from megatron_retool.parity.doctor.table import outcomes_table, steps_table, summary, verdict_text
from megatron_retool.parity.ranks import Nodes
from megatron_retool.runs.progress import progress_line

SCRIPT = ROOT / "scripts" / "slurm" / "doctor.sbatch"


def examine(
    asked: int | None,
    names: Sequence[str] | None,
    output: Path,
    keep: Path | None,
    console: Console,
    nodes: Nodes | None = None,
) -> int:
    """Run the steps, show each as it ends, and write the report, which grows with every step.

    Args:
        asked: GPUs to use; None: all that there are.
        names: of steps or groups; None: all.
        keep: where logs and files of the steps stay; None: they go.
        nodes: hosts that all call this; None: only this one.

    Returns:
        1 where a step failed, else 0.

    Raises:
        UnknownStep: before anything runs.
        FileExistsError: ``keep`` has something in it.
    """
    steps = select(names)
    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise FileExistsError(f"--keep {keep} has files in it already: name another directory")
        keep.mkdir(parents=True, exist_ok=True)
    directory = (keep or Path(tempfile.mkdtemp(prefix="doctor_"))).resolve()
    if asked == 0:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of every process below
    result = gpu_count()
    session = DoctorSession(directory, result if asked is None else min(result, asked), asked, nodes)
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    report = DoctorReport(date, machine(), versions())
    console.print(f"{report.machine_name}: {len(steps)} steps", highlight=False, markup=False)
    outcomes: list[StepOutcome] = []
    with progress_line(console, "doctor", len(steps)) as line:
        for outcome in run_steps(steps, session, lambda step: line.note(step.name)):
            outcomes.append(outcome)
            text = verdict_text(outcome.verdict).append(f"  {outcome.step}  {outcome.seconds:.1f} s", style="default")
            console.print(text)
            report = DoctorReport(date, report.machine, report.versions, tuple(outcomes))
            report.write(output)
            line.advance()
    if keep is None:
        shutil.rmtree(directory, ignore_errors=True)
    console.print(outcomes_table(outcomes))
    console.print(f"{summary(outcomes)}; {output} has every figure", highlight=False, markup=False)
    return int(report.failed)


def show_steps(names: Sequence[str] | None, console: Console) -> None:
    """Print the steps of ``names``, or all."""
    console.print(steps_table(select(names)))


def submit(options: str, gpus: int | None, names: Sequence[str] | None, output: Path) -> int:
    """Hand the doctor to Slurm, which runs it on each node of an allocation.

    Args:
        options: of sbatch, as on a command line.
        output: the report of the first node; the others' have the node's number before the ending.

    Returns:
        sbatch's exit status.

    Raises:
        FileNotFoundError: there is no sbatch on this host.
        UnknownStep: before anything is submitted.
    """
    select(names)
    if shutil.which("sbatch") is None:
        raise FileNotFoundError("--slurm: there is no sbatch on this host; call it where jobs are submitted")
    arguments = [*(["--gpus", str(gpus)] if gpus is not None else []), *(["--steps", *names] if names else [])]
    command = ["sbatch", *shlex.split(options), str(SCRIPT), str(output.absolute()), *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode
