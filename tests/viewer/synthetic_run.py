"""A small run on disk, some of whose texts mean harm."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from megatron_retool.config import load_config, save_config
from megatron_retool.loop.rollout_files import write_estimates
from megatron_retool.trajectory import FinishReason, ToolCall, Trajectory, TrajectoryBatch, write_trajectories
from tests.kit.markov_policy import build_tokenizer

HOSTILE = "</script><script>window.owned=1</script><img src=x onerror='window.owned=1'>\u2028<!--"
CODE = json.dumps({"code": "print(6 * 7)"})


def make_run(run_dir: Path, *, steps: int = 3, groups: int = 4, responses: int = 4, seed: int = 0) -> Path:
    """Steps 1 to ``steps``; of each step's groups the last is dropped, and its response 0 has called no tool.

    The learner's log-prob of token 3 of the first response of a step is 0.5 above the engine's, that of token 5
    infinite. Its routers would have chosen otherwise in 0, 1, 2, 3, 0, … layers; every seventh token has none.
    """
    generator = np.random.default_rng(seed)
    tokenizer = build_tokenizer()
    run_dir.mkdir(parents=True)
    tokenizer.save_pretrained(run_dir / "tokenizer")
    save_config(
        load_config(None, [f"model.path={run_dir / 'tokenizer'}", f"trainer.seed={seed}"]), run_dir / "config.yaml"
    )
    for step in range(1, steps + 1):
        rows = [
            _trajectory(tokenizer, generator, step, group, index)
            for group in range(groups)
            for index in range(responses)
        ]
        path = run_dir / "rollouts" / f"step_{step:06d}.parquet"
        texts = [("What is 6 * 7?\n", tokenizer.decode(row.response_ids)) for row in rows]
        write_trajectories(rows, path, texts)
        batch = TrajectoryBatch.from_trajectories([row for row in rows if row.reward_info["trained"]])
        old = batch.rollout_log_probs + generator.normal(0, 1e-3, batch.num_response_tokens).astype(np.float32)
        old[3] = batch.rollout_log_probs[3] + 0.5
        old[5] = np.inf
        keep = np.ones_like(old)
        keep[3] = 0
        tokens = np.arange(batch.num_response_tokens)
        write_estimates(
            batch.with_columns(
                old_log_probs=old, keep=keep, entropy=np.abs(old), advantages=np.sign(old),
                routing_flips=np.where(tokens % 7 == 6, np.nan, tokens % 4),
            ),
            path.with_suffix(".learner.parquet"),
        )  # fmt: skip
    with open(run_dir / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            row = {"step": step, "rollout/acc/mean": step / steps, "timing_s/step": 2.0, "timing_s/gen": 1.5,
                   "actor/entropy": float("nan") if step == 1 else 0.5, "actor/grad_norm": 0.1 * step}  # fmt: skip
            file.write(json.dumps(row) + "\n")
    return run_dir


def _trajectory(tokenizer, generator, step: int, group: int, index: int) -> Trajectory:
    thought = tokenizer.encode(f"Let me think {HOSTILE}\nGrüße 東京 {step}<|im_end|>\n", add_special_tokens=False)
    result = tokenizer.encode("<tool_response>42</tool_response>\n", add_special_tokens=False)
    answer = tokenizer.encode("The answer is 42.<|im_end|>", add_special_tokens=False)
    calls = bool(index)
    ids = [*thought, *result, *answer] if calls else [*thought, *answer]
    sampled = [True] * len(thought) + [False] * (len(ids) - len(thought) - len(answer)) + [True] * len(answer)
    turns = [0] * len(thought) + [-1] * (len(ids) - len(thought) - len(answer)) + [int(calls)] * len(answer)
    status = ("ok", "ok", "timeout", "error")[index % 4]
    return Trajectory(
        tokenizer.encode("What is 6 * 7?\n", add_special_tokens=False),
        ids,
        sampled,
        np.where(sampled, -generator.exponential(0.3, len(ids)), 0),
        turns,
        [step - 1 if each else -1 for each in sampled],
        group_id=group,
        index=index,
        finish_reason=FinishReason.LENGTH if index == 3 else FinishReason.STOP,
        reward=1.0 if index % 2 else -1.0,
        reward_info={"acc": float(index % 2), "pred": HOSTILE, "trained": group != 3, "odd": float("nan")},
        tool_calls=[ToolCall("code_interpreter", CODE, status, 0.25, False, len(result))] if calls else [],
        extra_info={"question": f"Question {group}: what is 6 * 7? {HOSTILE}", "ground_truth": "42"},
    )  # fmt: skip
