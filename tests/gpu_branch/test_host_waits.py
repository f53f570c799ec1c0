"""How often a reading or an update makes the host wait for the device, or copies memory that is not pinned.

Whatever a learner of four layers does more often than one of two, it does in its layers. What may happen is on a budget
by the file and the function that do it; a failure names their lines.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from conversion.model.architecture import Architecture
from megatron_retool.parity.admission.comparison import TEMPERATURE, build, mini_batch
from megatron_retool.parity.admission.layouts import cases
from tests.gpu_branch.conftest import LAYERS, Run
from tests.gpu_branch.fake_device import Event, recorded

Budget = dict[tuple[str, str, str], int]
"""(what, file, function) and how often."""

OF_A_LAYER_OF_EXPERTS: Budget = {
    # How many tokens each expert gets, which the host has to tell to grouped products and exchanges.
    ("event.synchronize", "megatron/core/transformer/moe/token_dispatcher.py", "_maybe_dtoh_and_synchronize"): 1,
}
"""In each pass over a micro-batch. A layer without experts waits for nothing."""
OF_A_MICRO_BATCH: Budget = {
    ("copy from the host", "megatron_retool/learner/packing.py", "tensor"): 7,
    ("copy from the host", "megatron_retool/learner/packing.py", "_bucket"): 2,  # where torch attends
    ("copy from the host", "megatron_retool/learner/micro_batch.py", "column"): 6,  # the loss's
    ("copy from the host", "megatron_retool/learner/reading.py", "collect"): 1,
}
OF_SHARED_PREFIXES: Budget = {
    ("copy from the host", "megatron_retool/learner/packing.py", "tensor"): 2,
    ("index_put_ by an index of the host", "megatron_retool/learner/attention_pieces.py", "block_mask"): 2,
}
"""Beside those of a micro-batch."""
OF_A_READING: Budget = {("copy to the host", "megatron_retool/learner/reading.py", "read_tokens"): 1}
OF_AN_UPDATE: Budget = {
    ("stream.synchronize", "megatron_retool/learner/learner_state.py", "timed"): 1,
    ("copy to the host", "megatron_retool/learner/pipeline.py", "reduce_over_ranks"): 1,
    # The gradient's norm: of Transformer Engine's kernel, and of torch's.
    ("__float__", "megatron_retool/learner/optimizer.py", "clip_and_apply"): 1,
    ("item", "megatron/core/optimizer/clip_grads.py", "get_grad_norm_fp32"): 1,
    ("tensor of values of the host", "megatron/core/utils.py", "local_multi_tensor_l2_norm"): 1,
}
CASES = [
    (True, 1, "one process", ("qwen3", "mistral", "qwen3_moe")),
    (True, 1, "recompute", ("qwen3",)),
    (True, 1, "shared prefixes", ("qwen3",)),
    (False, 1, "one process", ("mistral", "qwen3_moe")),
    (True, 2, "tp2 sp", ("qwen3",)),
    (True, 2, "cp2", ("qwen3",)),
    (True, 2, "ep2 tp2", ("qwen3_moe",)),
]
"""With Transformer Engine or without, processes, layout, families."""


def _events(directory: Path, layout: str, families: tuple[str, ...]) -> dict[str, Any]:
    return {
        family: [_of_each_rank(directory / f"{family}-{layers}", layout) for layers in LAYERS] for family in families
    }


def _of_each_rank(directory: Path, layout: str) -> list[Any]:
    """The number of micro-batches, and the records of a reading and of an update."""
    (case,) = cases(Architecture.from_pretrained(directory), (layout,))
    learner, batch = build(case, directory), mini_batch()
    learner.update(batch, temperature=TEMPERATURE)  # which makes what is kept
    with recorded() as reading:
        learner.log_probs(batch, temperature=TEMPERATURE)
    with recorded() as update:
        learner.update(batch, temperature=TEMPERATURE)
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, (len(learner.packer.micro_batches(batch)), reading, update))
    return gathered


def _by_place(record: Any) -> Counter[Event]:
    return record.mixed + record.waits + record.copies


def _exceeded(found: Counter[Event], *budgets: Budget) -> list[str]:
    """What is on no budget, or happens more often than on all of them together."""
    allowed: Counter[Any] = Counter()
    for budget in budgets:
        allowed.update(budget)
    seen: Counter[Any] = Counter()
    for event, count in found.items():
        seen[event.what, event.file, event.function] += count
    over = {place for place, count in seen.items() if count > allowed[place]}
    return [f"{count} x {event}" for event, count in found.items() if (event.what, event.file, event.function) in over]


def _times(budget: Budget, factor: int) -> Budget:
    return {place: count * factor for place, count in budget.items()}


@pytest.mark.parametrize(("engine", "world", "layout", "families"), CASES)
def test_stays_within_its_budget(
    engine: bool, world: int, layout: str, families: tuple[str, ...], models: Path, on_gpus: Run
) -> None:
    found = on_gpus(_events, models, layout, families, engine=engine, world=world)
    assert found.keys() == set(families)
    shared = OF_SHARED_PREFIXES if "shared prefixes" in layout else {}
    for family, by_layers in found.items():
        of_layer = OF_A_LAYER_OF_EXPERTS if family == "qwen3_moe" else {}
        for (passes, *few), (_, *many) in zip(*by_layers, strict=True):
            for once, fewer, more in zip((OF_A_READING, OF_AN_UPDATE), few, many, strict=True):
                in_layers = _by_place(more) - _by_place(fewer)
                assert _exceeded(in_layers, _times(of_layer, passes * (LAYERS[1] - LAYERS[0]))) == [], family
                budgets = once, *(_times(each, passes) for each in (OF_A_MICRO_BATCH, shared))
                assert _exceeded(_by_place(fewer), *budgets, _times(of_layer, passes * LAYERS[0])) == [], family


@pytest.mark.slow
def test_a_budget_tells_what_exceeds_it() -> None:
    event = Event("item", "a.py", "f", 3, "b.py:4 g")
    assert _exceeded(Counter({event: 2}), {("item", "a.py", "f"): 1}, {("item", "a.py", "f"): 1}) == []
    assert _exceeded(Counter({event: 2}), {("item", "a.py", "f"): 1}) == ["2 x item @ a.py:3 f <- b.py:4 g"]
    assert _exceeded(Counter({event: 1}), {("item", "a.py", "h"): 1}) == ["1 x item @ a.py:3 f <- b.py:4 g"]
