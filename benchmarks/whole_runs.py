"""What settings cost whole runs: steps of a demo run with and without them, alternating.

    bash scripts/train_dapo_megatron.sh  # the base: its data and fine-tuned model
    python benchmarks/whole_runs.py --base runs/demo --settings trainer.deterministic=true
    python benchmarks/whole_runs.py --base runs/demo --settings learner.match_engine=exact \\
        --both learner.dtype=bfloat16 rollout.engine.dtype=bfloat16
    python benchmarks/whole_runs.py --base runs/demo_moe --config configs/demo_moe_cpu.yaml --settings …

Every run starts from the same model and takes the same prompts; --rounds pairs of runs of --steps steps. Printed are
seconds for each sampled token (generation) and each trained token (log-probs and update) and of a step, the first step
left out, the least of the rounds; and whether the runs with the settings were equal in every token.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_retool.runs.demo_base import DemoBase
from megatron_retool.runs.metrics_file import read_metrics
from megatron_retool.trajectory import read_trajectories

ROOT = Path(__file__).resolve().parents[1]


def run(base: DemoBase, config: Path, run_dir: Path, steps: int, overrides: list[str]) -> None:
    settings = [
        f"trainer.runs_dir={run_dir.parent}", f"trainer.experiment_name={run_dir.name}", f"trainer.total_steps={steps}",
        "trainer.val_before_train=false", f"trainer.test_freq={steps}", "trainer.at_end=[]", "data.max_val_samples=4",
        "demo.enable=false", "algorithm.dynamic_sampling.enable=false", *base.data_overrides, *base.model_overrides,
        *overrides,
    ]  # fmt: skip
    command = [sys.executable, "-m", "megatron_retool", "train", "--config", str(config), *settings]
    subprocess.run(command, cwd=ROOT, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def costs(run_dir: Path) -> dict[str, float]:
    """Of generation for each sampled token, of the learner for each token of its batches, and of a step."""
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if row["step"] > 1]
    generation = sum(row["timing_s/gen"] for row in rows) / sum(row["rollout/sampled_tokens"] for row in rows)
    learning = sum(row.get("timing_s/old_log_prob", 0.0) + row["timing_s/update_actor"] for row in rows)
    return {
        "generation, ms a token": 1e3 * generation,
        "log-probs and update, ms a token": 1e3 * learning / sum(row["perf/total_num_tokens"] for row in rows),
        "step, ms": 1e3 * statistics.median(row["timing_s/step"] for row in rows),
    }


def tokens(run_dir: Path, steps: int) -> list[list[int]]:
    files = [run_dir / "rollouts" / f"step_{step:06d}.parquet" for step in range(1, steps + 1)]
    return [trajectory.response_ids.tolist() for file in files for trajectory in read_trajectories(file)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="a demo run whose fine-tuning is done")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "demo_cpu.yaml", help="that it was made with")
    parser.add_argument("--settings", nargs="+", required=True, metavar="KEY=VALUE", help="of every second run")
    parser.add_argument("--both", nargs="+", default=[], metavar="KEY=VALUE", help="of all runs")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    base = DemoBase(options.base.absolute())
    if base.missing is not None:
        sys.exit(f"--base {options.base}: {base.missing} does not exist; give a demo run whose fine-tuning is done")
    names = {"without": options.both, "with": [*options.both, *options.settings]}
    runs: dict[str, list[Path]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as directory:
        for index in range(options.rounds):
            for name, overrides in names.items():
                runs[name].append(Path(directory) / f"{name}_{index}")
                run(base, options.config.absolute(), runs[name][-1], options.steps, overrides)
        result = {name: [costs(run_dir) for run_dir in each] for name, each in runs.items()}
        for part in result["with"][0]:
            with_them, without = (min(each[part] for each in result[name]) for name in ("with", "without"))
            print(f"{part}: {with_them:.4g}, without {without:.4g}: {with_them / without:.2f} times")
        first, *others = (tokens(run_dir, options.steps) for run_dir in runs["with"])
        equal = "all" if all(other == first for other in others) else "NOT"
        print(f"runs with them: {len(first)} responses, {equal} equal")


if __name__ == "__main__":
    main()
