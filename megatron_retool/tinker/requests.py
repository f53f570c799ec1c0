"""Requests of the Tinker protocol in JSON, as frozen dataclasses: checked by hand, so that what is wrong is a 400 with
the field's name, whatever a client sends. Unknown fields are left alone: clients of later releases have more of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_retool.target_sequences import Int64Array, OptimizerStep, RequestRefused
from megatron_retool.tinker.wire import MOST_CELLS, dense_rows
from sglang_rollout.gateway.errors import ApiError, invalid, unsupported
from sglang_rollout.gateway.fields import Json, flag, integer, items, mapping, text
from untrusted import quoted

MOST_SAMPLES = 1024
MOST_TOP = 100
"""Likeliest tokens of a position."""
MOST_RANK = 1 << 16
MOST_STOPS = 64
MOST_METADATA = 64
SHORTEST_LIFE, LONGEST_LIFE = 3600, 10 * 366 * 24 * 3600
"""Seconds that a checkpoint may live."""
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""The kinds of checkpoints: in paths, in lists."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_PATH = re.compile(r"tinker://([A-Za-z0-9:._-]{1,200})/([a-z_]+)/([^/]+)")


@dataclass(frozen=True)
class CheckpointPath:
    """tinker://RUN/KIND/NAME."""

    run: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"


@dataclass(frozen=True)
class LoraSettings:
    """
    Attributes:
        seed: of the factors' initial values; None: the server draws one.
    """

    rank: int
    seed: int | None
    train_unembed: bool
    train_mlp: bool
    train_attn: bool


@dataclass(frozen=True)
class CreateModel:
    """A request for a new run of adapters."""

    session_id: str
    model_seq_id: int
    base_model: str
    lora: LoraSettings
    user_metadata: Mapping[str, str] | None


@dataclass(frozen=True)
class SaveWeights:
    """save_weights, save_weights_for_sampler or save_weights_external.

    Attributes:
        name: of the checkpoint; None: the server's choice.
        ttl_seconds: that it lives; None: for ever.
        sampling_session_seq_id: of save_weights_for_sampler without a name: the number of the session that it opens.
        inflight: that session follows the run's later weights.
        recipients: keys that external weights are encrypted to.
    """

    name: str | None
    ttl_seconds: int | None
    overwrite: bool
    user_metadata: Mapping[str, str] | None
    sampling_session_seq_id: int | None
    inflight: bool
    recipients: tuple[str, ...]


@dataclass(frozen=True)
class LoadWeights:
    """load_weights into a run that is there (model_id), or into a new one of a session.

    Attributes:
        optimizer: with the optimizer's state.
    """

    path: CheckpointPath
    optimizer: bool
    model_id: str | None
    session_id: str | None
    model_seq_id: int | None
    base_model: str | None
    user_metadata: Mapping[str, str] | None


@dataclass(frozen=True)
class CopyWeights:
    """copy_weights: a checkpoint of either kind, as one of a new run.

    Attributes:
        session_id: in which the run is; None: in a new session.
        ttl_seconds: that the copy lives; None: for ever.
    """

    source: CheckpointPath
    session_id: str | None
    model_seq_id: int
    ttl_seconds: int | None


@dataclass(frozen=True, eq=False)
class SampleRequest:
    """One prompt, and what is asked of it.

    Attributes:
        prompt: int64 [P], at least one token.
        samples: that are drawn, each with a seed of its own.
        max_tokens: of a sample; None: as many as the context has room for.
        stop_ids: tokens that end a sample; None: the model's own end.
        stop_strings: texts that end it.
        prompt_log_probs: the log-prob of each prompt token but the first.
        scored_from: first prompt position whose log-probs are asked for; at least 1.
        top_prompt, top_sampled: how many of the likeliest tokens of each position.
        targets: int64 [P - 1, K]: tokens whose log-probs at position i + 1 are asked for; -1: none. None: no such.
    """

    prompt: Int64Array
    samples: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop_ids: tuple[int, ...] | None = None
    stop_strings: tuple[str, ...] = ()
    prompt_log_probs: bool = False
    scored_from: int = 1
    top_prompt: int = 0
    top_sampled: int = 0
    targets: Int64Array | None = None

    @property
    def scores_prompt(self) -> bool:
        """Whether anything is asked about the prompt."""
        return self.prompt_log_probs or self.top_prompt > 0 or self.targets is not None


@dataclass(frozen=True)
class Sample:
    """
    Attributes:
        sampling_session_id, seq_id: name the request; the same once more is a retry.
    """

    sampling_session_id: str
    seq_id: int
    request: SampleRequest = field(repr=False)


