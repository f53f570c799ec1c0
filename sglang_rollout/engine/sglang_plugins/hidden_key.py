"""SGLang plugin: the key of an engine stays out of its log, into which SGLang writes all its settings.

SGLang finds this plugin through the entry point beside this file, that is, only in processes which have this directory
on their path.
"""

from __future__ import annotations

from typing import Any

KEYS = ("api_key", "admin_api_key")


def register() -> None:
    """Entry point of group ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.entrypoints.engine._server_args_for_logging", without_keys, HookType.AFTER)


def without_keys(settings: dict[str, Any], *arguments: Any, **kwargs: Any) -> dict[str, Any]:
    """``settings`` as they may be printed."""
    return settings | {name: "<hidden>" for name in KEYS if settings.get(name)}
