"""What learner.lora may ask for, of which models, and what is said where it may not."""

from __future__ import annotations

import pytest

from conversion.model.architecture import Architecture
from megatron_retool.config import ConfigError, load_config
from megatron_retool.planning.models import MODELS

SMALL = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 100,
    "head_dim": 8,
}
STACKED = MODELS["gpt-oss-20b"]
RANK = "learner.lora.rank=4"
SYNC = "learner.lora.sync=adapter"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["learner.lora.rank=-1"], "learner.lora.rank=-1 must be at least 0"),
        ([RANK, "learner.lora.alpha=0"], "learner.lora.alpha=0.0 must be above 0"),
        ([RANK, "learner.lora.targets=[]"], "name one or more of attention, mlp, experts"),
        ([RANK, "learner.lora.targets=[mlp,mlp]"], "each once"),
        ([RANK, "learner.lora.targets=[router]"], "learner.lora.targets=['router']: name one or more"),
        (["learner.lora.alpha=8"], "learner.lora.alpha=8.0: nothing reads it .* learner.lora.rank above 0"),
        (["learner.lora.sync=adapter"], "learner.lora.sync=adapter: nothing reads it"),
        ([RANK, "learner.lora.sync=none"], "learner.lora.sync=none must be one of merged, adapter"),
        ([RANK, SYNC, "rollout.engine.backend=transformers"], "backend=transformers: only SGLang's servers"),
        ([RANK, SYNC, "rollout.engine.quantization=fp8"], "rollout.engine.quantization=fp8: .* Set it to null, or"),
        ([RANK, SYNC, "weight_sync.round_to=int8"], "weight_sync.round_to=int8: syncs bring the weights"),
        ([RANK, SYNC, "trainer.deterministic=true"], "with learner.lora.sync=adapter which requests share a forward"),
        (
            [
                RANK,
                SYNC,
                "rollout.engine.tensor_parallel_size=2",
                "rollout.engine.attention_data_parallel_size=2",
            ],
            "attention_data_parallel_size=2: SGLang then lets no adapter be unloaded",
        ),
        (
            [
                RANK,
                SYNC,
                "rollout.engine.speculative.algorithm=STANDALONE",
                "rollout.engine.speculative.draft_model_path=/draft",
                "weight_sync.method=tensor",
            ],
            "speculative.algorithm=STANDALONE: SGLang has adapters beside NGRAM",
        ),
        ([RANK, "learner.mtp.train=true"], "does not go with learner.mtp.train=true"),
        ([RANK, "learner.moe_router_bias_update_rate=0.001"], "the router belongs to the frozen model"),
        ([RANK, "learner.fp8.recipe=blockwise"], "does not go with learner.fp8.recipe=blockwise"),
        (
            [RANK, "learner.optimizer.name=muon", "learner.use_distributed_optimizer=false"],
            "learner.optimizer.name=muon is for whole matrices .*learner.lora.rank=4: set learner.optimizer.name=adamw",
        ),
    ],
)
def test_settings_that_do_not_fit_are_named(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("[", r"\[").replace(r".\[", ".[")):
        load_config(None, overrides)


@pytest.mark.parametrize(
    ("hf_config", "overrides", "said"),
    [
        (SMALL, ["learner.lora.targets=[experts]"], "family qwen3: experts: the model has none"),
        (
            MODELS["qwen3-30b-a3b"],
            [SYNC],
            "learner.lora.sync=adapter does not fit family qwen3_moe .*experts: SGLang adapts these in a mixture",
        ),
        (MODELS["deepseek-v3"], [SYNC, "learner.lora.targets=[attention]"], "latent attention"),
        (MODELS["seed-oss-36b"], [SYNC], "SGLang has no class of its own"),
        (STACKED, [], "experts: adapters do not know experts that are stored as one tensor"),
        (
            SMALL,
            ["learner.tensor_model_parallel_size=4", "learner.world_size=4"],
            "which does not divide the model's 2 key-value heads",
        ),
    ],
)
def test_what_a_model_lacks_or_has_in_another_form_is_named(
    hf_config: dict[str, object], overrides: list[str], said: str
) -> None:
    architecture = Architecture.from_hf_config(hf_config)
    learner = load_config(None, [RANK, "learner.mini_batch_size=64", *overrides]).learner
    with pytest.raises(ConfigError, match=said):
        learner.layout(architecture)


def test_parts_that_can_be_adapted_are_accepted() -> None:
    learner = load_config(None, [RANK, "learner.lora.targets=[attention]"]).learner
    learner.layout(Architecture.from_hf_config(STACKED))
    load_config(None, [RANK]).learner.layout(Architecture.from_hf_config(SMALL))
