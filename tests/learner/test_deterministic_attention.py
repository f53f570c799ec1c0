"""What trainer.deterministic makes of attention on Hopper, compared with Transformer Engine's own rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_retool.config import Config, ConfigError, load_config
from megatron_retool.learner.deterministic import LARGEST_SCORES, check_attention
from megatron_retool.learner.precision import Acceleration
from megatron_retool.planning.models import preset
from tests.learner.transformer_engine.kernels import FOLDER

RECIPE = "configs/retool_qwen2.5_32b_8xh200.yaml"
H200 = Acceleration(True, (9, 0), "NVIDIA H200", "2.20.2", flash_attention="flash-attn-4 4.0.0b36")


def check(machine: Acceleration, *overrides: str) -> str | None:
    deterministic = ["trainer.deterministic=true", "rollout.partial.enable=false"]
    config: Config = load_config(RECIPE, [*deterministic, *overrides])
    architecture = preset("qwen2.5-32b")
    return check_attention(config, architecture, config.learner.layout(architecture), machine)


def test_long_texts_take_another_kernel_in_updates_on_hopper() -> None:
    said = check(H200)
    assert said is not None and said.startswith("trainer.deterministic=true: on Hopper Transformer Engine leaves cuDNN")
    # 10 of 40 heads on each of 4 tensor-parallel ranks.
    assert 10 * 10362**2 < LARGEST_SCORES <= 10 * 10363**2
    assert "texts x 10 heads x (longest text)^2" in said and "one text of 10,363 tokens" in said
    assert "takes flash-attn-4 4.0.0b36 there, while old log-probs stay with cuDNN" in said
    for cure in ("trainer.deterministic=false", "data.max_response_length", "learner.tensor_model_parallel_size"):
        assert cure in said


@pytest.mark.parametrize(
    "overrides",
    [
        ("trainer.deterministic=false",),
        ("learner.dtype=float32", "learner.optimizer.use_precision_aware_optimizer=false"),
        ("learner.context_parallel_size=1", "learner.share_prefixes=true"),
        # The largest that 512 tokens give on 10 heads: 86 texts, one of 342 tokens.
        ("data.max_prompt_length=100", "data.max_response_length=300", "learner.max_tokens_per_micro_batch=512"),
    ],
)
def test_nothing_is_said_where_the_kernel_stays(overrides: tuple[str, ...]) -> None:
    assert check(H200, *overrides) is None


def test_other_machines_keep_their_kernel() -> None:
    for capability in ((8, 0), (10, 0)):
        assert check(replace(H200, capability=capability)) is None
    assert check(replace(H200, transformer_engine=None)) is None
    assert check(Acceleration(cuda=False)) is None


def test_short_texts_reach_it_together() -> None:
    said = check(H200, "data.max_response_length=2048")
    assert said is not None and "or shorter ones together" in said


def test_a_text_that_no_kernel_takes_is_refused_before_any_weight_is_read() -> None:
    bare = replace(H200, flash_attention=None)
    with pytest.raises(
        ConfigError, match="no flash-attn package is installed to continue with: install flash-attn-4, or "
    ):
        check(bare)
    said = check(bare, "data.max_response_length=2048")
    assert said is not None and "such an update fails" in said


@pytest.mark.skipif(not FOLDER.is_dir(), reason="Transformer Engine's Python is not installed")
def test_the_rule_is_transformer_engines() -> None:
    utils = FOLDER / "transformer_engine" / "pytorch" / "attention" / "dot_product_attention" / "utils.py"
    source = " ".join(utils.read_text().split())
    assert "SM90_DET_FUSED_THD_BWD_MAX_BHSS = 1 << 30" in source and LARGEST_SCORES == 1 << 30
    assert "batch_size * num_heads * max_seqlen_q * max_seqlen_kv >= SM90_DET_FUSED_THD_BWD_MAX_BHSS" in source
    assert 'qkv_format == "thd" and device_compute_capability == (9, 0)' in source
