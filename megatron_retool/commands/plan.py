"""Memory and time of a run on given GPUs, before any is asked for. Needs no GPU and no model files.

Says how much memory each part takes on each GPU, how long a step and the run
take, what does not fit and which knob would make it fit, and which layouts would
be faster. docs/planning.md tells how far its figures can be trusted.

examples:
  megatron-retool plan --config configs/retool_qwen2.5_32b_8xh200.yaml --gpus H200x8
  megatron-retool plan --config configs/retool_qwen3_30b_a3b_2x8h100.yaml --gpus H100x16 --simulate
  megatron-retool plan --run runs/demo
"""

from __future__ import annotations

import argparse

from rich.console import Console

from megatron_retool.commands.settings import at_least

SETTINGS = (
    "trainer.total_steps", "trainer.test_freq", "trainer.quick_test_freq", "trainer.save_freq", "model.path",
    "data.train_batch_size", "data.quick_val_samples", "data.max_prompt_length", "data.max_response_length", "rollout",
    "tools.code_interpreter", "algorithm", "learner", "weight_sync", "cluster",
)  # fmt: skip
EXIT_STATUS = {1: "an error, which the last line says, or the configuration does not fit"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``plan`` takes on the command line."""
    parser.add_argument("--config", metavar="FILE", help="YAML file (default: that of --run, or the defaults)")
    parser.add_argument(
        "--gpus", help="accelerators, such as H100x16 or CPUx2 (default: the configuration's cluster, H100)"
    )
    parser.add_argument(
        "--gpus-per-node", metavar="N", type=at_least(1), default=8, help="of the machines of --gpus (default: 8)"
    )
    parser.add_argument("--model", help="known model or directory with config.json (default: model.path)")
    parser.add_argument("--steps", metavar="N", type=at_least(1), help="of the run (default: trainer.total_steps)")
    parser.add_argument("--suggestions", metavar="N", type=at_least(0), default=5, help="layouts to suggest; 0: none")
    workload = parser.add_argument_group("workload (default: that of the published run, scaled to the limits)")
    workload.add_argument("--run", help="runs/<name>: take the workload from its metrics.jsonl and compare the times")
    workload.add_argument("--response-mean", metavar="TOKENS", type=float, help="response_length/mean")
    workload.add_argument("--clip-ratio", metavar="SHARE", type=float, help="response_length/clip_ratio")
    workload.add_argument("--prompt-mean", metavar="TOKENS", type=float, help="prompt_length/mean")
    workload.add_argument("--tool-calls", metavar="N", type=float, help="tool/calls of a response")
    workload.add_argument("--tool-seconds", metavar="SECONDS", type=float, help="tool/seconds_mean")
    workload.add_argument(
        "--kept-groups", metavar="SHARE", type=float, help="share of groups that dynamic sampling keeps"
    )
    workload.add_argument(
        "--val-prompts", metavar="N", type=at_least(0), default=0, help="prompts of the validation files"
    )
    simulation = parser.add_argument_group("simulation")
    simulation.add_argument("--simulate", action="store_true", help="compare strategies against the long tail")
    simulation.add_argument("--sizes", type=_sizes, metavar="N,N,…", help="numbers of GPUs, such as 8,64,512,4096")
    simulation.add_argument("--max-responses", type=at_least(1), metavar="N", help="the batch grows up to here")
    simulation.add_argument("--seed", metavar="N", type=int, default=0)
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="settings in place of the file's")


def _sizes(text: str) -> list[int]:
    sizes = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if any(size < 1 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive whole numbers, such as 8,64,512")
    return sizes


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``plan``; the exit status."""
    from megatron_retool.planning.cli import run as plan

    return plan(options, console)
