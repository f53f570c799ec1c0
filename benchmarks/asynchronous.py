"""Trained tokens a second of asynchronous training beside sync with continuous refill, where responses wait.

    python benchmarks/asynchronous.py                      # a long tail that waits, as slow tools do
    python benchmarks/asynchronous.py --median 0           # no wait: nothing to gain on shared cores
    python benchmarks/asynchronous.py --max-age 2 --steps 12

Two runs of the demo's stack (Ray, Megatron-Core, SGLang, sandbox) on one small model, one after the other, with the
same prompts and the same wait of each response. The first steps, in which queues fill, do not count. It prints both
rates and their ratio.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.waiting_agent import WaitingAgent
from megatron_retool.runs.metrics_file import read_metrics

ROOT = Path(__file__).resolve().parents[1]

REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    "    return {'score': 1.0 if len(solution_str) % 2 else -1.0, 'acc': float(len(solution_str) % 2)}\n"
)
"""Differs within a group whatever the model can do, so that every step learns."""
WARM_UP = 3
SMALL = (
    "demo.pretrain_rows=1", "demo.sft_rows=1", "demo.train_rows=512", "demo.val_rows=12", "demo.sft_val_rows=1",
    "data.train_batch_size=8", "learner.mini_batch_size=32", "data.max_val_samples=2",
    "algorithm.dynamic_sampling.enable=false", "trainer.val_before_train=false", "trainer.test_freq=0",
    "trainer.save_freq=0", "rollout.multi_turn.max_wall_seconds=600",
)  # fmt: skip


def command(name: str, directory: Path, options: argparse.Namespace, *overrides: str) -> None:
    """A command of the project with the benchmark's settings."""
    waits = f"{{median: {max(options.median, 1e-9)}, sigma: {options.sigma}, most: {options.most}}}"
    subprocess.run(
        [
            *(sys.executable, "-m", "megatron_retool", name, "--config", "configs/demo_cpu.yaml", *SMALL),
            *(
                f"trainer.runs_dir={directory}",
                f"demo.directory={directory}/data",
                f"trainer.total_steps={options.steps}",
            ),
            *(f"reward.function={directory}/reward.py:compute_score", f"rollout.agent_kwargs={waits}"),
            *(f"rollout.agent=benchmarks/waiting_agent.py:{WaitingAgent.__name__}", *overrides),
        ],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def rate(run_dir: Path) -> tuple[float, float]:
    """Trained tokens a second after the first steps, and seconds of a step."""
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if row["step"] > WARM_UP]
    seconds = sum(row["timing_s/step"] for row in rows)
    return sum(row["perf/total_num_tokens"] for row in rows) / seconds, seconds / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--max-age", type=int, default=1)
    parser.add_argument("--median", type=float, default=1.0, help="seconds that half of the responses wait at most")
    parser.add_argument("--sigma", type=float, default=1.2, help="of the wait's logarithm")
    parser.add_argument("--most", type=float, default=15.0, help="seconds of the longest wait")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        (directory / "reward.py").write_text(REWARD)
        command("make-demo", directory, options)
        modes = {"sync": ("trainer.mode=sync",), "async": ("trainer.mode=async", f"trainer.max_age={options.max_age}")}
        rates = {}
        for mode, overrides in modes.items():
            command("train", directory, options, f"trainer.experiment_name={mode}", "trainer.at_end=[]", *overrides)
            rates[mode], seconds = rate(directory / mode)
            print(f"{mode:5}  {rates[mode]:7.0f} trained tokens a second, {seconds:.2f} s a step", flush=True)
    print(f"ratio {rates['async'] / rates['sync']:.2f} (async to sync)")


if __name__ == "__main__":
    main()
