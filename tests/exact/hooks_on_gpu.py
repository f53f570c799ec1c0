"""The exact plugin's hooks on a card that is not there: prints as JSON how many there are and which have no target."""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import sys

from tests.sglang_rollout.engine_arguments import resolve


def main() -> None:
    resolve.fake_card("NVIDIA H100 80GB HBM3", 80, (9, 0))
    sys.meta_path.insert(0, resolve.KernelPackages())
    with contextlib.redirect_stdout(sys.stderr):
        from sglang.srt.plugins.hook_registry import HookRegistry

        from megatron_retool.exact.coverage import OPERATORS
        from sglang_rollout.engine.exact_plugin import exact_operators

        os.environ[exact_operators.VARIABLE] = json.dumps({"operators": list(OPERATORS)})
        exact_operators.register()
        missing = []
        for target in HookRegistry._hooks:
            try:
                pkgutil.resolve_name(target)
            except (AttributeError, ImportError) as error:
                missing.append(f"{target}: {error}")
    print(json.dumps({"hooks": len(HookRegistry._hooks), "missing": missing}))


if __name__ == "__main__":
    main()
