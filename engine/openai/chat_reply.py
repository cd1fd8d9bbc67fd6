"""The answer of /v1/chat/completions, whole or as events."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engine.openai.call_forms import TAGGED, CallForm
from engine.openai.logprobs import chat_entries
from engine.openai.replies import Choice, Head, Reply
from engine.openai.server_events import EventForm
from engine.openai.tool_calls import CallDelta, Fed, Tool, ToolCallParser, ToolChoice
from engine.outputs import Output
from engine.prompts import Prepared


class ChatReply(Reply):
    """Choices with a message; where there are tools, calls are parted from what the user reads."""

    def __init__(
        self, head: Head, prompt: Prepared, num_choices: int, tools: Sequence[Tool], tool_choice: ToolChoice, *,
        has_logprobs: bool, call_form: CallForm = TAGGED,
    ) -> None:  # fmt: skip
        super().__init__(head, [prompt], num_choices)
        self._has_logprobs = has_logprobs
        self._has_tools = bool(tools) and tool_choice != "none"
        self._is_plain = not (has_logprobs or head.returns_token_ids or self._has_tools)
        for choice in self._choices if self._has_tools else ():
            choice.parser = ToolCallParser(tools, tool_choice, form=call_form)

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk"

    def _text_event(self, index: int) -> Callable[[str], bytes]:
        return EventForm(lambda text: self._chunk([_chunk_choice(index, {"content": text})])).fill

    def _take(self, prompt_index: int, output: Output) -> Iterable[bytes]:
        choice = self._choice_of(prompt_index, output)
        choice.last = output
        events = b"" if choice.has_begun else self._first_event(choice)
        choice.has_begun = True
        if self._is_plain:
            events += choice.fill(output.delta) if output.delta else b""
        else:
            events += self._piece(choice, output)
        return (events if output.finish_reason is None else events + self._last_event(choice, output),)

    def _first_event(self, choice: Choice) -> bytes:
        made = _chunk_choice(choice.index, {"role": "assistant", "content": ""})
        if self._head.returns_token_ids:
            made["prompt_token_ids"] = self._prompts[0].token_ids
        return self._event([made])

    def _piece(self, choice: Choice, output: Output) -> bytes:
        start, choice.num_told = choice.num_told, len(output.token_ids)
        fed = self._fed(choice, output.delta, is_last=output.finish_reason is not None)
        delta: dict[str, Any] = {}
        if fed.content or not fed.calls:
            delta["content"] = fed.content
        if fed.calls:
            delta["tool_calls"] = [_call_piece(call) for call in fed.calls]
        made = _chunk_choice(choice.index, delta)
        tells_tokens = (self._has_logprobs or self._head.returns_token_ids) and start < choice.num_told
        if self._has_logprobs and output.logprobs is not None:
            made["logprobs"] = {"content": chat_entries(output.logprobs[start:]), "refusal": None}
        if self._head.returns_token_ids:
            made["token_ids"] = output.token_ids[start:]
        return self._event([made]) if fed.content or fed.calls or tells_tokens else b""

    def _last_event(self, choice: Choice, output: Output) -> bytes:
        made = _chunk_choice(choice.index, {}, _finish_reason(choice, output))
        return self._event([made | {"stop_reason": output.stop_reason}])

    def _whole(self, choice: Choice) -> dict[str, Any]:
        output = choice.last
        assert output is not None
        fed = self._fed(choice, output.text, is_last=True)
        message: dict[str, Any] = {"role": "assistant", "content": fed.content, "refusal": None}
        if fed.calls:
            message["content"] = fed.content or None
            message["tool_calls"] = _whole_calls(fed.calls)
        logprobs = None
        if self._has_logprobs and output.logprobs is not None:
            logprobs = {"content": chat_entries(output.logprobs), "refusal": None}
        made = {
            "index": choice.index, "message": message, "logprobs": logprobs,
            "finish_reason": _finish_reason(choice, output), "stop_reason": output.stop_reason,
        }  # fmt: skip
        if self._head.returns_token_ids:
            made |= {"token_ids": output.token_ids, "prompt_token_ids": self._prompts[0].token_ids}
        return made

    def _fed(self, choice: Choice, text: str, *, is_last: bool) -> Fed:
        if choice.parser is None:
            return Fed(content=text)
        fed: Fed = choice.parser.feed(text)
        if not is_last:
            return fed
        rest: Fed = choice.parser.finish()
        return Fed(content=fed.content + rest.content, calls=fed.calls + rest.calls)


def _finish_reason(choice: Choice, output: Output) -> str | None:
    has_calls = choice.parser is not None and choice.parser.has_calls
    return "tool_calls" if has_calls and output.finish_reason == "stop" else output.finish_reason


def _chunk_choice(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _call_piece(call: CallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments}
    if call.name is None:
        return {"index": call.index, "function": function}
    return {"index": call.index, "id": call.call_id, "type": "function", "function": {"name": call.name, **function}}


def _whole_calls(pieces: Sequence[CallDelta]) -> list[dict[str, Any]]:
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        call = calls.setdefault(piece.index, {"id": None, "type": "function", "function": {"name": None, "arguments": ""}})
        call["id"] = call["id"] or piece.call_id
        call["function"]["name"] = call["function"]["name"] or piece.name
        call["function"]["arguments"] += piece.arguments
    return [calls[index] for index in sorted(calls)]
