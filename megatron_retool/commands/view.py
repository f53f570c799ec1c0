"""What the model did in a step: its responses by group, or one of them with every token in a colour.

Without --group there is a line for each group of the step. The colours show loss_mask, turn, weight_version, surprise,
log_ratio, entropy, advantage, importance_weight or rejected; what they mean is printed below the response.

examples:
  megatron-retool view --text runs/demo
  megatron-retool view --text runs/demo --step 12 --group 3 --color log_ratio
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_retool.commands.settings import at_least


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the run's directory, runs/<experiment_name>")
    parser.add_argument("--text", action="store_true", required=True, help="on this terminal")
    parser.add_argument("--step", metavar="N", type=at_least(1), help="default: the newest")
    parser.add_argument("--group", metavar="ID", type=at_least(0), help="show a response of this group")
    parser.add_argument("--index", metavar="N", type=at_least(0), default=0, help="which response (default: 0)")
    parser.add_argument(
        "--color", metavar="COLUMN", default="surprise", help="what the colours are (default: surprise)"
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="default: the run's model.tokenizer_path or model.path")


def run(options: argparse.Namespace, console: Console) -> int:
    from megatron_retool.viewer.columns import KINDS, token_columns
    from megatron_retool.viewer.stored_step import load_step
    from megatron_retool.viewer.terminal import print_groups, print_response
    from megatron_retool.viewer.token_texts import token_texts

    if options.color not in KINDS:
        raise ValueError(f"--color {options.color!r} is not one of {', '.join(KINDS)}")
    step = load_step(options.run_dir, options.step)
    if options.group is None:
        print_groups(console, step)
        return 0
    row = step.find(options.group, options.index)
    trajectory = step.trajectories[row]
    columns = token_columns(trajectory, step.estimates.get((trajectory.group_id, trajectory.index)))
    if options.color not in columns:
        raise ValueError(
            f"--color {options.color}: the learner has not computed it for response {options.group}/{options.index} of "
            f"step {step.number}, which has {', '.join(columns)}"
        )
    tokenizer = _tokenizer(options.run_dir, options.tokenizer)
    texts = token_texts(trajectory.response_ids.tolist(), lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
    prompt = step.prompts[row] or tokenizer.decode(trajectory.prompt_ids.tolist(), skip_special_tokens=False)
    print_response(console, trajectory, (prompt, texts), columns, KINDS[options.color])
    return 0


def _tokenizer(run_dir: Path, given: str | None) -> Any:
    from megatron_retool.config import ModelConfig, load_config
    from megatron_retool.data.tokenizer import load_tokenizer

    if given is not None:
        return load_tokenizer(ModelConfig(path=given))
    return load_tokenizer(load_config(run_dir / "config.yaml").model)
