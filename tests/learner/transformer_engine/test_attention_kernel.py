"""What computes attention is read out of Transformer Engine, and an unfused kernel is said once."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_retool.learner import transformer_engine
from megatron_retool.learner.transformer_engine import UNFUSED, attention_kernel, watch_attention
from tests.learner.transformer_engine.conftest import Run

CHOICES: dict[int, dict[str, Any]] = {
    "flash-attn 2.8": {"use_flash_attention": True, "flash_attention_backend": "2.8"},
    "cuDNN, NVTE_F16_arbitrary_seqlen": {
        "use_fused_attention": True,
        "fused_attention_backend": SimpleNamespace(name="NVTE_F16_arbitrary_seqlen"),
    },
    UNFUSED: {"use_unfused_attention": True},
}


@pytest.mark.parametrize("kernel", CHOICES)
def test_it_is_named(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_kernel() is None
    module = SimpleNamespace(_attention_backends=CHOICES[kernel])
    monkeypatch.setitem(sys.modules, transformer_engine._ATTENTION, module)
    assert attention_kernel() == kernel


def test_an_unfused_kernel_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    transformer_engine._warn_of_unfused_attention.cache_clear()
    watch_attention()
    assert not caplog.messages
    module = SimpleNamespace(_attention_backends=CHOICES[UNFUSED])
    monkeypatch.setitem(sys.modules, transformer_engine._ATTENTION, module)
    watch_attention()
    watch_attention()
    assert len(caplog.messages) == 1 and "without a fused kernel" in caplog.messages[0]


def _names() -> set[str]:
    return set(importlib.import_module(transformer_engine._ATTENTION)._attention_backends)


def test_transformer_engine_has_these_names(with_transformer_engine: Run) -> None:
    assert {name for choice in CHOICES.values() for name in choice} <= with_transformer_engine(_names, 1)
