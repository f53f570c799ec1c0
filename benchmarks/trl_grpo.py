"""TRL's GRPOTrainer and this project on the demo's model: seconds a step, and held-out accuracy over the steps.

    bash scripts/train_dapo_megatron.sh   # the base: its data and fine-tuned model
    python benchmarks/trl_grpo.py --base runs/demo
    python benchmarks/trl_grpo.py --base runs/demo --quick

Both sides start from the base's fine-tuned model and take the same prompts in the same order, with the same number of
responses, tool, reward, clipping, optimizer and updates a step, in float32 on all cores. Rounds alternate: in the first
this project trains first, in the second TRL. A step is generation with its tools and rewards, old log-probs and
updates, here with the sending of weights to the engine; validation and checkpoints are left out. Steps are counted from
the second on. Accuracies are validations of both sides by this project's evaluation.

TRL generates with transformers, for want of a GPU for vLLM, and calls tools one after another. It runs in an
environment of its own, which the first call makes of requirements/trl.txt. Everything lies in --output, the numbers in
results.json. docs/benchmarks.md says what is not equal between the two.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.trl_grpo_service import ToolAndReward
from code_interpreter.client import CodeInterpreterClient
from megatron_retool.commands.settings import at_least
from megatron_retool.config import Config, ConfigError, load_config
from megatron_retool.data.prompts import PromptRow, PromptSource
from megatron_retool.data.tokenizer import load_tokenizer
from megatron_retool.parity.doctor.host_steps import read_pins
from megatron_retool.runs.demo_base import DemoBase
from megatron_retool.runs.metrics_file import read_metrics
from megatron_retool.trajectory import read_trajectories
from tools.registry import ToolRegistry

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements" / "trl.txt"
OURS, TRL = "megatron-retool", "TRL"
SETTINGS: Mapping[str, Any] = {
    "rollout.multi_turn.format": "hermes",
    "rollout.multi_turn.tools": ["code_interpreter"],
    "rollout.branching.enable": False,
    "rollout.partial.enable": False,
    "rollout.staleness": 0,
    "algorithm.advantage": "grpo",
    "algorithm.policy_loss": "clip",
    "algorithm.dual_clip": None,
    "algorithm.loss_aggregation": "token-mean",
    "algorithm.entropy_coefficient": 0,
    "algorithm.kl_in_loss": 0,
    "algorithm.kl_in_reward": 0,
    "algorithm.dynamic_sampling.enable": False,
    "algorithm.adaptive_sampling.enable": False,
    "reward.overlong.filter": False,
    "learner.dtype": "float32",
    "learner.optimizer.schedule": "constant",
}
"""What the two sides are compared with; the values that others would be mapped to are not written down here."""


# --- what both are told ---------------------------------------------------------------------------------------------


def grpo_settings(config: Config, steps: int) -> dict[str, Any]:
    """Keyword arguments of TRL's GRPOConfig that come to the same as ``config``, for ``steps`` steps of its loop.

    Raises:
        ConfigError: a setting has another value than in ``SETTINGS``.
    """
    for key, value in SETTINGS.items():
        result: Any = config
        for name in key.split("."):
            result = getattr(result, name)
        if result != value:
            raise ConfigError(f"{key}={result!r}: this comparison is for {value!r} alone")
    sampling, turns, optimizer = config.rollout.train, config.rollout.multi_turn, config.learner.optimizer
    updates = config.data.train_batch_size * sampling.n // config.learner.mini_batch_size
    return {
        "max_steps": steps * updates,
        "steps_per_generation": updates,
        "per_device_train_batch_size": config.learner.mini_batch_size,
        "gradient_accumulation_steps": 1,
        "num_generations": sampling.n,
        "num_iterations": 1,
        "shuffle_dataset": False,
        "max_completion_length": config.data.max_response_length,
        "max_tool_calling_iterations": min(turns.max_tool_calls, turns.max_assistant_turns - 1),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p or None,
        "loss_type": "dapo",
        "scale_rewards": "group" if config.algorithm.normalize_by_std else "none",
        "epsilon": config.algorithm.clip_ratio_low,
        "epsilon_high": config.algorithm.clip_ratio_high,
        "beta": 0.0,
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": optimizer.warmup_steps,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.clip_grad,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "seed": config.trainer.seed,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def validated_steps(steps: int, every: int) -> list[int]:
    """Step 0, every multiple of ``every``, and the last."""
    return sorted({*range(0, steps + 1, every), steps})


def draw_prompts(config: Config, tokenizer: Any, steps: int) -> list[PromptRow]:
    """The prompts of the first ``steps`` steps in the order in which a run of ``config`` draws them.

    Raises:
        ConfigError, DataError: see PromptSource; or a prompt has tools or settings of tools of its own.
    """
    client = CodeInterpreterClient(["http://unused"])
    tools = ToolRegistry.from_config(config.tools, config.rollout.multi_turn.tools, code_interpreter=client)
    source = PromptSource(config.data, tokenizer, tools, config.trainer.seed)
    rows = source.next_batch(steps * config.data.train_batch_size)
    for row in rows:
        for key in ("tools_kwargs", "tool_selection"):
            if row.extra_info.get(key):
                raise ConfigError(f"the prompt {row.uid} has {key}, and TRL gives every prompt the same tools")
    return rows


def write_prompts(rows: Sequence[PromptRow], path: Path) -> None:
    """A line of JSON for each: its number, messages and token ids."""
    with open(path, "w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            line = {"row": number, "messages": row.messages, "prompt_ids": row.prompt_ids}
            file.write(json.dumps(line) + "\n")


# --- TRL's environment ----------------------------------------------------------------------------------------------


def pinned() -> dict[str, str]:
    """Version of each package of TRL's environment."""
    return dict(read_pins(REQUIREMENTS.read_text(encoding="utf-8")))


