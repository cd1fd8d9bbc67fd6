"""Reading a request's body, within a limit."""

from starlette.requests import ClientDisconnect, Request

from engine.openai.errors import ApiError

MAX_DISCARDED_BYTES = 64 << 20
"""Of a body that is too large, so much is still read: a client that is answered in the middle of sending may not see why."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises ApiError: 413 when it is larger, 400 for what is called something else than JSON."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(400, f"content-type {kind!r:.80} is not supported; send application/json", code="unsupported_content_type")
    told = request.headers.get("content-length", "0")
    size = int(told) if told.isascii() and told.isdigit() and len(told) < 20 else 0
    pieces = []
    num_bytes = 0
    try:
        if size <= max_bytes + MAX_DISCARDED_BYTES:
            async for piece in request.stream():
                num_bytes += len(piece)
                if num_bytes <= max_bytes and size <= max_bytes:
                    pieces.append(piece)
                elif num_bytes > max_bytes + MAX_DISCARDED_BYTES:
                    break
    except ClientDisconnect:
        raise ApiError(400, "the client left before its request was complete", code="incomplete_body") from None
    if max(size, num_bytes) > max_bytes:
        got = max(size, num_bytes)
        raise ApiError(413, f"the body has {got} bytes; at most {max_bytes} are allowed", code="request_too_large")
    return b"".join(pieces)
