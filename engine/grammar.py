"""From what a client asks for to the masks of an answer: compiled by llguidance, in numpy, without the model.

The grammar sees the same bytes of a token that the detokenizer adds to the text, so what a client reads has the form that
it asked for. llguidance is optional: this module is imported when the first grammar comes.
"""

import copy
import json
import re
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from engine.config import ModelFiles
from engine.schema_place import place_of_error
from engine.text.tokenizer import Tokenizer
from ipc.errors import ConfigError, RequestError
from ipc.messages import MaskBuffer
from ipc.params import SamplingParams
from ipc.structured import JSON_OPTIONS, StructuredOutput

MAX_LEXER_STATES = 20_000
"""Of one grammar: at 1 to 2 kB each they are most of what it can take of the core's memory. Usual schemas have hundreds."""

_REGEX_ERROR = re.compile(r"regex parse error:\n    (.*)\n    ( *)\^+\nerror: (.*)")

BITS = 32
"""Of a mask's word."""


class Grammar:
    """The grammar of one answer: what it has accepted so far, and what may come next."""

    def __init__(self, matcher: LLMatcher, vocabulary: "Vocabulary", params: SamplingParams) -> None:
        """``matcher`` becomes this object's own."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._ends = vocabulary.end_bits(
            () if params.ignore_eos else (*vocabulary.eos_token_ids, *params.stop_token_ids)
        )
        self.mask: MaskBuffer = np.zeros(0, np.int32)
        """[words]; see ``AnswerGrammar``."""
        self.is_complete = False
        self._look_ahead()

    def copy(self, params: SamplingParams) -> "Grammar":
        """For another answer, which goes on from here."""
        return Grammar(self._matcher.deep_copy(), self._vocabulary, params)

    def fork(self) -> "Grammar":
        """See ``AnswerGrammar``. What was found out of the next token is shared: it is never changed, only replaced."""
        twin = copy.copy(self)
        twin._matcher = self._matcher.deep_copy()
        return twin

    def accept(self, token_id: int) -> None:
        """See ``AnswerGrammar``."""
        if not self._matcher.consume_token(token_id):
            if self._allows(token_id):
                raise self._too_complex()
            raise RequestError(
                f"structured output: token {token_id} does not fit: {self._matcher.get_error()}", code="internal"
            )
        self._look_ahead()

    def _look_ahead(self) -> None:
        matcher = self._matcher
        self.mask = allowed = self._vocabulary.compute_mask(matcher)
        if matcher.is_error():
            raise self._too_complex()
        self.is_complete = matcher.is_stopped()
        if not self.is_complete and matcher.is_accepting():
            # Which tokens end an answer is not the grammar's matter, only where one may end.
            allowed &= self._vocabulary.not_eos_bits
            self.is_complete = not allowed.any()
            allowed |= self._ends


    def _allows(self, token_id: int) -> bool:
        word, bit = divmod(token_id, BITS)
        return bool(self.mask[word] >> bit & 1)

    def _too_complex(self) -> RequestError:
        return RequestError(f"structured output is too complex: {_said(self._matcher.get_error())}", field="structured")


class Vocabulary:
    """A model's tokens as llguidance wants them: built once, takes about a second and tens of megabytes."""

    def __init__(self, files: ModelFiles, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """``vocab_size``: width of the model's logits, so of the masks.

        Raises:
            RequestError: there is no tokenizer, or not one whose tokens' bytes are known.
        """
        if not files.tokenizer:
            raise RequestError("structured output needs a tokenizer, and this model has none", field="structured")
        try:
            tokenizer = Tokenizer(files.tokenizer, files.tokenizer_config)
        except ConfigError as error:
            raise RequestError(
                f"structured output needs the tokenizer, which {error.message}", code="internal"
            ) from None
        if not tokenizer.has_known_bytes:
            raise RequestError(
                "structured output needs a tokenizer with bytes for tokens (byte-level or sentencepiece), which this model's is not",
                field="structured",
            )
        self.eos_token_ids = tuple(i for i in eos_token_ids if 0 <= i < vocab_size)
        self._num_words = -(-vocab_size // BITS)
        """Of a mask for the model; its logits may be more than the tokenizer has tokens, or fewer."""
        try:
            self.tokenizer = LLTokenizer(tokenizer.to_json(), eos_token=list(self.eos_token_ids) or None)
        except ValueError as error:
            raise RequestError(
                f"structured output can't use this model's tokenizer: {_said(str(error))}", field="structured"
            ) from None
        self._num_tokenizer_words = -(-self.tokenizer.vocab_size // BITS)
        self.not_eos_bits = ~self.end_bits(tuple(i for i in self.tokenizer.eos_tokens if i < vocab_size))
        self.limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)

    def end_bits(self, token_ids: tuple[int, ...]) -> MaskBuffer:
        """A mask of these tokens."""
        bits = np.zeros(self._num_words * BITS, np.uint8)
        bits[list(token_ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def compute_mask(self, matcher: LLMatcher) -> MaskBuffer:
        """[words] of the tokens that the matcher allows next; an array of its own."""
        words = np.zeros(max(self._num_words, self._num_tokenizer_words), np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, 4 * self._num_tokenizer_words)
        return words[: self._num_words]

    def compile(self, structured: StructuredOutput) -> Grammar:
        """A grammar at its start, for parameters that end nowhere: ``copy`` it.

        Raises:
            RequestError: it can't be compiled; names the field, the value's place and the rule.
        """
        field = f"structured.{structured.kind}"
        try:
            source = _source_of(structured)
        except ValueError as error:
            raise RequestError(f"{field}: {_said(str(error))}", field=field) from None
        matcher = LLMatcher(self.tokenizer, source, log_level=0, limits=self.limits)
        if matcher.is_error():
            raise RequestError(f"{field}{_place(structured)}: {_said(matcher.get_error())}", field=field)
        return Grammar(matcher, self, SamplingParams(ignore_eos=True))


def _source_of(structured: StructuredOutput) -> str:
    """In llguidance's own form. Raises ValueError for what can't even be read."""
    match structured:
        case StructuredOutput(json_schema=str(text)):
            return _json_source(_parsed(text))
        case StructuredOutput(json_object=True):
            return _json_source({"type": "object"})
        case StructuredOutput(regex=str(regex)):
            return LLMatcher.grammar_from_regex(regex)
        case StructuredOutput(grammar=str(grammar)):
            return LLMatcher.grammar_from_lark(_as_lark(grammar))
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_quoted, structured.choice)))


def _json_source(schema: Any) -> str:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        # Refused in any case; options are for objects only.
        return LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)  # type: ignore[arg-type]


