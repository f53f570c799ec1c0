"""Some steps of the demo on GPUs: Ray, sandbox, rollout, update and weight sync, learner and engines in turns."""

from __future__ import annotations

import json
import subprocess
import sys

from megatron_retool.installation import shipped
from megatron_retool.parity.doctor.outcome import StepFailed, StepFigure
from megatron_retool.parity.doctor.session import DoctorSession
from megatron_retool.runs.metrics_file import read_metrics

CONFIG = shipped("configs/demo_cpu.yaml")
STEPS = 3


def overrides(session: DoctorSession) -> list[str]:
    """Of the demo's settings, for ``session.ranks`` GPUs of one node that learner and engines share."""
    return [
        "trainer.experiment_name=doctor",
        f"trainer.runs_dir={session.directory / 'runs'}",
        f"trainer.total_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        f"trainer.save_freq={STEPS}",
        "trainer.hang_timeout_seconds=300",
        f"cluster.gpus_per_node={session.ranks}",
        "cluster.placement=colocated",
        f"learner.world_size={session.ranks}",
        "learner.dtype=bfloat16",
        f"rollout.engine.count={session.ranks}",
        "rollout.engine.dtype=bfloat16",
        "rollout.engine.mem_fraction_static=0.4",
        "weight_sync.method=tensor",
        "weight_sync.verify=true",
    ]


def colocated_demo(session: DoctorSession) -> list[StepFigure]:
    """
    Raises:
        StepFailed: the run ended with an error; the end of its output.
    """
    session.need_gpus(1, "a run on which learner and engines share GPUs")
    command = [sys.executable, "-m", "megatron_retool", "pipeline", "--config", str(CONFIG), *overrides(session)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout)
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-10:])
        raise StepFailed(f"the demo ended with exit status {done.returncode}:\n{tail}")
    rows = [row for row in read_metrics(session.directory / "runs" / "doctor" / "metrics.jsonl") if row["step"]]
    last = rows[-1] if rows else {}
    print(json.dumps(last))
    figures = [StepFigure("steps", len(rows), at_least=STEPS)]
    for name, unit, at_most in (
        ("perf/time_per_step", "s", None),
        ("rollout_corr/k3_kl", "nats", 0.01),
        ("rollout_corr/log_prob_abs_diff", "nats", None),
    ):
        if name in last:
            figures.append(StepFigure(name, float(last[name]), unit, at_most=at_most))
    return figures
