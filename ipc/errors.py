"""What can go wrong, as types: who is to blame, and what a caller may do about it."""


class EngineError(Exception):
    """Root of everything that Brigade raises on purpose."""

    code = "internal"


class ConfigError(EngineError, ValueError):
    """A setting that can't work, found before anything was started.

    The message names the field, its value and the rule, and where there is one the remedy.
    """

    code = "bad_config"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class RequestError(EngineError):
    """One request failed; every other request goes on.

    ``code`` is one of ``bad_request`` (the client's mistake), ``duplicate`` (its id is that of an open request),
    ``overloaded`` (a queue is full: the same request may succeed later), ``unavailable`` (a process that was needed is
    gone: perhaps later, perhaps elsewhere) and ``internal``.
    """

    code = "bad_request"

    def __init__(self, reason: str, *, code: str = "bad_request", field: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code
        self.field = field


class PromptTooLong(RequestError):
    """A prompt, or a whole conversation, leaves no room for an answer."""

    def __init__(self, field: str, num_tokens: int, limit: int) -> None:
        super().__init__(
            f"{field} has {num_tokens} tokens; the context limit is {limit} with at least one token for the answer",
            field=field,
        )
        self.num_tokens = num_tokens
        self.limit = limit


class ProtocolError(EngineError):
    """Bytes that are not a message of ours; ``path`` says where inside the message."""

    code = "bad_message"

    def __init__(self, path: str, rule: str) -> None:
        super().__init__(f"{path}: {rule}")
        self.path = path
        self.rule = rule


class PeerLost(EngineError):
    """A process on the other end is gone or did not answer in time."""

    code = "unavailable"
