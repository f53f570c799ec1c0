"""Fields of ``config.json`` about mixtures of experts: which layers have one, its router, its shared experts."""

from __future__ import annotations

from typing import Any

from conversion.model.config_reader import ConfigReader, UnsupportedArchitecture, shown


def experts(config: ConfigReader) -> dict[str, Any]:
    """Fields of a mixture of experts.

    Raises:
        UnsupportedArchitecture: as ``decoder``.
    """
    count_key = "num_experts" if config.has("num_experts") else "num_local_experts"
    return {
        "num_experts": config.integer(count_key),
        "num_experts_per_tok": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden_size": config.integer("moe_intermediate_size"),
        "norm_topk_prob": config.flag("norm_topk_prob"),
    }


def sigmoid_gates(config: ConfigReader) -> dict[str, Any]:
    """Fields of a router with sigmoid scores, a bias for the choice of experts, and gates that are the chosen experts'
    scores over their sum.

    Raises:
        UnsupportedArchitecture: as ``decoder``, gates are not normalised, or scores are of another kind.
    """
    for key, expected in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("norm_topk_prob", True)):
        if config.mapping.get(key) not in (None, expected):
            value = shown(config.mapping[key])
            raise UnsupportedArchitecture(f"{key}={value}: a router with sigmoid scores and {key}={value} is missing")
    chosen = config.integer("num_experts_per_tok")
    if chosen == 1:
        raise UnsupportedArchitecture("num_experts_per_tok=1: a normalised gate of a single sigmoid score is missing")
    return {"num_experts_per_tok": chosen, "router_scores": "sigmoid", "router_bias": True}


def sigmoid_router(config: ConfigReader) -> dict[str, Any]:
    """Fields of DeepSeek-V3's experts: sigmoid scores with a bias for the choice, normalised gates, groups, shared
    experts, dense layers first.

    Raises:
        UnsupportedArchitecture: as ``decoder`` and ``sigmoid_gates``, or groups are chosen by another number of scores
            than two.
    """
    gates = sigmoid_gates(config)
    return {
        **gates,
        **_routed_and_shared_experts(config, shared=1),
        "router_groups": choice_of_groups(config, gates["num_experts_per_tok"]),
    }


def choice_of_groups(config: ConfigReader, chosen: int) -> tuple[int, int] | None:
    """``router_groups`` of a router that chooses ``chosen`` experts, and groups by the sum of their two best scores.

    Raises:
        UnsupportedArchitecture: as ``decoder``, or groups are chosen by another number of scores than two.
    """
    groups, limit = config.integer("n_group", 1), config.integer("topk_group", 1)
    if groups == 1:
        return None
    if chosen != 2 * limit:
        raise UnsupportedArchitecture(
            f"topk_group={limit} with num_experts_per_tok={chosen}: a choice of groups by their two best scores is "
            "there only for num_experts_per_tok = 2 topk_group"
        )
    return groups, limit


def softmax_router(config: ConfigReader) -> dict[str, Any]:
    """Fields of DeepSeek-V2's experts (arXiv:2405.04434, section 2.2): softmax scores that are the gates as they are,
    groups chosen by their best expert (topk_method=group_limited_greedy) or none (greedy), shared experts, dense layers
    first.

    Raises:
        UnsupportedArchitecture: as ``decoder``, gates are normalised, scores are of another kind, or the choice of
            groups is none.
    """
    config.require(scoring_func="softmax", norm_topk_prob=False)
    method, chosen = config.text("topk_method", "greedy"), config.integer("num_experts_per_tok")
    groups, limit = config.integer("n_group", 1), config.integer("topk_group", 1)
    fields = _routed_and_shared_experts(config, shared=2)
    count = fields["num_experts"]
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedArchitecture(
            f"topk_method={shown(method)} is not supported for {config.text('model_type')}: only greedy and "
            "group_limited_greedy are"
        )
    if method == "greedy" and limit < groups:
        raise UnsupportedArchitecture(
            f'n_group={groups} with topk_method="greedy": transformers chooses among all experts then, and engines '
            "among those of some groups: set n_group and topk_group to 1, or topk_method to group_limited_greedy"
        )
    if count % groups or limit > groups or chosen > limit * (count // groups):
        raise UnsupportedArchitecture(
            f"n_group={groups} and topk_group={limit}: {chosen} of {count} experts cannot be chosen so"
        )
    grouped = {"router_groups": (groups, limit), "router_group_score": "best"} if limit < groups else {}
    return {**fields, **grouped, "num_experts_per_tok": chosen, "norm_topk_prob": False}


def _routed_and_shared_experts(config: ConfigReader, shared: int) -> dict[str, Any]:
    """Fields of DeepSeek's experts beside those of the choice; ``shared`` where n_shared_experts is absent."""
    if config.integer("moe_layer_freq", 1) != 1:
        raise UnsupportedArchitecture(
            f"moe_layer_freq={shown(config.mapping['moe_layer_freq'])} is not supported: only 1 is"
        )
    width = config.integer("moe_intermediate_size")
    return {
        "num_experts": config.integer("n_routed_experts"),
        "moe_ffn_hidden_size": width,
        "shared_expert_ffn_hidden_size": width * config.integer("n_shared_experts", shared),
        "routed_scaling_factor": config.number("routed_scaling_factor", 1.0),
        **first_dense_layers(config),
    }


def first_dense_layers(config: ConfigReader) -> dict[str, Any]:
    """``dense_layers`` of a mixture of experts: the first_k_dense_replace first ones.

    Raises:
        UnsupportedArchitecture: it is no number of layers, or no layer with experts is left.
    """
    first, layers = config.integer("first_k_dense_replace", 0, least=0), config.integer("num_hidden_layers")
    if first > layers:
        raise UnsupportedArchitecture(f"first_k_dense_replace={first} is no number of layers up to {layers}")
    expected = ["dense"] * first + ["sparse"] * (layers - first)
    if config.has("mlp_layer_types") and (types := config.items("mlp_layer_types")) != expected:
        raise UnsupportedArchitecture(
            f"mlp_layer_types={shown(types)} is not what first_k_dense_replace={first} says, which engines read: make "
            "the two agree"
        )
    return _dense_layers(config, list(range(first)))


def shared_expert(config: ConfigReader) -> dict[str, Any]:
    """Fields of a gated SwiGLU beside the experts.

    Raises:
        UnsupportedArchitecture: as ``decoder``.
    """
    return {
        "shared_expert_ffn_hidden_size": config.integer("shared_expert_intermediate_size"),
        "shared_expert_gate": True,
    }


def listed_dense_layers(config: ConfigReader) -> dict[str, Any]:
    """``dense_layers`` of a mixture of experts: those of mlp_only_layers, and all but each decoder_sparse_step-th.

    Raises:
        UnsupportedArchitecture: mlp_only_layers is no list of numbers of layers, or no layer with experts is left.
    """
    layers, step = config.integer("num_hidden_layers"), config.integer("decoder_sparse_step", 1)
    listed = config.items("mlp_only_layers")
    if not all(type(n) is int and 0 <= n < layers for n in listed):
        raise UnsupportedArchitecture(f"mlp_only_layers={shown(listed)} is no list of numbers below {layers}")
    return _dense_layers(config, [n for n in range(layers) if n in listed or (n + 1) % step])


def _dense_layers(config: ConfigReader, dense: list[int]) -> dict[str, Any]:
    if len(dense) == config.integer("num_hidden_layers"):
        raise UnsupportedArchitecture(f"none of the layers of this {config.text('model_type')} model has experts")
    return {"dense_layers": tuple(dense)}
