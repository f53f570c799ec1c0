"""Run in a process with SGLang: builds the class that SGLang serves a model with, and lets it load weights.

    python load_into_engine_models.py cases.json answers.json

``weight_sync/engine_classes.py`` starts it. A case has a Hugging Face directory, an override of its config.json and a
safetensors file with what the class is given to load. An answer has the parameters that are not written whole
afterwards, and the warnings.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch

FILLED_BY_THE_ENGINE = (".attn.k_scale", ".attn.v_scale")
"""Scales of the KV cache, which no checkpoint of ours has: without them they are 1."""


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def main(cases: list[dict[str, Any]], rendezvous: Path) -> dict[str, Any]:
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    # Schemes ask for a GPU of the right age while they register parameters; nothing is computed.
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    # Where layers keep a state, a CPU has no cache of prefixes; none is needed.
    arguments = ServerArgs(model_path=cases[0]["directory"], device="cpu", disable_radix_cache=True)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))
    init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
    initialize_model_parallel()
    heard = _Heard()
    logging.getLogger().addHandler(heard)
    answers = {}
    for case in cases:
        heard.texts.clear()
        try:
            answers[case["name"]] = {"unwritten": load(case), "warnings": list(heard.texts)}
        except Exception as error:
            answers[case["name"]] = {"error": f"{type(error).__name__}: {error}"}
    return answers


def load(case: dict[str, Any]) -> list[str]:
    from safetensors.torch import load_file
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model

    override = json.dumps(case["override"])
    config = ModelConfig(case["directory"], dtype="bfloat16", model_override_args=override)
    for key in ("linear_num_key_heads", "linear_num_value_heads"):  # which SGLang's runner on a CPU rounds up
        if hasattr(config.hf_config, key):
            setattr(config.hf_config, f"{key}_cpu", getattr(config.hf_config, key))
    torch.set_default_dtype(torch.bfloat16)
    model = _initialize_model(config, LoadConfig(), _get_quantization_config(config, LoadConfig()))
    parameters = {n: p.data for n, p in model.named_parameters() if not n.endswith(FILLED_BY_THE_ENGINE)}
    for data in parameters.values():
        if data.element_size() == 1:
            data.view(torch.uint8).fill_(0x7F)  # e4m3's NaN
        else:
            data.fill_(float("nan"))
    model.load_weights(iter(load_file(case["tensors"]).items()))
    return [name for name, data in parameters.items() if bool(data.float().isnan().any())]


if __name__ == "__main__":
    cases_file, answers_file = map(Path, sys.argv[1:])
    answers = main(json.loads(cases_file.read_text()), answers_file.with_name("rendezvous"))
    answers_file.write_text(json.dumps(answers, indent=1))