def _parsed(text: str) -> Any:
    try:
        schema = json.loads(text)
        json.dumps(schema, allow_nan=False)  # the compiler would take numbers that JSON does not have for null
    except RecursionError:
        raise ValueError("is nested too deep") from None
    if not isinstance(schema, (dict, bool)):
        raise ValueError(f"is {_shown(schema)}; a JSON schema is an object or a boolean")
    return schema


def _as_lark(grammar: str) -> str:
    try:
        return any_to_lark(grammar)
    except Exception as error:  # noqa: BLE001 the converter raises plain Exception for what it can't read
        raise ValueError(f'is neither Lark (a rule "start: ...") nor EBNF ("root ::= ..."): {error}') from None


def _quoted(text: str) -> str:
    """A Lark literal; its escapes are JSON's, and so are its rules but for one control character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _place(structured: StructuredOutput) -> str:
    """Where in a schema its error is, and what stands there. Messages about other forms have their place in them."""
    if structured.json_schema is None:
        return ""
    place, value = place_of_error(
        _parsed(structured.json_schema), lambda part: LLMatcher.validate_grammar(_json_source(part))
    )
    return f" at #{place} ({_shown(value)})"


def _said(message: str) -> str:
    """A compiler's message on one line, with the place in a regular expression as a number instead of a mark below it."""
    found = _REGEX_ERROR.search(message)
    if found:
        return f"regular expression {_shown(found[1])}, character {len(found[2]) + 1}: {found[3]}"
    return " ".join(message.split())[:400]


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
