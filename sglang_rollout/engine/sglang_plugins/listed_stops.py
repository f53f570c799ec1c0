"""SGLang plugin: a request that ignores the model's own end still ends on the token ids that it lists.

SGLang's ``ignore_eos`` turns both off. SGLang finds this plugin through the entry point beside this file, that is, only
in processes which have this directory on their path.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Entry point of group ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.schedule_batch.Req._check_token_based_finish", end_on_listed, HookType.AROUND
    )


def end_on_listed(original: Any, request: Any, new_accepted_tokens: list[int]) -> bool:
    """Whether one of the new tokens ends the request, which then knows where and why."""
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN

    settings = request.sampling_params
    if not settings.ignore_eos:
        return bool(original(request, new_accepted_tokens))
    for place, token in enumerate(new_accepted_tokens):
        if token in (settings.stop_token_ids or ()):
            request.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
            request.finished_len = len(request.output_ids) - len(new_accepted_tokens) + place + 1
            return True
    return False
