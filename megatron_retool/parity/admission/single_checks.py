"""Checks of one process: names and round trip, the planner's counts, the chat template and its tool calls."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from conversion.hf_to_mcore import TargetLayout, convert
from conversion.mcore_to_hf import export
from conversion.model.architecture import Architecture
from conversion.model.flops import forward_flops, index_pair_flops, pair_flops
from conversion.model.layout import cuts
from conversion.model.weight_map import WeightMap
from megatron_retool.parity.admission.outcome import AdmissionVerdict, Check, judged
from megatron_retool.parity.admission.recurrences import recurrent
from megatron_retool.parity.admission.tiny_model import converted
from megatron_retool.planning.memory import parameter_count
from sglang_rollout.agent.tool_call_formats import formats
from tools.arguments import typed_arguments

FLOPS_TOLERANCE = 0.01
FLOPS_TOKENS = 24


def tensor_names(architecture: Architecture, directory: Path) -> Check:
    """Names and shapes that the family's table gives, against what transformers has written."""
    expected = {name: tuple(tensor.shape) for name, tensor in load_file(directory / "model.safetensors").items()}
    result = WeightMap(architecture).hf_shapes
    wrong = sorted(name for name in result.keys() | expected.keys() if result.get(name) != expected.get(name))
    if wrong:
        said = f"{wrong[0]}: the table says {result.get(wrong[0])}, transformers {expected.get(wrong[0])}"
        return Check("weights", "names and shapes", AdmissionVerdict.FAIL, f"{len(wrong)} tensors differ; {said}")
    return Check("weights", "names and shapes", AdmissionVerdict.PASS, figures={"tensors": float(len(expected))})


def round_trip(architecture: Architecture, directory: Path, families: tuple[str, ...]) -> Check:
    """To Megatron-Core, laid out for PP and, where it divides the model, TP, and back: the same bits."""
    expert = 2 if architecture.is_moe else 1
    tensor = 2 if all(cut.fits for cut in cuts(architecture, tensor=2)) else 1
    layout = TargetLayout(tp=tensor, pp=2, ep=expert)
    there, back = converted(directory), directory.with_name(f"{directory.name}_back")
    convert(directory, there, layout=layout, families=families, workers=1, require_tokenizer=False)
    export(there, back, families=families, workers=1, require_tokenizer=False)
    source, again = load_file(directory / "model.safetensors"), load_file(back / "model.safetensors")
    wrong = [name for name in source.keys() | again.keys() if not _same_bits(source.get(name), again.get(name))]
    if wrong:
        return Check("weights", "round trip", AdmissionVerdict.FAIL, f"other bits: {', '.join(sorted(wrong)[:5])}")
    return Check(
        "weights", "round trip", AdmissionVerdict.PASS, figures={"bytes": float(sum(t.nbytes for t in source.values()))}
    )


def _same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def planned_parameters(architecture: Architecture, model: Any) -> Check:
    """The planner's number of parameters, against the model's."""
    own = sum(parameter.numel() for parameter in model.parameters())
    difference = abs(parameter_count(architecture) - own)
    figures = {"parameters": float(own), "difference": float(difference)}
    return judged("planner", "parameters", figures, {"difference": float(difference)} if difference else {})


def planned_flops(architecture: Architecture, model: Any) -> Check:
    """The planner's FLOPs of a forward pass, against torch's count of transformers'."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), recurrent(model), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, FLOPS_TOKENS, dtype=torch.long), use_cache=False)
    expected = counter.get_total_flops()
    # torch counts all pairs of eager attention; a causal model, with its windows, needs a part of them.
    pairs = architecture.num_layers * (pair_flops(architecture) + index_pair_flops(architecture))
    alone = forward_flops(architecture, [1] * FLOPS_TOKENS)
    result = alone + pairs * (FLOPS_TOKENS**2 - FLOPS_TOKENS)
    off = abs(result / expected - 1)
    return judged("planner", "FLOPs", {"relative difference": off}, {"off by": off} if off > FLOPS_TOLERANCE else {})


_CALL = {"name": "run", "arguments": {"code": "print(1 + 1)"}}
_PARAMETERS = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
_TOOL = {
    "type": "function",
    "function": {"name": "run", "description": "Runs Python.", "parameters": _PARAMETERS},
}
_ASKED: list[dict[str, Any]] = [{"role": "user", "content": "What is 1 + 1?"}]
_ANSWER: dict[str, Any] = {"role": "tool", "name": "run", "tool_call_id": "call00000", "content": "2"}


def _called(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "id": "call00000", "function": {**_CALL, "arguments": arguments}}
    return [*_ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]


def chat_template(directory: Path | None) -> list[Check]:
    """Whether the tokenizer's template writes tools, and tool calls that a format of ours reads."""
    names = ("chat template", "tool calls")
    if directory is None or not (directory / "tokenizer_config.json").is_file():
        return [
            Check("chat", name, AdmissionVerdict.NOT_APPLICABLE, "no tokenizer beside config.json") for name in names
        ]
    from transformers import AutoTokenizer

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        plain = tokenizer.apply_chat_template(_ASKED, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        return [Check("chat", "chat template", AdmissionVerdict.FAIL, f"{type(error).__name__}: {error}")]
    template = Check("chat", "chat template", AdmissionVerdict.PASS)
    try:
        asked = tokenizer.apply_chat_template(_ASKED, tools=[_TOOL], tokenize=False, add_generation_prompt=True)
        try:
            turn = _called(_CALL["arguments"])
            called = tokenizer.apply_chat_template(turn, tools=[_TOOL], tokenize=False)
        except Exception:  # DeepSeek's templates take arguments as JSON alone
            turn = _called(json.dumps(_CALL["arguments"]))
            called = tokenizer.apply_chat_template(turn, tools=[_TOOL], tokenize=False)
        answered = tokenizer.apply_chat_template([*turn, _ANSWER], tools=[_TOOL], tokenize=False)
    except Exception as error:
        return [template, Check("chat", "tool calls", AdmissionVerdict.FAIL, f"{type(error).__name__}: {error}")]
    if asked == plain or _CALL["name"] not in asked or "2" not in answered[len(called.rstrip()) :]:
        reason = "the template leaves out tools or their results: use a format with tags of its own (retool)"
        return [template, Check("chat", "tool calls", AdmissionVerdict.NOT_APPLICABLE, reason)]
    shared = len(asked) if called.startswith(asked) else len(plain)
    name = _reader(called[shared:], tokenizer.get_added_vocab())
    if name is None:
        reason = f"no format of ours reads {json.dumps(called[shared:][:80])}: declare one (docs/extending.md)"
        return [template, Check("chat", "tool calls", AdmissionVerdict.FAIL, reason)]
    return [template, Check("chat", "tool calls", AdmissionVerdict.PASS, f"rollout.multi_turn.format={name}")]


def _reader(written: str, tokens: Collection[str]) -> str | None:
    """The first format that reads ``_CALL`` in what a template has written of a turn; None: no one does.

    Args:
        tokens: one of them may end the turn, which a format does not see.
    """
    ended = written.rstrip()
    turn = ended.removesuffix(max((token for token in tokens if ended.endswith(token)), key=len, default=""))
    for name in formats.names:
        call_format = formats.load(name)()
        closing = "".join(call_format.closing_tags[:1])
        texts = (written, turn) if not closing or closing in written else (ended + closing,)
        for text in texts:
            read = [
                (call.name, typed_arguments(call.arguments, _PARAMETERS))
                for call in call_format.parse(text)
                if call.error is None
            ]
            if read == [(_CALL["name"], _CALL["arguments"])]:
                return name
    return None
