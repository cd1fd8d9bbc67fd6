"""What an error looks like to an HTTP client: its status, and the body that the openai package reads."""

import json

from ipc.errors import EngineError, PeerLost, RequestError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable_error",
}

_STATUS_OF_CODE = {"bad_request": 400, "duplicate": 400, "overloaded": 429, "unavailable": 503}
"""Codes of RequestError; what isn't here is a fault of ours."""

RETRY_AFTER_S = 1

OUR_FAULT = "the server failed; its log says how"
"""All that a client is told of a fault that nobody foresaw."""

_FIELDS = {"prompt_token_ids": "prompt", "timeout_s": "timeout", "structured": "structured_outputs", "template_variables": "chat_template_kwargs"}
"""What the engine's fields are called in a body, where that differs."""


class ApiError(Exception):
    """Ends one HTTP request."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("Retry-After", str(RETRY_AFTER_S))

    @property
    def body(self) -> bytes:
        """As JSON in UTF-8."""
        content = {"message": self.message, "type": _TYPES.get(self.status, "server_error"), "param": self.param, "code": self.code}
        return json.dumps({"error": content}).encode()


_CODES = {"bad_request": "invalid_value", "overloaded": "rate_limit_exceeded", "unavailable": "engine_unavailable"}


def refused(param: str, message: str) -> ApiError:
    """The client's mistake in one field."""
    return ApiError(400, message, param=param, code="invalid_value")


def api_error_of(error: EngineError, names: dict[str, str] | None = None) -> ApiError:
    """What the engine refused, in HTTP's terms; ``names`` says what its fields are called in this request's body."""
    if isinstance(error, PeerLost):
        return ApiError(503, "the engine can't be reached", code="engine_unavailable")
    if not isinstance(error, RequestError):
        return ApiError(500, str(error), code="internal")
    status = _STATUS_OF_CODE.get(error.code, 500)
    param, reason = error.field, error.reason
    if param is not None:
        head, dot, rest = param.partition(".")
        called = (names or {}).get(head) or _FIELDS.get(head, head)
        param = f"{called}{dot}{rest}"
        # What is refused is called by the name under which it was given.
        reason = called + reason.removeprefix(head) if reason.startswith(head) else reason
    return ApiError(status, reason, param=param, code=_CODES.get(error.code, error.code))
