"""What trainer.deterministic costs: steps of a demo run with and without it, alternating.

    bash scripts/train_dapo_megatron.sh  # the base: its data and fine-tuned model
    python benchmarks/deterministic.py --base runs/demo
    python benchmarks/deterministic.py --base runs/demo_moe --config configs/demo_moe_cpu.yaml

Every run starts from the same model and takes the same prompts; --rounds pairs of runs of --steps steps. Printed are
seconds for each sampled token (generation) and each trained token (log-probs and update), the first step left out, and
whether the deterministic runs were equal in every token.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_retool.runs.demo_base import DemoBase
from megatron_retool.runs.metrics_file import read_metrics
from megatron_retool.trajectory import read_trajectories

ROOT = Path(__file__).resolve().parents[1]


def run(base: DemoBase, config: Path, directory: Path, name: str, steps: int, deterministic: bool) -> Path:
    settings = [
        f"trainer.runs_dir={directory}", f"trainer.experiment_name={name}", f"trainer.total_steps={steps}",
        f"trainer.deterministic={str(deterministic).lower()}", "trainer.val_before_train=false",
        f"trainer.test_freq={steps}", "trainer.at_end=[]", "data.max_val_samples=4", "demo.enable=false",
        "algorithm.dynamic_sampling.enable=false", *base.data_overrides, *base.model_overrides,
    ]  # fmt: skip
    command = [sys.executable, "-m", "megatron_retool", "train", "--config", str(config), *settings]
    subprocess.run(command, cwd=ROOT, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return directory / name


def seconds_per_token(run_dir: Path) -> tuple[float, float]:
    """Of generation for each sampled token, and of the learner for each token of its batches; in seconds."""
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if row["step"] > 1]
    generation = sum(row["timing_s/gen"] for row in rows) / sum(row["rollout/sampled_tokens"] for row in rows)
    learning = sum(row["timing_s/old_log_prob"] + row["timing_s/update_actor"] for row in rows)
    return generation, learning / sum(row["perf/total_num_tokens"] for row in rows)


def tokens(run_dir: Path, steps: int) -> list[list[int]]:
    files = [run_dir / "rollouts" / f"step_{step:06d}.parquet" for step in range(1, steps + 1)]
    return [trajectory.response_ids.tolist() for file in files for trajectory in read_trajectories(file)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="a demo run whose fine-tuning is done")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "demo_cpu.yaml", help="that it was made with")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    base = DemoBase(options.base.absolute())
    if base.missing is not None:
        sys.exit(f"--base {options.base}: {base.missing} does not exist; give a demo run whose fine-tuning is done")
    found: dict[bool, list[Path]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as directory:
        for index in range(options.rounds):
            for deterministic, runs in found.items():
                name = f"{'deterministic' if deterministic else 'default'}_{index}"
                runs.append(run(base, options.config.absolute(), Path(directory), name, options.steps, deterministic))
        costs = {key: [seconds_per_token(path) for path in runs] for key, runs in found.items()}
        for part, name in enumerate(("generation", "log-probs and update")):
            default, deterministic = (min(cost[part] for cost in costs[key]) for key in (False, True))
            print(f"{name}: {1e3 * deterministic:.3f} ms a token, default {1e3 * default:.3f}: "
                  f"{deterministic / default:.2f} times")  # fmt: skip
        first, *others = (tokens(path, options.steps) for path in found[True])
        equal = "all" if all(other == first for other in others) else "NOT"
        print(f"deterministic runs: {len(first)} responses, {equal} equal")


if __name__ == "__main__":
    main()
