"""Run in a process with SGLang: its class of a model loads what a weight sync pushed as handles of a GPU's memory.

    python load_pushed.py cases.json answers.json

As ``load_into_engine_models.py``, but that a case's ``tensors`` are the bodies of a weight sync's requests.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import safetensors.torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[3] / "sglang_rollout" / "engine" / "weight_sync" / "in_engine_process")
)

import load_into_engine_models


def received(file: str) -> dict[str, Any]:
    """What SGLang's tp_worker and WeightUpdater make of requests to /update_weights_from_tensor."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    monkey_patch_torch_reductions()
    tensors: dict[str, Any] = {}
    for body in json.loads(Path(file).read_text()):
        pushed = MultiprocessingSerializer.deserialize(body["serialized_named_tensors"][0])
        tensors |= FlattenedTensorBucket(**pushed).reconstruct_tensors()
    return tensors


safetensors.torch.load_file = received
cases_file, answers_file = map(Path, sys.argv[1:])
answers = load_into_engine_models.main(json.loads(cases_file.read_text()), answers_file.with_name("rendezvous"))
answers_file.write_text(json.dumps(answers))
