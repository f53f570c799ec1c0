"""docs/models.md from what ``megatron-retool admit --every-family --json docs/models.json`` found.

python -m megatron_retool.admission.page > docs/models.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_retool.admission.layouts import FEW, NAMED
from megatron_retool.admission.outcome import Verdict

FOUND = Path(__file__).parents[2] / "docs" / "models.json"
_SIGNS = {Verdict.PASS: "✓", Verdict.FAIL: "✗", Verdict.NOT_APPLICABLE: "–"}

_HEAD = """\
# Models

A model family is admitted by one function: `megatron-retool admit HF_DIR_OR_CONFIG`. It shrinks the configuration to a
few thousand parameters in eight layers of the same kinds, makes random weights with transformers, and holds the learner
against transformers in every layout: log-probs, entropy, the loss's metrics, every gradient, the gradient norm and the
weights after one update, in float32. A check fails beyond 1e-5 (entropy: 2e-5); of a gradient that is the norm of the
difference, relative to its own. A model that no family covers is refused by the name of the part that is missing.

```bash
megatron-retool admit qwen3-8b --layouts few --without-engine
```

`--layouts few` starts up to two processes, `named`, the default, up to four, `all` goes through every product of the
kinds of parallelism on up to four. The tests run the same function for the models below; two of them, which stand for
dense models and for experts, in all named layouts. This page is made of its JSON file:

```bash
megatron-retool admit --every-family --json docs/models.json
python -m megatron_retool.admission.page > docs/models.md
```

✓ passed · ✗ failed · – does not apply to the family · empty: not part of this run. Processes are gloo's on a CPU,
layers Megatron-Core's local ones.
"""

_TAIL = """\
**round trip**: to Megatron-Core, laid out for TP 2 and PP 2, and back, to the same bits. **unpacked**: one sequence in
a micro-batch, where the other layouts pack several. **saved by …**: a checkpoint of one layout goes on in another, and
the converted checkpoint is loaded. **routing replay**: routers forced to given experts, and to their own choice as the
learner recorded it. **parameters, FLOPs**: the planner's counts against the built model's and torch's.
**SGLang's class** loads the weights under the names of the weight sync, and nothing of it stays unwritten. GPUs,
bfloat16 and Transformer Engine's layers are not part of it.
"""

_MISSING = """\
## What has no family yet

Refused by name, each for a part that the learner lacks: multi-head latent attention (DeepSeek-V2 and V3, Kimi K2),
dense layers among layers of experts, a router with a bias for the choice of experts, positions on a part of each head
(GLM-4.5), norms after attention and MLP (OLMo 2 and 3, Gemma 3), attention sinks (gpt-oss), linear attention
(Qwen3-Next), windows in some of the layers, yarn and longrope positions. A family like Llama takes one file:
[extending.md](extending.md).
"""


def page(found: Mapping[str, Any]) -> str:
    """Markdown: a row for each check, a column for each family."""
    models: Sequence[Mapping[str, Any]] = found["models"]
    verdicts = [{check["name"]: check for check in model["checks"]} for model in models]
    rows = list(dict.fromkeys((check["kind"], check["name"]) for model in models for check in model["checks"]))
    order = {name: number for number, name in enumerate(dict.fromkeys((*NAMED[:3], *FEW, *NAMED)))}
    rows.sort(key=lambda row: (row[0] != "weights", row[0] != "layout", order.get(row[1], 0)))
    lines = [
        _HEAD,
        "| check | " + " | ".join(f"`{model['family']}`" for model in models) + " |",
        "|---|" + "---|" * len(models),
        "| as | " + " | ".join(str(model["model"]) for model in models) + " |",
    ]
    for kind, name in rows:
        if kind != "chat":
            lines.append(f"| {name} | " + " | ".join(_cell(each.get(name)) for each in verdicts) + " |")
    largest = [_largest(model) for model in models]
    lines += [
        "| largest error of a gradient | " + " | ".join(largest) + " |",
        "",
        _TAIL,
        "Found with " + ", ".join(f"{package} {number}" for package, number in found["packages"].items()) + ".",
        "",
        _MISSING,
    ]
    return "\n".join(lines)


def _cell(check: Mapping[str, Any] | None) -> str:
    return "" if check is None else _SIGNS[Verdict(check["verdict"])]


def _largest(model: Mapping[str, Any]) -> str:
    return f"{max(check['figures'].get('gradient', 0.0) for check in model['checks']):.0e}"


if __name__ == "__main__":
    print(page(json.loads(FOUND.read_text(encoding="utf-8"))), end="")
