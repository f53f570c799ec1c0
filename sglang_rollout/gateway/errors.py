"""What a client gets to know when a call fails: status, type and code as the APIs define them."""

from __future__ import annotations

from typing import Any

from untrusted import MOST_QUOTED, clipped

_KINDS = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("invalid_request_error", "permission_error"),
    404: ("invalid_request_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("invalid_request_error", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("server_error", "overloaded_error"),
}
"""Status: type of error in OpenAI's APIs, in Anthropic's."""


OVERFLOW = "context_length_exceeded"
"""The code of a context that leaves no room for an answer."""


class ApiError(Exception):
    """A call that is answered with an error.

    Attributes:
        status: of the HTTP answer.
        code: for programs: invalid_value, session_not_found, context_length_exceeded, …
        param: the field at fault: ``messages[2].content``.

    Args:
        to_anthropic: the message for clients of Anthropic's API, where they know it by other words.
    """

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, to_anthropic: str | None = None
    ) -> None:
        message, param = clipped(message), param if param is None else clipped(param, MOST_QUOTED)
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self._to_anthropic = message if to_anthropic is None else to_anthropic

    def openai(self) -> dict[str, Any]:
        """The body of Chat Completions' and Responses' errors."""
        kind = _KINDS[self.status][0]
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """The body of Messages' errors."""
        return {"type": "error", "error": {"type": _KINDS[self.status][1], "message": self._to_anthropic}}


def invalid(param: str, reason: str) -> ApiError:
    """Status 400: ``param`` is at fault."""
    return ApiError(400, f"{param}: {reason}", code="invalid_value", param=param)


def unsupported(param: str, reason: str) -> ApiError:
    """Status 400: the API knows what ``param`` asks for, and the gateway does not."""
    return ApiError(400, f"{param} is not supported here: {reason}", code="unsupported_parameter", param=param)


def unknown_field(param: str) -> ApiError:
    """Status 400: without ``param`` the request could mean something else."""
    return ApiError(
        400, f"{param}: the gateway knows no such field: leave it out", code="unknown_parameter", param=param
    )


def session_not_found() -> ApiError:
    """The error of a call to an unknown session."""
    return ApiError(404, "there is no such session: the base URL and key are those of open_session", code="not_found")


def session_closed() -> ApiError:
    """The error of a call to a session that has ended."""
    return ApiError(404, "the session has ended: no call can follow", code="session_closed")


def no_tools() -> ApiError:
    """The error of a tool call where the session has no tools."""
    return ApiError(404, "no tools are opened for this session: run the call yourself", code="no_tools")


def limit_reached(what: str, limit: float) -> ApiError:
    """Status 429: a limit of the session (``SessionLimits``) holds."""
    return ApiError(429, f"the session may have {what}={limit:g} and has used it up", code=what)


def context_overflow(tokens: int, limit: int, name: str) -> ApiError:
    """Status 400, in the words by which the APIs' clients know that they have to shorten their history.

    Args:
        tokens: of the messages.
        name: of the limit, as in ``SessionLimits``.
    """
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens. However, your messages resulted in {tokens} tokens, "
        f"which leaves no room for an answer ({name}={limit}). Please reduce the length of the messages.",
        code=OVERFLOW,
        param="messages",
        to_anthropic=f"prompt is too long: {tokens} tokens > {limit} maximum",
    )
