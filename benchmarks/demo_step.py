"""The demo's reinforcement learning by this checkout and by an earlier revision of it: seconds a step, and accuracy.

    bash scripts/train_dapo_megatron.sh  # the base: its data and fine-tuned model
    python benchmarks/demo_step.py --base runs/demo --baseline REVISION [--seeds 0 1 2] [--steps 50]

Both start from the same fine-tuned model, each with its own configs/demo_cpu.yaml and the packages that are installed
here; their runs take turns, a seed after the other. Printed are, for every seed, the mean seconds of a step (validation
left out; the first two steps, which compile, too), their ratio, and mean@4 on the validation set after every
--test-freq steps.

4907e0a is the last revision before continuous dynamic sampling: rounds of refill, a pass for old log-probs, no shared
prefixes, and the engine's attention as torch has it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_retool.runs.demo_base import DemoBase
from megatron_retool.runs.metrics_file import read_metrics

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 2
ACCURACY = "val-core/all/acc/mean@4"


@contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[Path]:
    """The tree of a revision, in ``folder`` while the block runs."""
    tree = folder / "baseline"
    subprocess.run(["git", "worktree", "add", "--detach", str(tree), revision], cwd=ROOT, check=True)
    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def run(tree: Path, base: DemoBase, run_dir: Path, seed: int, steps: int, test_freq: int) -> None:
    """A whole training run by the code in ``tree``."""
    settings = [
        f"trainer.runs_dir={run_dir.parent}", f"trainer.experiment_name={run_dir.name}", f"trainer.seed={seed}",
        f"trainer.total_steps={steps}", f"trainer.test_freq={test_freq}", "trainer.save_freq=0", "trainer.at_end=[]",
        "demo.enable=false", *base.data_overrides, *base.model_overrides,
    ]  # fmt: skip
    command = [sys.executable, "-m", "megatron_retool", "train", "--config", "configs/demo_cpu.yaml", *settings]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    subprocess.run(command, cwd=tree, env=environment, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def figures(run_dir: Path) -> tuple[float, dict[int, float]]:
    """Mean seconds of a step, and accuracy by step."""
    rows = list(read_metrics(run_dir / "metrics.jsonl"))
    seconds = [row["timing_s/step"] for row in rows if "timing_s/step" in row and row["step"] > WARM_UP]
    return statistics.fmean(seconds), {int(row["step"]): row[ACCURACY] for row in rows if ACCURACY in row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="a demo run whose fine-tuning is done")
    parser.add_argument("--baseline", required=True, help="a revision of this repository")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--test-freq", type=int, default=10)
    options = parser.parse_args()
    base = DemoBase(options.base.absolute())
    if base.missing is not None:
        sys.exit(f"--base {options.base}: {base.missing} does not exist; give a demo run whose fine-tuning is done")
    ratios = []
    with tempfile.TemporaryDirectory() as name, checked_out(options.baseline, Path(name)) as earlier:
        for seed in options.seeds:
            result = {}
            for label, tree in ((options.baseline, earlier), ("now", ROOT)):
                run_dir = Path(name) / f"{label}_{seed}"
                run(tree, base, run_dir, seed, options.steps, options.test_freq)
                seconds, accuracy = figures(run_dir)
                result[label] = seconds
                curve = "  ".join(f"{step}: {value:.3f}" for step, value in accuracy.items())
                print(f"seed {seed}, {label}: {seconds:.2f} s a step; mean@4 by step {curve}", flush=True)
            ratios.append(result["now"] / result[options.baseline])
            print(f"seed {seed}: {ratios[-1]:.3f} of the time per step", flush=True)
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"{statistics.fmean(ratios):.3f} of the time per step, {len(ratios)} seeds; {load}")


if __name__ == "__main__":
    main()
