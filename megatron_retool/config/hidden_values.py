"""Secrets in settings: what a run writes of them.

A text that ``${oc.env:NAME}`` stands for, where NAME sounds like a secret's, is written as ``${oc.env:NAME,''}``: a
run's config.yaml is read back everywhere, and with the secret where the variable is set. A secret that the
configuration spells out, such as api_key in a ..._kwargs, is written as ``<hidden>``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "<hidden>"
_VARIABLE = re.compile(r"\$\{oc\.env:\s*[^,}]*(KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH)[^,}]*[,}]", re.IGNORECASE)
_WITHOUT_DEFAULT = re.compile(r"\$\{oc\.env:\s*([^,{}]*)\}")
_NAME = re.compile(
    r"(.*[_-])?(api_?key|private_key|secret|secret_key|password|passwd|authorization|credentials?"
    r"|(access|api|auth|bearer|hf)_token|(?-i:[A-Z0-9_]+_TOKEN))",
    re.IGNORECASE,
)


class FromEnvironment(str):
    """A text that an environment variable gave.

    Attributes:
        source: what the configuration says in its place.
    """

    source: str

    def __new__(cls, value: str, source: str) -> FromEnvironment:
        """A text that knows what the configuration says in its place."""
        result = super().__new__(cls, value)
        result.source = source
        return result

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.source


def marked(resolved: Any, written: Any) -> Any:
    """``resolved`` with its secrets of the environment as ``FromEnvironment``.

    Args:
        written: the same settings with their ``${…}``.
    """
    secrets: dict[str, FromEnvironment] = {}
    result = _marked(resolved, written, secrets)
    return _marked_copies(result, written, secrets) if secrets else result


def _marked(resolved: Any, written: Any, secrets: dict[str, FromEnvironment]) -> Any:
    if isinstance(resolved, dict) and isinstance(written, Mapping):
        return {key: _marked(value, written.get(key), secrets) for key, value in resolved.items()}
    if isinstance(resolved, list) and isinstance(written, list):
        return [_marked(value, source, secrets) for value, source in zip(resolved, written, strict=True)]
    if isinstance(resolved, str) and isinstance(written, str) and _VARIABLE.search(written):
        secrets[resolved] = FromEnvironment(resolved, written)
        return secrets[resolved]
    return resolved


def _marked_copies(resolved: Any, written: Any, secrets: Mapping[str, FromEnvironment]) -> Any:
    """The same for texts that refer to a marked setting: ``${tools.key}``."""
    if isinstance(resolved, dict):
        inner = written if isinstance(written, Mapping) else {}
        return {key: _marked_copies(value, inner.get(key), secrets) for key, value in resolved.items()}
    if isinstance(resolved, list):
        sources = written if isinstance(written, list) else [None] * len(resolved)
        return [_marked_copies(value, source, secrets) for value, source in zip(resolved, sources, strict=True)]
    if not isinstance(resolved, str) or isinstance(resolved, FromEnvironment) or resolved == written:
        return resolved
    if isinstance(written, str):
        contains = any(secret and secret in resolved for secret in secrets)
        return FromEnvironment(resolved, written) if contains else resolved
    return secrets.get(resolved, resolved)


def without_secrets(node: Any) -> Any:
    """``node``, settings as mappings and lists, in the form that may be written, shown and sent."""
    if isinstance(node, Mapping):
        return {key: HIDDEN if _is_spelled_out(key, value) else without_secrets(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [without_secrets(value) for value in node]
    return _WITHOUT_DEFAULT.sub(r"${oc.env:\1,''}", node.source) if isinstance(node, FromEnvironment) else node


def with_secrets(node: Any) -> Any:
    """``node`` with the secrets themselves as plain texts: for a private file of a run's own processes."""
    if isinstance(node, Mapping):
        return {key: with_secrets(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [with_secrets(value) for value in node]
    return str.__str__(node) if isinstance(node, FromEnvironment) else node


def _is_spelled_out(name: Any, value: Any) -> bool:
    plain = isinstance(value, str) and not isinstance(value, FromEnvironment) and "${" not in value
    return plain and bool(value) and isinstance(name, str) and _NAME.fullmatch(name) is not None
