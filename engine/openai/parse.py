"""From the bytes of a body to a checked model, or to an error that names field, value and rule."""

import json
from collections.abc import Sequence
from itertools import islice
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from engine.openai.errors import ApiError, refused
from engine.openai.fields import MAX_PROMPTS, Body

Model = TypeVar("Model", bound=Body)

MAX_SHOWN = 80


def parse_body(body: bytes, model: type[Model]) -> Model:
    """Raises ApiError 400 naming the field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        refusal = _error_of(_most_precise(error.errors(include_url=False)))
    except RecursionError:
        refusal = ApiError(400, "the body is nested too deep", code="invalid_json")
    raise refusal  # from here, so that it does not keep the other error alive, and with it all that was sent


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """The single prompts of the field: a text, ids, or a list of either. Ids are looked at later, one by one."""
    rule = "must be a text, a list of texts, a list of token ids, or a list of such lists"
    if isinstance(prompt, str):
        return [_not_empty(prompt, "prompt")]
    if not isinstance(prompt, list):
        raise refused("prompt", f"prompt={_shown(prompt)} {rule}")
    if not prompt:
        raise refused("prompt", "prompt=[] is empty; at least one token is needed")
    if type(prompt[0]) is int:
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise refused("prompt", f"prompt has {len(prompt)} entries; at most {MAX_PROMPTS} are allowed")
    kind = type(prompt[0])
    if kind not in (str, list) or any(type(one) is not kind for one in prompt):
        raise refused("prompt", f"prompt={_shown(prompt)} {rule}")
    return [_not_empty(one, f"prompt[{index}]") for index, one in enumerate(prompt)]


def _not_empty(prompt: str | list[int], name: str) -> str | list[int]:
    if not prompt:
        raise refused("prompt", f"{name}={prompt!r} is empty; at least one token is needed")
    return prompt


def _most_precise(found: Sequence[ErrorDetails]) -> ErrorDetails:
    """Of the first field that is wrong; every branch of a union says what it dislikes."""
    field = found[0]["loc"][:1]
    return max((error for error in found if error["loc"][:1] == field), key=lambda error: len(error["loc"]))


def _error_of(found: ErrorDetails) -> ApiError:
    kind, value = found["type"], found["input"]
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {found['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json")
    name = _name_of(found["loc"])
    if not name:
        return ApiError(400, f"the body must be a JSON object, got {_shown(value)}", code="invalid_json")
    if kind == "extra_forbidden":
        return ApiError(400, f"{name} is not a field that this server knows", param=name, code="unknown_field")
    if kind == "missing":
        return ApiError(400, f"{name} is missing", param=name, code="missing_field")
    if kind == "none_required":
        return ApiError(400, f"{name}={_shown(value)} is not supported here; leave it out", param=name, code="unsupported")
    return refused(name, f"{name}={_shown(value)}: {found['msg']}")


def _name_of(place: Sequence[int | str]) -> str:
    """As it stands in the body: ``messages[2].role``, without what pydantic calls the branches of a union."""
    name = ""
    for depth, part in enumerate(place):
        if isinstance(part, int):
            name += f"[{part}]"
        elif depth == 0 or (_is_key(part) and not (depth == 1 and place[0] in _TAGGED)):
            name += f".{part}" if name else part
    return name


def _is_key(part: str) -> bool:
    return part.replace("_", "").isalnum() and part not in _BRANCHES and not part[0].isupper()


_BRANCHES = {"str", "int", "bool", "float", "none"}
_TAGGED = {"response_format"}
"""Unions whose branches are called by the value of their ``type``."""


def _shown(value: Any) -> str:
    try:
        text = json.dumps(_beginning(value), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(type(value).__name__)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def _beginning(value: Any) -> Any:
    """At least as much as is shown: a million entries are not written to be cut."""
    if isinstance(value, str):
        return value[:MAX_SHOWN]
    if isinstance(value, list):
        return [_beginning(one) for one in value[:MAX_SHOWN]]
    if isinstance(value, dict):
        return {key[:MAX_SHOWN]: _beginning(one) for key, one in islice(value.items(), MAX_SHOWN)}
    return value
