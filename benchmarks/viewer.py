"""The viewer on large runs, beside reading the same files whole.

Makes, in a temporary folder, a step of ``--responses`` responses of ``--tokens`` tokens with what the learner computed
of them, and a run of ``--steps`` steps of ``--metrics`` metrics. Each figure is of a process of its own that has read
nothing yet: its seconds, and the most memory it held. Baseline of the step: read_trajectories and read_estimates, the
whole files, as `view --text` reads them; of the curves: reading every row of metrics.jsonl.

    python benchmarks/viewer.py

benchmarks/viewer_browser.py opens the same in a browser.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_retool.config import Config, save_config
from megatron_retool.loop.rollout_files import write_estimates
from megatron_retool.runs.metrics_file import read_metrics
from megatron_retool.trajectory import (
    FinishReason,
    ToolCall,
    Trajectory,
    TrajectoryBatch,
    read_trajectories,
    write_trajectories,
)
from run_files.steps import read_estimates, step_path
from run_viewer.curves import FIRST_SHOWN, curves_page
from run_viewer.step_pages import response_page, search_step, step_page
from run_viewer.tokenizers import Tokenizers

STEP = 1
CODE = json.dumps({"code": "print(sum(range(10)))"})


def make_tokenizer(folder: Path, size: int = 20_000) -> int:
    """A byte-level BPE of made-up words in ``folder``; how many tokens it has."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    generator = np.random.default_rng(0)
    letters = np.array(list("eeettaaooiinnsshhrrddlucmfwypgbvk0123456789"))
    words = ("".join(generator.choice(letters, generator.integers(2, 9))) for _ in range(size))
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((f"{word} {word}\n" for word in words), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return int(tokenizer.get_vocab_size())


def make_step(run_dir: Path, responses: int, tokens: int, vocabulary: int, group_size: int = 16) -> None:
    """Turns of 1,640 sampled tokens and a tool's result of 408, one token of 25 an end of line."""
    generator = np.random.default_rng(0)
    line = Tokenizer.from_file(str(run_dir / "tokenizer" / "tokenizer.json")).token_to_id("Ċ")
    place = np.arange(tokens)
    sampled = place % 2048 < 1640
    turns = np.where(sampled, place // 2048, -1).astype(np.int16)
    rows, texts = [], []
    for number in range(responses):
        ids = generator.integers(0, vocabulary, tokens, np.int32)
        ids[generator.random(tokens) < 0.04] = line
        rows.append(
            Trajectory(
                prompt_ids=generator.integers(0, vocabulary, 512, np.int32),
                response_ids=ids,
                loss_mask=sampled,
                rollout_log_probs=np.where(sampled, -generator.exponential(0.5, tokens), 0).astype(np.float32),
                turn_ids=turns,
                weight_versions=np.where(sampled, 1, -1).astype(np.int32),
                group_id=number // group_size,
                index=number % group_size,
                finish_reason=FinishReason.STOP,
                reward=1.0,
                reward_info={"acc": 1.0, "trained": True},
                tool_calls=[
                    ToolCall("code_interpreter", CODE, "ok", 0.5, False, 408, int(start))
                    for start in place[1:][np.diff(sampled.astype(int)) < 0]
                ],
                extra_info={"question": f"question {number}", "ground_truth": "1"},
            )
        )
        texts.append(("a prompt", " ".join(map(str, generator.integers(0, 10**6, tokens // 2)))))
    write_trajectories(rows, step_path(run_dir / "rollouts", STEP), texts)
    batch = TrajectoryBatch.from_trajectories(rows)
    noise = generator.normal(0, 1e-3, len(batch.loss_mask)).astype(np.float32)
    ones = batch.loss_mask.astype(np.float32)
    batch = batch.with_columns(
        old_log_probs=batch.rollout_log_probs + noise, entropy=np.abs(noise), keep=ones, advantages=ones,
        returns=ones, importance_weights=np.exp(noise),
    )  # fmt: skip
    write_estimates(batch, step_path(run_dir / "rollouts", STEP, "learner"))


def make_metrics(run_dir: Path, steps: int, metrics: int) -> None:
    generator = np.random.default_rng(0)
    names = [name + "4" if name.endswith("@") else name for name in FIRST_SHOWN]
    names = [*names, *(f"group_{number % 10}/metric_{number}" for number in range(metrics))][:metrics]
    with open(run_dir / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(steps):
            row = {name: float(generator.random()) for name in names}
            file.write(json.dumps({"step": step, **row}) + "\n")


def measured(function: Callable[..., object], *arguments: object) -> tuple[float, float]:
    """Seconds, and MiB at the peak above what the process held before, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(sender, function, arguments))
    process.start()
    sender.close()  # so that a process that dies ends the waiting
    result: tuple[float, float] = receiver.recv()
    process.join()
    return result


def _measure(sender: object, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    import pyarrow.parquet  # noqa: F401  its import is not what is measured

    before = _peak_mebibytes()
    start = time.perf_counter()
    json.dumps(function(*arguments))
    seconds = time.perf_counter() - start
    sender.send((seconds, _peak_mebibytes() - before))  # type: ignore[attr-defined]


def _peak_mebibytes() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def whole_step(run_dir: Path) -> int:
    folder = run_dir / "rollouts"
    return len(read_trajectories(step_path(folder, STEP))) + len(read_estimates(step_path(folder, STEP, "learner")))


def one_response(run_dir: Path) -> object:
    return response_page(run_dir, STEP, 0, "0", *Tokenizers().of_run(run_dir))


def every_row(run_dir: Path) -> int:
    return len(read_metrics(run_dir / "metrics.jsonl"))


def all_curves(run_dir: Path, metrics: int) -> object:
    return curves_page(run_dir, [f"group_{number % 10}/metric_{number}" for number in range(metrics)])


def options_of(description: str | None) -> argparse.Namespace:
    """How large a run the command line asks for."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--metrics", type=int, default=100)
    return parser.parse_args()


def main() -> None:
    options = options_of(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        save_config(Config(), run_dir / "config.yaml")
        make_step(run_dir, options.responses, options.tokens, make_tokenizer(run_dir / "tokenizer"))
        make_metrics(run_dir, options.steps, options.metrics)
        size = sum(path.stat().st_size for path in (run_dir / "rollouts").iterdir()) / 2**20
        print(f"{options.responses} responses of {options.tokens} tokens: {size:.0f} MiB on disk")
        whole = measured(whole_step, run_dir)
        print(f"{'the whole files (baseline)':34} {whole[0]:6.2f} s  {whole[1]:6.0f} MiB")
        for name, function, arguments in (
            ("list of the step", step_page, (run_dir, STEP)),
            ("a response", one_response, (run_dir,)),
            ("search for a text", search_step, (run_dir, STEP, "no such text")),
        ):
            seconds, memory = measured(function, *arguments)
            ratios = f"{seconds / whole[0]:.2f}, {memory / whole[1]:.2f}"
            print(f"{name:34} {seconds:6.2f} s  {memory:6.0f} MiB  ratio {ratios}")
        rows = measured(every_row, run_dir)
        curves = measured(all_curves, run_dir, options.metrics)
        print(f"{options.steps} steps of {options.metrics} metrics")
        print(f"{'every row read (baseline)':34} {rows[0]:6.2f} s")
        print(f"{'all curves':34} {curves[0]:6.2f} s  ratio {curves[0] / rows[0]:.2f}")


if __name__ == "__main__":
    main()
