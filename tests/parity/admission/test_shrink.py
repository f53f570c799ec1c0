"""What is left of a configuration: small sizes, every kind of layer."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megatron_retool.parity.admission.shrink import VOCAB_SIZE, WINDOW, shrunk

BIG: dict[str, Any] = {
    "model_type": "some",
    "hidden_size": 4096,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "eos_token_id": 151645,
}
KINDS = ("full_attention", "sliding_attention", "linear_attention")


@given(st.lists(st.sampled_from(KINDS), min_size=4, max_size=60), st.integers(4, 8))
def test_every_kind_of_layer_stays(types: list[str], layers: int) -> None:
    small = shrunk({**BIG, "num_hidden_layers": len(types), "layer_types": types}, layers)
    assert small["num_hidden_layers"] == len(small["layer_types"]) == layers
    assert set(small["layer_types"]) == set(types)


def test_heads_stay_grouped_and_heads_of_their_own_size_stay_so() -> None:
    def heads(**change: Any) -> tuple[int, int, int | None]:
        small = shrunk({**BIG, **change}, 4)
        return small["num_attention_heads"], small["num_key_value_heads"], small.get("head_dim")

    assert heads() == (4, 2, None)
    assert heads(num_key_value_heads=32, head_dim=128) == (4, 4, 8)
    assert heads(num_key_value_heads=1, head_dim=256) == (4, 1, 16)
    assert shrunk({**BIG, "head_dim": 256, "rotary_dim": 64}, 4)["rotary_dim"] == 4


def test_longrope_keeps_a_factor_for_each_pair_of_features() -> None:
    rope = {"type": "longrope", "short_factor": list(range(1, 49)), "long_factor": list(range(2, 50))}
    positions = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    small = shrunk({**BIG, **positions, "rope_scaling": rope}, 4)
    assert small["rope_scaling"] == {**rope, "short_factor": [1, 13, 25, 37], "long_factor": [2, 14, 26, 38]}
    assert (small["max_position_embeddings"], small["original_max_position_embeddings"]) == (128, 64)
    small = shrunk({**BIG, **positions, "partial_rotary_factor": 0.75, "rope_scaling": rope}, 4)
    assert small["rope_scaling"]["short_factor"] == [1, 17, 33]
    positions["original_max_position_embeddings"] = 131072
    assert shrunk({**BIG, **positions, "rope_scaling": rope}, 4)["original_max_position_embeddings"] == 128


def test_switches_stay_and_token_ids_go() -> None:
    given_ = {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 24, "norm_topk_prob": False}
    rope = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    small = shrunk({**BIG, **given_, "rope_scaling": rope}, 4)
    assert (small["sliding_window"], small["max_window_layers"], small["use_sliding_window"]) == (WINDOW, 2, True)
    assert small["rope_scaling"] == {**rope, "original_max_position_embeddings": 32}
    assert small["norm_topk_prob"] is False and small["eos_token_id"] is None and small["vocab_size"] == VOCAB_SIZE
    assert "moe_intermediate_size" not in small, "what config.json lacks is not added"
