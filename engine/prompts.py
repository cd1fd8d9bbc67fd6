"""A text client's way in: prompts and messages to token ids, checked against the model's limits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from engine.outputs import Answer, Answers
from engine.text.chat_template import ChatTemplate, named_templates
from engine.text.tokenizer import Tokenizer
from ipc.errors import PromptTooLong, RequestError
from ipc.messages import ModelInfo
from ipc.params import MAX_BAD_WORD_TOKENS, MAX_TOKEN_ID, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request that is ready to be sent."""

    token_ids: list[int]
    params: SamplingParams
    """As the core takes them: words are token ids."""

    echoed: str = ""
    """Text that the answer's begins with."""


class TextSide:
    """What a client makes of a ModelInfo: the tokenizer and the chat template, with the rules for prompts.

    Raises:
        ConfigError: the tokenizer that the core sent can't be read.
    """

    def __init__(self, model: ModelInfo) -> None:
        self.model = model
        self._tokenizer = Tokenizer(model.tokenizer, model.tokenizer_config) if model.tokenizer else None
        special = self._tokenizer.special_tokens if self._tokenizer is not None else {}
        self._template = ChatTemplate(model.chat_template, special, named_templates(model.tokenizer_config))

    def is_of(self, model: ModelInfo) -> bool:
        """Whether this core serves the same model as far as a client can tell, so that answers may go on at the one that were
        begun at the other.
        """
        others = (field.name for field in fields(ModelInfo) if field.name != "core_id")
        return all(getattr(model, name) == getattr(self.model, name) for name in others)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError when the model came without one."""
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer; send token ids as the prompt", field="prompt")
        return self._tokenizer

    def prepare(self, prompt: str | Sequence[int], params: SamplingParams | None) -> Prepared:
        """A prompt as ``tokenizer(text)`` of transformers encodes it (BOS where the model wants it), or ids as given.

        Raises:
            RequestError: naming field, value and rule.
        """
        if isinstance(prompt, str):
            return self._checked(self.tokenizer.encode(prompt, limit=self.model.max_model_len), params, "prompt", text=prompt)
        return self._checked(_id_list(prompt), params, "prompt")

    def prepare_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None, variables: Mapping[str, Any]
    ) -> Prepared:
        """Messages as ``apply_chat_template(tokenize=True)`` of transformers encodes them: no BOS but the template's."""
        tokenizer = self.tokenizer
        text = self._template.render(messages, **variables)
        token_ids = tokenizer.encode(text, add_special_tokens=False, limit=self.model.max_model_len, field="messages")
        return self._checked(token_ids, params, "messages")

    def answers(self, request_id: str, prepared: Prepared) -> Answers:
        """What makes outputs of the core's messages, for each choice."""
        params = prepared.params
        others = replace(params, prompt_logprobs=None)  # they come with the first choice
        return Answers([
            self._answer(request_id, prepared, params if index == 0 else others) for index in range(params.n)
        ], params.seed)

    def _answer(self, request_id: str, prepared: Prepared, params: SamplingParams) -> Answer:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return Answer(request_id, params, len(prepared.token_ids), None, lambda token_id: b"")
        detokenizer = tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
        num_tokens = len(prepared.token_ids)
        return Answer(request_id, params, num_tokens, detokenizer, tokenizer.token_bytes, prepared.echoed)

    def _checked(
        self, token_ids: list[int], params: SamplingParams | None, field: str, text: str | None = None
    ) -> Prepared:
        if params is None:
            params = SamplingParams()
        elif not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {type(params).__name__}", field="params")
        for name, other in (("stop", "stop_token_ids"), ("bad_words", "bad_word_ids"), ("echo", "the prompt")):
            if getattr(params, name) and self._tokenizer is None:
                raise RequestError(f"{name} needs a tokenizer, and this model has none; use {other}", field=name)
        if not token_ids:
            raise RequestError(
                f"{field} has 0 tokens; at least one is needed, and this model adds none of its own", field=field
            )
        limit = self.model.max_model_len
        if len(token_ids) >= limit:
            raise PromptTooLong(field, len(token_ids), limit)
        echoed = ""
        if params.echo:
            skips = params.skip_special_tokens
            echoed = text if text is not None else self.tokenizer.decode(token_ids, skip_special_tokens=skips)
        if params.bad_words:
            ids = [spelling for word in params.bad_words for spelling in _spellings(word, self.tokenizer)]
            params = replace(params, bad_words=(), bad_word_ids=(*params.bad_word_ids, *ids))
        return Prepared(token_ids=token_ids, params=params, echoed=echoed)


Prepare = Callable[[TextSide], Prepared]
"""A request that becomes ready when it is known who takes it."""

PrepareItem = Callable[[TextSide, Any, SamplingParams], Prepared]
"""The same for one of a batch and its parameters."""


def _spellings(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The tokens of a word at the beginning of a text, and behind a space."""
    bare = word.strip()
    found = {tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (bare, " " + bare)}
    for token_ids in found:
        if len(token_ids) > MAX_BAD_WORD_TOKENS:
            raise RequestError(
                f"bad_words={word!r} has {len(token_ids)} tokens; at most {MAX_BAD_WORD_TOKENS} are allowed", field="bad_words"
            )
    return sorted(found)


def _id_list(prompt: Any) -> list[int]:
    if isinstance(prompt, (bytes, Mapping)) or not hasattr(prompt, "__iter__"):
        raise RequestError(f"prompt must be a text or a list of token ids, got {type(prompt).__name__}", field="prompt")
    found = []
    for item in prompt:
        token_id = item if type(item) is int else _index(item)
        if token_id is None or not 0 <= token_id <= MAX_TOKEN_ID:
            raise RequestError(f"prompt holds {item!r:.80}; a token id is an integer from 0 to {MAX_TOKEN_ID}", field="prompt")
        found.append(token_id)
    return found


def _index(item: Any) -> int | None:
    """Integers of other libraries, such as numpy's, count; booleans and floats do not."""
    if isinstance(item, bool) or not hasattr(item, "__index__"):
        return None
    return int(item.__index__())