def required_text(body: Json, name: str, path: str = "", most: int = 512) -> str:
    """A text that is neither missing nor empty, and not longer than ``most`` characters."""
    if body.get(name) is None:
        raise invalid(path + name, "it is missing")
    value = text(body, name, path)
    if not value or len(value) > most:
        raise invalid(path + name, f"expected 1 to {most} characters, got {len(value)}")
    return value


def required_integer(body: Json, name: str, low: int = 0) -> int:
    """A whole number of at least ``low``."""
    value = integer(body, name, low)
    if value is None:
        raise invalid(name, "it is missing")
    return value


def number(body: Json, name: str, path: str, default: float, low: float, high: float) -> float:
    """A finite number from ``low`` to ``high``."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise invalid(path + name, f"expected a number, got {quoted(value, 60)}")
    if not low <= value <= high:
        raise invalid(path + name, f"expected a number from {low:g} to {high:g}, got {quoted(value, 60)}")
    return float(value)


def checkpoint_path(body: Json, name: str) -> CheckpointPath:
    """The path of a checkpoint in a field."""
    value = required_text(body, name)
    result = _PATH.fullmatch(value)
    if not result or result[2] not in KINDS or not _NAME.fullmatch(result[3]):
        raise invalid(name, f"{quoted(value)} is no path of a checkpoint, such as tinker://RUN/weights/NAME")
    return CheckpointPath(*result.groups())


def checkpoint_name(body: Json, name: str) -> str | None:
    """A checkpoint's name, which becomes that of a directory."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise invalid(
            name, f"expected up to 128 letters, digits, '.', '_' and '-', the first no '.' or '-', got {quoted(value)}"
        )
    return value


def lifetime(body: Json) -> int | None:
    """ttl_seconds."""
    value = integer(body, "ttl_seconds", SHORTEST_LIFE)
    if value is not None and value > LONGEST_LIFE:
        raise invalid("ttl_seconds", f"expected at most {LONGEST_LIFE}, got {value}")
    return value


def metadata(body: Json) -> dict[str, str] | None:
    """user_metadata: short texts by short names."""
    if body.get("user_metadata") is None:
        return None
    result = mapping(body, "user_metadata")
    if len(result) > MOST_METADATA or not all(len(key) <= 128 for key in result):
        raise invalid("user_metadata", f"expected at most {MOST_METADATA} entries with names of at most 128 characters")
    told = {key: value if isinstance(value, str) else str(value) for key, value in result.items()}
    if not all(len(value) <= 4096 for value in told.values()):
        raise invalid("user_metadata", "expected values of at most 4096 characters")
    return told


def read_create_model(body: Json) -> CreateModel:
    """The request, checked field by field.

    Raises:
        ApiError: a field is missing, of another type or out of range.
    """
    config = body.get("lora_config")
    if config is None:
        raise unsupported("lora_config=null", "the server trains adapters, not whole models: give a rank")
    if not isinstance(config, dict):
        raise invalid("lora_config", f"expected an object, got {quoted(config, 60)}")
    _check_optimizer_kind(body, "optimizer_config")
    rank = integer(config, "rank", 1, "lora_config.")
    if rank is None or rank > MOST_RANK:
        raise invalid("lora_config.rank", f"expected a number from 1 to {MOST_RANK}, got {rank}")
    lora = LoraSettings(
        rank=rank,
        seed=integer(config, "seed", 0, "lora_config."),
        **{name: config.get(name) is None or flag(config, name, "lora_config.") for name in TRAINED},
    )
    return CreateModel(
        session_id=required_text(body, "session_id"),
        model_seq_id=required_integer(body, "model_seq_id"),
        base_model=required_text(body, "base_model"),
        lora=lora,
        user_metadata=metadata(body),
    )


TRAINED = ("train_unembed", "train_mlp", "train_attn")


def _check_optimizer_kind(body: Json, name: str) -> None:
    kind = mapping(body, name).get("type", "adamw")
    if kind != "adamw":
        raise unsupported(f"{name}.type={quoted(kind, 60)}", "the server has adamw")


def read_optimizer_step(body: Json) -> OptimizerStep:
    """adam_params.

    Raises:
        ApiError, RequestRefused: naming the field.
    """
    if body.get("optimizer_params") is not None:
        _check_optimizer_kind(body, "optimizer_params")
    if body.get("adam_params") is None:
        raise invalid("adam_params", "it is missing")
    given = mapping(body, "adam_params")
    default = OptimizerStep(learning_rate=1e-4)
    values = {
        name: number(given, name, "adam_params.", getattr(default, name), 0.0, most)
        for name, most in (
            ("learning_rate", 1e6),
            ("beta1", 1.0),
            ("beta2", 1.0),
            ("eps", 1e6),
            ("weight_decay", 1e6),
        )
    }
    clip = number(given, "grad_clip_norm", "adam_params.", 0.0, -1e30, 1e30)
    try:
        return OptimizerStep(**values, grad_clip_norm=max(clip, 0.0))
    except RequestRefused as error:
        raise RequestRefused(f"adam_params.{error}") from error


