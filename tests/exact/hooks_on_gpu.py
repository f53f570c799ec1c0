"""The exact plugin's hooks on a card that is not there: prints as JSON how many there are, which have no target, and
how far its experts' sum is from its factor times that on a CPU."""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import sys
from types import SimpleNamespace
from typing import Any

import torch

from tests.sglang_rollout.engine_arguments import resolve


def main() -> None:
    resolve.fake_card("NVIDIA H100 80GB HBM3", 80, (9, 0))
    sys.meta_path.insert(0, resolve.KernelPackages())
    with contextlib.redirect_stdout(sys.stderr):
        from sglang.srt.plugins.hook_registry import HookRegistry

        from conversion.model.model_operators import OPERATORS
        from sglang_rollout.engine.exact_plugin import exact_operators

        os.environ[exact_operators.VARIABLE] = json.dumps({"operators": list(OPERATORS)})
        exact_operators.register()
        missing = []
        for target in HookRegistry._hooks:
            try:
                pkgutil.resolve_name(target)
            except (AttributeError, ImportError) as error:
                missing.append(f"{target}: {error}")
        experts = "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod.forward_native"
        ((_, hook, _),) = HookRegistry._hooks[experts]
        scaled, plain = (sum_of_experts(each, 2.5) for each in (hook, exact_operators.experts))
    found = {"hooks": len(HookRegistry._hooks), "missing": missing}
    print(json.dumps(found | {"apart": float((scaled - 2.5 * plain).abs().max()), "sum": float(plain.abs().sum())}))


def sum_of_experts(hook: Any, factor: float) -> torch.Tensor:
    """What a hook makes of three tokens with two of four experts each."""
    random = torch.Generator().manual_seed(0)
    layer = SimpleNamespace(
        w13_weight=torch.randn(4, 16, 8, generator=random),
        w2_weight=torch.randn(4, 8, 8, generator=random),
        moe_runner_config=SimpleNamespace(routed_scaling_factor=factor),
    )
    gates, chosen = torch.rand(3, 2, generator=random), torch.tensor([[0, 1], [2, 3], [1, 2]])
    tokens = SimpleNamespace(hidden_states=torch.randn(3, 8, generator=random), topk_output=(gates, chosen, None))
    result: torch.Tensor = hook(None, layer, tokens).hidden_states
    return result


if __name__ == "__main__":
    main()
