"""Requests of the Tinker protocol in JSON, as frozen dataclasses: checked by hand, so that what is wrong is a 400 with
the field's name, whatever a client sends. Unknown fields are left alone: clients of later releases have more of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_retool.target_sequences import OptimizerStep, RequestRefused
from sglang_rollout.gateway.errors import invalid, unsupported
from sglang_rollout.gateway.fields import Json, flag, integer, mapping, text
from untrusted import quoted

MOST_RANK = 1 << 16
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