def read_save_weights(body: Json, *, external: bool = False) -> SaveWeights:
    """The request to save, checked field by field.

    Args:
        external: the weights are for use elsewhere, and need a name.

    Raises:
        ApiError: a field is missing, of another type or out of range.
    """
    name = checkpoint_name(body, "path")
    if external and name is None:
        raise invalid("path", "it is missing: external weights have a name")
    kind = text(body, "kind", default="snapshot")
    if kind not in ("snapshot", "inflight"):
        raise invalid("kind", f"expected snapshot or inflight, got {quoted(kind, 60)}")
    recipients = body.get("age_encryption_recipients") or []
    if (
        not isinstance(recipients, list)
        or not all(isinstance(each, str) for each in recipients)
        or len(recipients) > 64
    ):
        raise invalid("age_encryption_recipients", "expected at most 64 texts")
    return SaveWeights(
        name=name,
        ttl_seconds=lifetime(body),
        overwrite=flag(body, "overwrite"),
        user_metadata=metadata(body),
        sampling_session_seq_id=integer(body, "sampling_session_seq_id", 0),
        inflight=kind == "inflight",
        recipients=tuple(recipients),
    )


def read_load_weights(body: Json) -> LoadWeights:
    """The request to load, checked field by field.

    Raises:
        ApiError: a field is missing, of another type or out of range.
    """
    path = checkpoint_path(body, "path")
    if path.kind != "weights":
        raise invalid("path", f"{path} is no training checkpoint: take one of save_state (tinker://RUN/weights/NAME)")
    _check_optimizer_kind(body, "optimizer_config")
    model_id = text(body, "model_id", default="") or None
    session_id = text(body, "session_id", default="") or None
    if (model_id is None) == (session_id is None):
        raise invalid("model_id", "expected either model_id with seq_id, or session_id with model_seq_id")
    return LoadWeights(
        path=path,
        optimizer=flag(body, "optimizer"),
        model_id=model_id,
        session_id=session_id,
        model_seq_id=required_integer(body, "model_seq_id") if session_id is not None else None,
        base_model=text(body, "base_model", default="") or None,
        user_metadata=metadata(body),
    )


def read_copy_weights(body: Json) -> CopyWeights:
    """The request to copy, checked field by field. This server has no projects: whichever is named, the copy is here.

    Raises:
        ApiError: a field is missing, of another type or out of range.
    """
    session_id = text(body, "session_id", default="") or None
    text(body, "destination_project_id", default="")
    return CopyWeights(
        source=checkpoint_path(body, "source_path"),
        session_id=session_id,
        model_seq_id=0 if session_id is None else required_integer(body, "model_seq_id"),
        ttl_seconds=lifetime(body),
    )


def read_sample(body: Json, vocabulary: int, context: int) -> Sample:
    """asample.

    Args:
        vocabulary: of the model; token ids lie below it.
        context: tokens of a prompt with its sample.
    """
    if body.get("sampling_session_id") is None:
        raise invalid("sampling_session_id", "it is missing: open a session with create_sampling_session")
    if integer(body, "prompt_alt_tokens_k", 0):
        raise unsupported(
            "prompt_alt_tokens_k", "the engines draw no tokens at prompt positions: ask for topk_prompt_logprobs"
        )
    prompt = _prompt(body, vocabulary)
    given = mapping(body, "sampling_params")
    most = integer(given, "max_tokens", 0, "sampling_params.")
    if len(prompt) + max(most or 0, 1) > context:
        raise invalid(
            "sampling_params.max_tokens" if len(prompt) < context else "prompt",
            f"{len(prompt)} tokens of the prompt and max_tokens={most} exceed the context window of {context} tokens: "
            "ask for fewer, or shorten the prompt",
        )
    stop_ids, stop_strings = _stops(given, vocabulary)
    last = integer(body, "prompt_logprobs_last_n", 1)
    scored = flag(body, "prompt_logprobs")
    if last is not None and not (scored and last < len(prompt)):
        raise invalid("prompt_logprobs_last_n", f"needs prompt_logprobs, and at most {len(prompt) - 1} for this prompt")
    request = SampleRequest(
        prompt=prompt,
        samples=_up_to(body, "num_samples", 1, MOST_SAMPLES, 1),
        max_tokens=most,
        temperature=number(given, "temperature", "sampling_params.", 1.0, 0.0, 100.0),
        top_k=_top_k(given),
        top_p=number(given, "top_p", "sampling_params.", 1.0, 1e-6, 1.0),
        seed=integer(given, "seed", -(1 << 63), "sampling_params."),
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        prompt_log_probs=scored,
        scored_from=1 if last is None else len(prompt) - last,
        top_prompt=_up_to(body, "topk_prompt_logprobs", 0, min(MOST_TOP, vocabulary), 0),
        top_sampled=_up_to(body, "topk_sample_logprobs", 0, min(MOST_TOP, vocabulary), 0),
        targets=_targets(body, len(prompt), vocabulary),
    )
    return Sample(
        required_text(body, "sampling_session_id"),
        required_integer(body, "seq_id"),
        request,
    )


