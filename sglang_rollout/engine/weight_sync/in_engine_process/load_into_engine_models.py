"""Run in a process with SGLang: builds the class that SGLang serves a model with, lets it load weights, and compute.

    python load_into_engine_models.py cases.json answers.json

``weight_sync/engine_classes.py`` starts it. A case has a Hugging Face directory, an override of its config.json, a
safetensors file with what the class is given to load, and sequences of tokens. An answer has the parameters that are
not written whole afterwards, the warnings, and the sequences' log-probs by an engine of the directory.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from forced_log_probs import log_probs

FILLED_BY_THE_ENGINE = (".attn.k_scale", ".attn.v_scale")
"""Scales of the KV cache, which no checkpoint of ours has: without them they are 1."""


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def main(cases: list[dict[str, Any]], rendezvous: Path) -> dict[str, Any]:
    """The answer of each case by its name.

    Args:
        rendezvous: file by which torch.distributed starts.
    """
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish, restore_context, snapshot_context
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    # Schemes ask for a GPU of the right age while they register parameters.
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    # Where layers keep a state, a CPU has no cache of prefixes; none is needed.
    arguments = ServerArgs(model_path=cases[0]["directory"], device="cpu", disable_radix_cache=True)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))
    init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
    initialize_model_parallel()
    without_a_model = snapshot_context()
    heard = _Heard()
    logging.getLogger().addHandler(heard)
    answers: dict[str, Any] = {}
    for case in cases:
        answer = answers[case["name"]] = {}
        restore_context(without_a_model)
        heard.texts.clear()
        try:
            answer |= {"unwritten": load(case), "warnings": list(heard.texts)}
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        if case["sequences"]:
            try:
                answer["log_probs"] = log_probs(case["directory"], case["sequences"])
            except Exception as error:
                answer["failed"] = f"{type(error).__name__}: {error}"
    return answers


def load(case: dict[str, Any]) -> list[str]:
    """Names of the parameters that the case's tensors do not fill, or that their changes do not make what they do."""
    from safetensors.torch import load_file
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    override = json.dumps(case["override"])
    config = ModelConfig(case["directory"], dtype="bfloat16", model_override_args=override)
    for key in ("linear_num_key_heads", "linear_num_value_heads"):  # which SGLang's runner on a CPU rounds up
        if hasattr(config.hf_config, key):
            setattr(config.hf_config, f"{key}_cpu", getattr(config.hf_config, key))
    with set_default_torch_dtype(torch.bfloat16):
        model = _initialize_model(config, LoadConfig(), _get_quantization_config(config, LoadConfig()))
    parameters = {n: p.data for n, p in model.named_parameters() if not n.endswith(FILLED_BY_THE_ENGINE)}
    for data in parameters.values():
        if data.element_size() == 1:
            data.view(torch.uint8).fill_(0x7F)  # e4m3's NaN
        else:
            data.fill_(float("nan"))
    tensors = load_file(case["tensors"])
    for half in (0, 1) if case["halves"] else (0,):
        model.load_weights(iter(half_of(tensors, half, case["halves"])))
    wrong = [name for name, data in parameters.items() if bool(data.float().isnan().any())]
    if case["changed"]:
        whole = {name: data.clone() for name, data in parameters.items()}
        before = {name: moved(tensor) for name, tensor in tensors.items()}
        model.load_weights(iter(before.items()))
        model.load_weights(iter(changes_of(tensors, before)))
        wrong += [name for name, data in parameters.items() if not torch.equal(data, whole[name])]
    return wrong


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with some elements a few of the numbers away that its dtype can hold."""
    if tensor.element_size() != 2:
        return tensor.clone()
    words = tensor.clone().view(torch.int16)
    flat = words.view(-1)
    flat[::3] += 1
    flat[1::7] -= 5
    return words.view(tensor.dtype)


def changes_of(tensors: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """What an engine that has ``before`` is given of ``tensors``."""
    from sglang_rollout.engine.sglang_plugins.changed_weights import with_changes
    from sglang_rollout.engine.weight_sync.delta import changes

    return [part for name, tensor in tensors.items() for part in with_changes(changes(name, tensor, before[name]))]


def half_of(tensors: dict[str, torch.Tensor], half: int, dims: dict[str, int]) -> list[tuple[str, torch.Tensor]]:
    """What one of two tensor-parallel ranks of a learner sends: the first also what tensor parallelism does not split.

    Args:
        dims: that it splits, by the tensors' names.
    """
    if not dims:
        return list(tensors.items())
    from sglang_rollout.engine.sglang_plugins.weight_parts import weight_part

    result = []
    for name, tensor in tensors.items():
        dim = dims.get(name)
        if dim is None and half == 0:
            result.append((name, tensor))
        elif dim is not None:
            first = -(-tensor.shape[dim] // 2)
            start, size = (0, first) if half == 0 else (first, tensor.shape[dim] - first)
            place = f"{'x'.join(map(str, tensor.shape))}:{dim}:{start}"
            result.append(weight_part(f"{name}.part:{place}", tensor.narrow(dim, start, size)))
    return result


if __name__ == "__main__":
    cases_file, answers_file = map(Path, sys.argv[1:])
    answers = main(json.loads(cases_file.read_text()), answers_file.with_name("rendezvous"))
    answers_file.write_text(json.dumps(answers, indent=1))
