"""What does not go with learner.match_engine=exact is refused, with the setting and the cure."""

from __future__ import annotations

import pytest

from megatron_retool.config import ConfigError, load_config
from megatron_retool.config.learner import check_operators
from megatron_retool.planning.models import model_of_each_family, preset

EXACT = ("learner.match_engine=exact", "rollout.engine.dtype=bfloat16")


@pytest.mark.parametrize(
    "override",
    [
        "learner.tensor_model_parallel_size=2",
        "learner.context_parallel_size=2",
        "learner.expert_model_parallel_size=2",
        "rollout.engine.tensor_parallel_size=2",
        "rollout.engine.dtype=float32",
        "rollout.engine.backend=transformers",
        "rollout.engine.device=cuda",
        "rollout.engine.quantization=fp8",
        "learner.fp8.recipe=tensorwise",
        "weight_sync.round_to=int4",
        "learner.lora.rank=8",
        "learner.mtp.train=true",
        "rollout.engine.speculative.algorithm=NGRAM",
    ],
)
def test_settings(override: str) -> None:
    load_config(None, list(EXACT))
    key = override.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{key}=.* does not go with learner.match_engine=exact: .* set "):
        load_config(None, [*EXACT, "learner.device=cpu", override, "learner.world_size=2"])


def test_models() -> None:
    known, refused = set(), {}
    for family, model in model_of_each_family().items():
        try:
            check_operators(preset(model))
            known.add(family)
        except ConfigError as error:
            refused[family] = str(error)
    assert {"qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "olmo2", "olmoe"} <= known
    assert {"gemma3_text", "ministral3", "ernie4_5", "qwen3_next", "qwen3_5_text", "granitemoehybrid"} <= known
    assert "sparse attention" in refused["deepseek_v32"] and "attention sinks" in refused["gpt_oss"]
    assert all("set it to none" in message for message in refused.values())
