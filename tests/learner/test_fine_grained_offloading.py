"""Why Megatron-Core's offloading of single modules' activations is no setting: it learns the first step by heart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import fine_grained_activation_offload as offloading
from megatron.core.transformer.transformer_config import TransformerConfig


def test_chunks_of_the_first_step_are_those_of_every_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with more micro-batches than the first finds no chunk for the others; one in another order finds wrong
    ones. Packing makes steps of different numbers of micro-batches."""
    fields = TransformerConfig.__dataclass_fields__
    assert {"fine_grained_activation_offloading", "offload_modules"} <= fields.keys()
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(offloading, "OffloadTensorPool", lambda **_: SimpleNamespace(reset=lambda: None))
    monkeypatch.setattr(offloading, "print_offload_summary_table", lambda found: None)
    manager = offloading.PipelineOffloadManager()

    def forward_passes(count: int) -> list[Any]:
        found = []
        for _ in range(count):
            manager.init_model_chunk_offload_handler(0, 1, 0)
            found.append(manager.pop_forward_chunk("core_attn"))
        return found

    first = forward_passes(2)
    assert len(set(map(id, first))) == 2
    manager.reset()
    later = forward_passes(3)
    assert later[2] is None or later[2] in first, "there is a chunk for every micro-batch by now: offer it"