def prepare_environment(venv: Path) -> Path:
    """The Python of TRL's environment, which is made where there is none."""
    python = venv / "bin" / "python"
    if not venv.exists():
        print(f"installing {REQUIREMENTS.relative_to(ROOT)} into {venv} (once)", flush=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
        try:
            subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
            subprocess.run([*install, "-r", str(REQUIREMENTS)], check=True)
        except (subprocess.CalledProcessError, OSError) as error:
            shutil.rmtree(venv, ignore_errors=True)
            sys.exit(f"TRL's environment could not be made: {error}. Install {REQUIREMENTS} elsewhere and name --venv")
    wanted = pinned()
    ask = "import importlib.metadata, sys; print(*map(importlib.metadata.version, sys.argv[1:]))"
    try:
        done = subprocess.run([str(python), "-I", "-c", ask, *wanted], capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        sys.exit(f"--venv {venv}: {error.stderr.strip().splitlines()[-1]}; delete it, and it is made again")
    except OSError as error:
        sys.exit(f"--venv {venv} is no environment of Python: {error}")
    for (name, version), result in zip(wanted.items(), done.stdout.split(), strict=True):
        if result.partition("+")[0] != version:
            sys.exit(
                f"--venv {venv} has {name} {result}, not the {version} of {REQUIREMENTS}: delete it, or name another"
            )
    return python


# --- the runs -------------------------------------------------------------------------------------------------------


def run(name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
    """Run to the end; where it fails, exit with the end of its output."""
    with open(log, "wb") as file:
        code = subprocess.run(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        ).returncode
    if code:
        end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])
        sys.exit(f"{name} failed with exit code {code}. The end of {log}:\n{end}")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What every round has in common.

    Attributes:
        settings: overrides of the configuration file, for both sides.
        trl_settings: of TRL's GRPOConfig, over those that follow from the configuration.
    """

    base: DemoBase
    config_file: Path
    settings: tuple[str, ...]
    output: Path
    python: Path
    steps: int
    eval_every: int
    trl_settings: Mapping[str, Any]

    def overrides(self, seed: int) -> list[str]:
        return [
            *self.base.data_overrides, "demo.enable=false", f"trainer.seed={seed}", f"trainer.runs_dir={self.output}",
            "trainer.log_val_generations=0", "algorithm.dynamic_sampling.enable=false", *self.settings,
        ]  # fmt: skip

    def config(self, seed: int) -> Config:
        return load_config(self.config_file, [*self.overrides(seed), *self.base.model_overrides])

    def megatron_retool(self, command: str, seed: int, name: str, *settings: str) -> Path:
        """Run a command of this project as the run ``name``; its directory."""
        given = [*self.overrides(seed), f"trainer.experiment_name={name}", *settings]
        log = self.output / f"{name.replace('/', '_')}.log"
        run(
            f"megatron-retool {command}",
            [sys.executable, "-m", "megatron_retool", command, "--config", str(self.config_file), *given],
            log,
        )
        return self.output / name

    def ours(self, seed: int) -> dict[str, Any]:
        """Train with this project; steps and accuracies."""
        run_dir = self.megatron_retool(
            "train", seed, f"round_{seed}/ours", f"trainer.total_steps={self.steps}", "trainer.val_before_train=true",
            f"trainer.test_freq={self.eval_every}", "trainer.save_freq=0", "trainer.at_end=[]",
            *self.base.model_overrides,
        )  # fmt: skip
        self._check_prompts(run_dir, seed)
        rows = {row["step"]: row for row in read_metrics(run_dir / "metrics.jsonl")}
        metric = self._accuracy(seed)
        return {
            "steps": [our_step(rows[step]) for step in range(1, self.steps + 1)],
            "accuracy": {step: rows[step][metric] for step in validated_steps(self.steps, self.eval_every)},
        }

    def trl(self, seed: int) -> dict[str, Any]:
        """Train with TRL, and validate what it saved; steps and accuracies."""
        config = self.config(seed)
        output = self.output / f"round_{seed}" / "trl"
        output.mkdir(parents=True)
        tokenizer = load_tokenizer(config.model)
        rows = draw_prompts(config, tokenizer, self.steps)
        write_prompts(rows, output / "prompts.jsonl")
        threads = len(os.sched_getaffinity(0))
        validated = validated_steps(self.steps, self.eval_every)
        grpo = grpo_settings(config, self.steps)
        settings = {
            "model": str(self.base.sft_hf),
            "prompts": str(output / "prompts.jsonl"),
            "output": str(output),
            "threads": threads,
            "save_at": validated[1:],
            "updates_per_step": grpo["steps_per_generation"],
            "grpo": grpo | self.trl_settings,
        }
        trainer = str(ROOT / "benchmarks" / "trl_grpo_trainer.py")
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
        with ToolAndReward(config, tokenizer, rows) as service:
            settings["service"] = service.url
            (output / "settings.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
            command = [str(self.python), "-I", trainer, str(output / "settings.json")]
            run("TRL's trainer", command, self.output / f"round_{seed}_trl.log", environment)
        lines = (output / "steps.jsonl").read_text(encoding="utf-8").splitlines()
        models = {step: output / f"step_{step}" if step else self.base.sft_hf for step in validated}
        accuracy = {}
        for step, model in models.items():
            name = f"round_{seed}/trl_validation_{step}"
            run_dir = self.megatron_retool("evaluate", seed, name, f"model.path={model}")
            accuracy[step] = read_metrics(run_dir / "metrics.jsonl")[-1][self._accuracy(seed)]
        return {"steps": [json.loads(line) for line in lines], "accuracy": accuracy}

    def _accuracy(self, seed: int) -> str:
        return f"val-core/all/acc/mean@{self.config(seed).rollout.val.n}"

    def _check_prompts(self, run_dir: Path, seed: int) -> None:
        """Exit where the run drew other prompts than ``draw_prompts`` says."""
        config = self.config(seed)
        size = config.data.train_batch_size
        rows = draw_prompts(config, load_tokenizer(config.model), self.steps)
        for step in range(1, self.steps + 1):
            stored = read_trajectories(run_dir / "rollouts" / f"step_{step:06d}.parquet")
            drawn = {tuple(row.prompt_ids) for row in rows[(step - 1) * size : step * size]}
            if {tuple(trajectory.prompt_ids.tolist()) for trajectory in stored} != drawn:
                sys.exit(f"step {step} of {run_dir} had other prompts than the ones that TRL is given")


def our_step(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of metrics.jsonl in the form of TRL's steps.jsonl."""
    seconds = row["timing_s/step"]
    return {
        "step": row["step"],
        "seconds": seconds,
        "experience_seconds": seconds - row["timing_s/update_actor"] - row["timing_s/weight_sync"],
        "responses": int(row["rollout/trajectories"]),
        "response_tokens": round(row["response_length/mean"] * row["rollout/trajectories"]),
        "sampled_tokens": int(row["rollout/sampled_tokens"]),
        "accuracy": row["rollout/acc/mean"],
    }


# --- what is printed ------------------------------------------------------------------------------------------------


def speed(rounds: Sequence[Mapping[str, Any]], side: str) -> dict[str, float]:
    """Of all rounds of ``side``, from each one's second step on: seconds of a step, of its parts and by tokens."""
    rows = [row for each in rounds for row in each[side]["steps"] if row["step"] > 1]
    seconds = [row["seconds"] for row in rows]
    tokens = sum(row["response_tokens"] for row in rows)
    return {
        "steps": len(rows),
        "median_seconds": statistics.median(seconds),
        "total_seconds": sum(seconds),
        "median_experience_seconds": statistics.median(row["experience_seconds"] for row in rows),
        "median_update_seconds": statistics.median(row["seconds"] - row["experience_seconds"] for row in rows),
        "response_tokens_a_step": tokens / len(rows),
        "seconds_per_1000_tokens": 1000 * sum(seconds) / tokens,
    }


def speed_lines(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Both sides' speeds with the ratio of TRL's to this project's."""
    ours, trl = speed(rounds, OURS), speed(rounds, TRL)
    names = {
        "median_seconds": "seconds a step, median",
        "median_experience_seconds": "  generation to old log-probs",
        "median_update_seconds": "  updates, weights to the engine",
        "total_seconds": f"seconds of {ours['steps']} steps",
        "response_tokens_a_step": "response tokens a step",
        "seconds_per_1000_tokens": "seconds for 1,000 of them",
    }
    lines = [f"{'':34}{OURS:>16}{TRL:>10}{'ratio':>8}"]
    for key, name in names.items():
        lines.append(f"{name:34}{ours[key]:16.2f}{trl[key]:10.2f}{trl[key] / ours[key]:8.2f}")
    return lines


def accuracy_lines(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Held-out accuracy by step, each side's with the seconds of its steps so far; means over the rounds."""
    lines = [f"{'step':>4}  {OURS + ': seconds':>26}{'accuracy':>10}  {TRL + ': seconds':>14}{'accuracy':>10}"]
    for step in rounds[0][OURS]["accuracy"]:
        cells = []
        for side in (OURS, TRL):
            so_far = [sum(r["seconds"] for r in each[side]["steps"] if r["step"] <= step) for each in rounds]
            cells += [statistics.mean(so_far), statistics.mean(each[side]["accuracy"][step] for each in rounds)]
        lines.append(f"{step:4}  {cells[0]:26.1f}{cells[1]:10.3f}  {cells[2]:14.1f}{cells[3]:10.3f}")
    return lines


# --- the command ----------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="a demo run whose fine-tuning is done")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "demo_cpu.yaml", help="that it was made with")
    parser.add_argument("--steps", type=at_least(2), default=20)
    parser.add_argument("--rounds", type=at_least(1), default=2)
    parser.add_argument("--eval-every", type=at_least(1), default=10, help="steps between validations")
    parser.add_argument("--venv", type=Path, default=ROOT / "runs" / "trl_venv", help="TRL's environment")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "trl_grpo")
    parser.add_argument(
        "--trl", type=json.loads, default={}, metavar="JSON",
        help='further settings of GRPOConfig, such as {"use_transformers_continuous_batching": true}',
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="one round of two steps, validated on 16 prompts")
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="settings of both sides")
    return parser.parse_args()


def main() -> None:
    options = parse()
    base = DemoBase(options.base.absolute())
    if base.missing is not None:
        sys.exit(f"--base {options.base}: {base.missing} does not exist; give a demo run whose fine-tuning is done")
    output = options.output.absolute()
    if output.exists():
        sys.exit(f"--output {options.output} exists: delete it, or name another")
    comparison = Comparison(
        base=base,
        config_file=options.config.absolute(),
        settings=(*(["data.max_val_samples=16"] if options.quick else []), *options.overrides),
        output=output,
        python=prepare_environment(options.venv.absolute()),
        steps=2 if options.quick else options.steps,
        eval_every=2 if options.quick else options.eval_every,
        trl_settings=options.trl,
    )
    try:
        grpo_settings(comparison.config(0), comparison.steps)
    except ConfigError as error:
        sys.exit(str(error))
    output.mkdir(parents=True)
    rounds: list[dict[str, Any]] = []
    for seed in range(1 if options.quick else options.rounds):
        sides = {OURS: comparison.ours, TRL: comparison.trl}
        result = {}
        for name in (OURS, TRL) if seed % 2 == 0 else (TRL, OURS):
            print(f"round {seed}: {name}", flush=True)
            result[name] = sides[name](seed)
        rounds.append(result)
        results = {
            "versions": pinned(),
            "speed": {side: speed(rounds, side) for side in sides},
            "rounds": rounds,
        }
        (output / "results.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
    print("\n".join(["", *speed_lines(rounds), "", *accuracy_lines(rounds)]))


if __name__ == "__main__":
    main()
