"""Experts whose matrices have biases, in Megatron's local layers."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import Tensor


class ExpertOutput(RowParallelLinear):
    """The second matrix of an expert, with an output of its own, and a bias whose gradient is only the expert's.

    Megatron's MLP adds the bias in place, which autograd forbids on the view that ``RowParallelLinear`` returns. And
    its mark of sequence parallelism has ``finalize_model_grads`` add up the gradients of all tensor-parallel ranks:
    with expert parallelism those are of different experts. Nor is the bias a copy of another tensor-parallel rank's, as
    the gradient norm would have it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bias.sequence_parallel = False
        self.bias.tensor_model_parallel = True

    def forward(self, x: Tensor) -> Any:
        """The linear layer's output, copied so that what follows may change it in place, and its bias."""
        output, bias = super().forward(x)
        return output.clone(), bias


def place_biased_experts(layer: Any) -> None:
    """Give a layer's experts ``ExpertOutput``.

    Args:
        layer: TransformerLayerSubmodules of the local spec, of a mixture of experts.
    """
    layer.mlp.keywords["submodules"].experts.keywords["submodules"].linear_fc2 = ExpertOutput
