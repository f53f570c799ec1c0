"""Groups of experts chosen by their best one (DeepSeek-V2, arXiv:2405.04434, section 2.2.2: device-limited routing).

Megatron's own choice of groups adds up the best topk / group_topk scores of each, which is DeepSeek-V3's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from conversion.model.architecture import Architecture

TopK = Callable[[Tensor, int, int | None, int | None], tuple[Tensor, Tensor]]
"""(scores [t, E], k, groups, chosen groups) -> the scores [t, k] of the experts to take, and the experts, int64."""


def best_group_topk(scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None) -> tuple[Tensor, Tensor]:
    """The ``topk`` experts with the largest scores, of the ``group_topk`` groups whose best expert has the largest.

    Args:
        scores: [t, E]; the experts of a group lie side by side, E / num_groups of them.

    Returns:
        Their scores, [t, topk], and they themselves, int64 [t, topk].
    """
    assert num_groups is not None and group_topk is not None
    groups = scores.unflatten(1, (num_groups, -1))
    chosen = groups.detach().amax(-1).topk(group_topk, dim=1, sorted=False).indices
    closed = torch.ones(groups.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, chosen, False)
    return groups.masked_fill(closed.unsqueeze(-1), -torch.inf).flatten(1).topk(topk, dim=1)


class ExpertChoice:
    """What a TopKRouter asks for its experts, in its attribute ``router_replay``.

    Args:
        own: the router's own choice, where that is not Megatron's.
    """

    def __init__(self, own: TopK | None = None) -> None:
        self.own = own

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The scores [t, k] of the experts to take, and the experts, int64 [t, k]; TopKRouter calls it."""
        own = default_compute_topk if self.own is None else self.own
        assert own is not None
        return self.choose(scores, partial(own, scores, topk, num_groups, group_topk), limited=bool(group_topk))

    def choose(
        self, scores: Tensor, own: Callable[[], tuple[Tensor, Tensor]], *, limited: bool
    ) -> tuple[Tensor, Tensor]:
        """As ``get_replay_topk``; ``own`` makes the router's own choice, ``limited`` to some groups of experts."""
        return own()


def place_group_choice(model: torch.nn.Module, architecture: Architecture) -> None:
    """Have a model chunk's routers choose groups as ``architecture`` says, where Megatron's own do not."""
    if architecture.router_group_score == "best":
        for module in model.modules():
            if isinstance(module, TopKRouter):
                module.router_replay = ExpertChoice(best_group_topk)