def _up_to(body: Json, name: str, low: int, high: int, default: int) -> int:
    value = integer(body, name, low)
    if value is not None and value > high:
        raise invalid(name, f"expected at most {high}, got {value}")
    return default if value is None else value


def _top_k(given: Json) -> int:
    value = integer(given, "top_k", -1, "sampling_params.")
    return -1 if value is None or value == 0 else min(value, 1 << 30)


def _prompt(body: Json, vocabulary: int) -> Int64Array:
    parts: list[npt.NDArray[np.int64]] = []
    for place, chunk in enumerate(items(mapping(body, "prompt"), "chunks", "prompt.")):
        where = f"prompt.chunks[{place}]"
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise unsupported(f"{where}.type={quoted(chunk.get('type'), 60)}", "the model reads only text")
        parts.append(_token_list(chunk.get("tokens"), f"{where}.tokens", vocabulary))
    prompt = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    if not len(prompt):
        raise invalid("prompt", "it has no tokens")
    return prompt


def _token_list(values: Any, where: str, vocabulary: int, low: int = 0) -> Int64Array:
    if not isinstance(values, list) or not all(type(each) is int for each in values):
        raise invalid(where, "expected an array of token ids")
    if values and not (low <= min(values) and max(values) < vocabulary):
        wrong = min(values) if min(values) < low else max(values)
        raise invalid(where, f"{quoted(wrong, 40)} is no token of the model, which has ids 0 to {vocabulary - 1}")
    return np.array(values, np.int64)


def _stops(given: Json, vocabulary: int) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Token ids, or None for the model's own end, and texts."""
    stop = given.get("stop")
    if stop is None:
        return None, ()
    result = [stop] if isinstance(stop, str) else stop
    if not isinstance(result, list) or len(result) > MOST_STOPS:
        raise invalid(
            "sampling_params.stop", f"expected a text, or an array of at most {MOST_STOPS} texts or token ids"
        )
    strings = tuple(each for each in result if isinstance(each, str))
    if not all(strings) or any(len(each) > 1000 for each in strings):
        raise invalid("sampling_params.stop", "expected texts of 1 to 1000 characters")
    ids = [each for each in result if not isinstance(each, str)]
    return tuple(_token_list(ids, "sampling_params.stop", vocabulary).tolist()), strings


def _targets(body: Json, length: int, vocabulary: int) -> Int64Array | None:
    """target_prompt_logprobs."""
    given = body.get("target_prompt_logprobs")
    if given is None:
        return None
    where = "target_prompt_logprobs"
    if not isinstance(given, dict):
        raise invalid(where, f"expected a tensor, got {quoted(given, 60)}")
    shape = given.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(each) is int for each in shape):
        raise invalid(f"{where}.shape", f"expected [{length - 1}, K], got {quoted(shape, 60)}")
    if shape[0] != length - 1 or not shape[1] > 0 or shape[0] * shape[1] > MOST_CELLS or shape[1] > MOST_TOP:
        raise invalid(
            f"{where}.shape",
            f"expected [{length - 1}, K] for a prompt of {length} tokens with K from 1 to {MOST_TOP}, got {shape}",
        )
    values = _token_list(given.get("data"), f"{where}.data", vocabulary, low=-1)
    starts = given.get("sparse_crow_indices")
    if starts is None:
        if len(values) != shape[0] * shape[1]:
            raise invalid(f"{where}.data", f"expected {shape[0] * shape[1]} token ids, got {len(values)}")
        return values.reshape(shape)
    most = 1 << 62
    try:
        return dense_rows(
            values,
            _token_list(starts, f"{where}.sparse_crow_indices", most),
            _token_list(given.get("sparse_col_indices"), f"{where}.sparse_col_indices", most),
            shape,
            where,
            empty=-1,
        )
    except RequestRefused as error:
        raise ApiError(400, str(error), code="invalid_value", param=where) from error
