"""docs/metrics.md names every metric that the code writes."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_retool.algorithms.dynamic_sampling import filter_groups
from megatron_retool.algorithms.rollout_correction import rollout_correction
from megatron_retool.algorithms.settings import RolloutCorrectionSettings
from megatron_retool.config import EarlyStoppingConfig
from megatron_retool.loop.early_stopping import EarlyStopping
from megatron_retool.loop.metrics import batch_metrics, per_token_metrics, reward_metrics, rollout_metrics
from megatron_retool.loop.validation_metrics import BEHAVIOUR, quick_name
from megatron_retool.rewards.difficulty import difficulty_metrics
from megatron_retool.rewards.evaluation import evaluation_metrics
from megatron_retool.runs.peak_memory import peak_memory
from megatron_retool.trajectory import FinishReason, RolloutTiming, ToolCall, Trajectory, TrajectoryBatch
from run_files.phases import Phase
from run_viewer.metric_captions import caption_of
from sglang_rollout.engine.rollout_statistics import RolloutStatistics

ROOT = Path(__file__).parents[1]
FIRST_WORDS = (
    "actor|critic|rollout|rollout_corr|reward|tool|perf|checkpoint|monitor|dynamic_sampling|training|sft|response|"
    "response_length|prompt_length|num_turns|tool_call_counts|weight_sync|global_seqlen|routing_replay|early_stopping|"
    "code"
)


def undocumented(names):
    return sorted(name for name in names if caption_of(name) is None)


def trajectories():
    return [
        Trajectory([1, 2], [3, 4], [True, True], [-0.5, -0.1], [0, 0], [0, 0], group, index, FinishReason.STOP,
                   reward=float(index), reward_info={"acc": float(index), "f1": 0.5, "pred": str(index)},
                   tool_calls=[
                       ToolCall("search", "", "ok", 1.0),
                       ToolCall("code_interpreter", '{"code": "1"}', "error", 1.0, position=0),
                   ],
                   extra_info={"data_source": "aime", "index": 7 * group}, timing=RolloutTiming())
        for group in (0, 1) for index in (0, 1)
    ]  # fmt: skip


def written():
    rows = trajectories()
    batch = TrajectoryBatch.from_trajectories(rows)
    tokens = batch.loss_mask.astype(np.float32)
    batch = batch.with_columns(advantages=tokens, returns=np.arange(len(tokens)), values=tokens)
    log_probs = torch.from_numpy(batch.rollout_log_probs)
    yield from rollout_metrics(rows)
    behaviour = [name for name in rollout_metrics(rows) if name.startswith(BEHAVIOUR)]
    yield from (f"val-aux/{name}" for name in behaviour)
    for device in (torch.device("cpu"), torch.device("cuda")):
        yield from (f"perf/{name}{model}" for name in peak_memory(device) for model in ("", "/critic"))
    yield from batch_metrics(batch, 4, 4)
    yield from reward_metrics(batch)
    yield from evaluation_metrics(rows)
    yield from (quick_name(name) for name in evaluation_metrics(rows))
    yield from (quick_name(f"val-aux/{name}") for name in (*behaviour, "reward/scored"))
    yield from difficulty_metrics(rows)
    yield from EarlyStopping(EarlyStoppingConfig("val-core/all/acc/mean@1")).record(1, {"val-core/all/acc/mean@1": 1.0})
    yield from per_token_metrics(dict.fromkeys(Phase, 1.0), 1, 1)
    yield from (phase.metric for phase in Phase)
    yield from (f"rollout/{name}" for name in vars(RolloutStatistics()))
    yield from filter_groups([t.group_id for t in rows], [t.reward for t in rows], [0, 1, 0, 1]).metrics()
    yield from rollout_correction(
        log_probs * 1.1, log_probs, torch.from_numpy(batch.loss_mask), torch.from_numpy(batch.sequence_ids), len(batch),
        torch.from_numpy(batch.turn_ids), RolloutCorrectionSettings(batch_normalize=True),
        weight_versions=torch.from_numpy(batch.weight_versions), current_version=0,
    ).metrics  # fmt: skip


def test_every_metric_that_is_computed_is_in_the_glossary():
    names = set(written())
    assert len(names) > 150
    assert undocumented(names) == []


def names_in_the_source():
    """Texts of the code that are a metric's whole name."""
    pattern = re.compile(rf"(?:{FIRST_WORDS})(?:/\w+)+")
    for folder in ("megatron_retool", "sglang_rollout", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            pieces = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
            for node in nodes:
                if id(node) in pieces:
                    continue
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and pattern.fullmatch(node.value):
                    yield node.value


def test_every_name_in_the_source_is_in_the_glossary():
    names = {name for name in names_in_the_source() if not (ROOT / name).exists()}
    assert len(names) > 40
    # Some stand for their mean, max and min.
    assert [name for name in undocumented(names) if undocumented([f"{name}/mean"])] == []


@pytest.mark.parametrize("name", ["actor/pg_loss/mean", "val-core/all/acc/mean", "invented/metric"])
def test_a_name_that_nobody_explains_is_found(name):
    assert undocumented([name]) == [name]


def test_a_caption_is_the_text_of_the_page_cell_by_cell():
    norm, k3 = caption_of("actor/grad_norm"), caption_of("rollout_corr/k3_kl")
    assert norm.unit == "" and norm.good == "steady; spikes: look at the batch"
    assert k3.unit == "nats" and "E|d|" in k3.meaning and "`" not in k3.meaning
    assert caption_of("actor/pg_loss").meaning == "the policy loss (algorithms.md)"
