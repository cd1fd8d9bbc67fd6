"""The answer of /v1/completions, whole or as events."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engine.openai.logprobs import TextOffsets, completion_logprobs
from engine.openai.replies import Choice, Head, Reply
from engine.openai.server_events import EventForm
from engine.outputs import Output, TokenLogprob
from engine.prompts import Prepared
from engine.text.tokenizer import Tokenizer
from ipc.params import SamplingParams


class CompletionReply(Reply):
    """Choices with text; with ``echoed`` the prompts' texts stand before it, and their tokens' log probabilities too."""

    def __init__(
        self, head: Head, prompts: Sequence[Prepared], params: SamplingParams, tokenizer: Tokenizer | None, echoed: Sequence[str]
    ) -> None:
        """``tokenizer`` is needed for log probabilities; ``echoed`` is empty or has a text for each prompt."""
        super().__init__(head, prompts, params.n)
        self._params = params
        self._tokenizer = tokenizer
        self._echoed = echoed
        self._prompt_logprobs: list[list[TokenLogprob | None] | None] = [None] * len(prompts)
        self._prompt_columns: list[dict[str, Any] | None] = [None] * len(prompts)
        self._is_plain = params.logprobs is None and not head.returns_token_ids

    @property
    def _chunk_kind(self) -> str:
        return self._head.kind

    def _text_event(self, index: int) -> Callable[[str], bytes]:
        return EventForm(lambda text: self._chunk([_choice(index, text)])).fill

    def _take(self, prompt_index: int, output: Output) -> Iterable[bytes]:
        choice = self._choice_of(prompt_index, output)
        choice.last = output
        if self._is_plain and choice.has_begun and output.finish_reason is None:
            return (choice.fill(output.delta),) if output.delta else ()
        if not self._note_prompt(prompt_index, output):
            choice.held.append(output)
            return ()
        return (
            self._told(held, one)
            for held in self._choices[prompt_index * self._num_choices :][: self._num_choices]
            for one in [*_taken(held.held), *([output] if held is choice else [])]
        )

    def _note_prompt(self, prompt_index: int, output: Output) -> bool:
        """Whether all that comes before the first token is known. Log probabilities come with choice 0, in pieces."""
        if self._params.prompt_logprobs is None:
            return True
        known = self._prompt_logprobs[prompt_index]
        # An answer that ends before its prompt was read, as by a timeout, has what there is.
        is_ready = output.finish_reason is not None or self._is_whole(prompt_index, output.prompt_logprobs or [])
        if output.prompt_logprobs is not None and known is None and is_ready:
            known = self._prompt_logprobs[prompt_index] = output.prompt_logprobs
        return known is not None

    def _is_whole(self, prompt_index: int, logprobs: list[TokenLogprob | None]) -> bool:
        return len(logprobs) == len(self._prompts[prompt_index].token_ids)

    def _told(self, choice: Choice, output: Output) -> bytes:
        tokens = slice(choice.num_told, len(output.token_ids))
        choice.num_told = len(output.token_ids)
        is_first = not choice.has_begun
        if not is_first and output.finish_reason is None and not output.delta and tokens.start == tokens.stop:
            return b""
        if is_first and not self._echoed and self._is_plain and output.finish_reason is None and not output.delta:
            return b""
        return self._event([self._piece(choice, output, output.delta, tokens)])

    def _whole(self, choice: Choice) -> dict[str, Any]:
        output = choice.last
        assert output is not None
        if choice.index % self._num_choices == 0 and output.prompt_logprobs is not None:
            self._prompt_logprobs[choice.prompt_index] = output.prompt_logprobs
        return self._piece(choice, output, output.text, slice(0, len(output.token_ids)))

    def _piece(self, choice: Choice, output: Output, text: str, tokens: slice) -> dict[str, Any]:
        prompt = self._prompts[choice.prompt_index]
        begins, choice.has_begun = not choice.has_begun, True
        if begins and self._echoed:
            text = self._echoed[choice.prompt_index] + text
        made = _choice(choice.index, text, self._logprobs(choice, output, tokens, begins), output.finish_reason, output.stop_reason)
        if self._head.returns_token_ids:
            made["token_ids"] = output.token_ids[tokens]
            if begins:
                made["prompt_token_ids"] = prompt.token_ids
        return made

    def _logprobs(self, choice: Choice, output: Output, tokens: slice, begins: bool) -> dict[str, Any] | None:
        if output.logprobs is None or self._tokenizer is None:
            return None
        columns: dict[str, Any] = {}
        start = 0
        if begins and self._echoed:
            columns = self._columns_of_prompt(choice.prompt_index, self._tokenizer)
            start = len(self._echoed[choice.prompt_index])
        if choice.offsets is None:
            choice.offsets = self._offsets(start)
        made = completion_logprobs(output.logprobs[tokens], 0, b"", choice.offsets)
        return {name: columns.get(name, []) + values for name, values in made.items()}

    def _columns_of_prompt(self, index: int, tokenizer: Tokenizer) -> dict[str, Any]:
        """Made once for all choices."""
        columns = self._prompt_columns[index]
        if columns is None:
            token_ids = self._prompts[index].token_ids
            first = token_ids[0]
            columns = completion_logprobs(
                self._prompt_logprobs[index] or [], first, tokenizer.token_bytes(first), self._offsets_in(self._echoed[index], token_ids)
            )
            columns["text_offset"] = [max(0, offset) for offset in columns["text_offset"]]
            self._prompt_columns[index] = columns
        return columns

    def _offsets_in(self, echoed: str, token_ids: Sequence[int]) -> TextOffsets:
        """A text is echoed as it was given: with the special tokens that it spells, and without those put in front of it."""
        assert self._tokenizer is not None
        written = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        if written.endswith(echoed):
            return TextOffsets(self._tokenizer, skip_special_tokens=False, start=len(echoed) - len(written))
        return self._offsets(0)

    def _offsets(self, start: int) -> TextOffsets:
        assert self._tokenizer is not None
        return TextOffsets(self._tokenizer, skip_special_tokens=self._params.skip_special_tokens, start=start)


def _choice(
    index: int, text: str, logprobs: Any = None, finish_reason: str | None = None, stop_reason: str | int | None = None
) -> dict[str, Any]:
    return {
        "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason, "stop_reason": stop_reason
    }  # fmt: skip


def _taken(held: list[Output]) -> list[Output]:
    taken = list(held)
    held.clear()
    return taken
