"""A teacher's most probable tokens at each token of stored responses, for fine-tuning with loss=top_k.

FILE has prompt_ids, response_ids and loss_mask, as the rollouts of a run or of
`megatron-retool evaluate` have them: the teacher's own traces, or those of the
model that is to learn. The teacher is an SGLang server. DIR gets parquet files for
sft.stages[].train_files and a manifest; the same command continues where it ended.

examples:
  megatron-retool data score runs/teacher/rollouts/step_000000.parquet \\
      --url http://teacher:30000 --model models/student --output data/scored
  megatron-retool data score 'runs/mine/rollouts/*.parquet' --min-reward 1 \\
      --url http://teacher:30000 --model models/student --output data/scored --top-k 50
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megatron_retool.commands.settings import at_least, endpoint_key
from megatron_retool.errors import InputError

if TYPE_CHECKING:
    from megatron_retool.data.scoring import Scoring


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``data score`` takes on the command line."""
    parser.add_argument("files", metavar="FILE", nargs="+", help="parquet, JSON Lines or JSON; a folder or a pattern")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True)
    parser.add_argument("--top-k", metavar="K", type=at_least(1), default=20, help="tokens in each place (default: 20)")
    parser.add_argument("--min-reward", metavar="R", type=float, help="leave out responses of a smaller reward")
    teacher = parser.add_argument_group("the teacher")
    teacher.add_argument("--url", required=True, help="base URL of an SGLang server, such as http://teacher:30000")
    teacher.add_argument(
        "--model", metavar="DIR", required=True, help="the model that is to learn, whose tokenizer is compared"
    )
    teacher.add_argument("--key-variable", metavar="NAME", help="environment variable with the key (default: no key)")
    teacher.add_argument("--concurrency", metavar="N", type=at_least(1), default=64, help="requests (default: 64)")
    teacher.add_argument("--retries", metavar="N", type=at_least(0), default=6, help="of a request (default: 6)")
    teacher.add_argument("--timeout", metavar="SECONDS", type=float, default=600.0, help="(default: 600)")


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``data score``; the exit status."""
    from megatron_retool.commands.running import run_async
    from megatron_retool.data.path_checks import check_directory
    from megatron_retool.data.scored_dataset import MOST_TOKENS
    from megatron_retool.data.scoring import Scoring, check

    check_directory("--output", options.output.absolute())
    key = endpoint_key(options.url, options.key_variable)
    if options.timeout <= 0:
        raise InputError("--timeout must be positive")
    if options.top_k > MOST_TOKENS:
        raise InputError(f"--top-k {options.top_k}: at most {MOST_TOKENS}")
    scoring = Scoring(tuple(options.files), options.url, options.top_k, options.min_reward)
    check(scoring)
    run_async(_score(options, scoring, key, console))
    return 0


async def _score(options: argparse.Namespace, scoring: Scoring, key: str | None, console: Console) -> None:
    from megatron_retool.cluster.teachers import TeacherClient
    from megatron_retool.config import DistillationConfig, ModelConfig, TeacherConfig
    from megatron_retool.data.scoring import ScoringCounts, score
    from megatron_retool.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(ModelConfig(path=options.model))
    how = DistillationConfig(
        max_concurrent=options.concurrency, retries=options.retries, timeout_seconds=options.timeout
    )

    def note(counts: ScoringCounts) -> None:
        console.print(f"{counts.scored} responses scored", markup=False, highlight=False)

    teacher = TeacherClient(TeacherConfig(url=options.url, api_key=key), how)
    try:
        await teacher.check_tokenizer(lambda text: tokenizer.encode(text, add_special_tokens=False))
        counts = await score(scoring, options.output, teacher, note)
    finally:
        await teacher.client.close()
    left_out = f", {counts.left_out} left out" if counts.left_out else ""
    console.print(
        f"{options.output}: {counts.scored} of {counts.rows} responses{left_out}", markup=False, highlight=False
    )
