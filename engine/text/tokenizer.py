"""Text to token ids, and what each token id stands for as bytes."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from engine.text.byte_alphabet import unspell
from engine.text.detokenizer import ByteDetokenizer, Detokenizer, TextRules, WindowDetokenizer
from ipc.errors import ConfigError, PromptTooLong, RequestError

_BLANK = "▁"
"""How sentencepiece spells a space."""

LONG_TEXT = 4096
"""Characters. The library keeps Python's global lock while it encodes one text, but not for a list of texts: a megabyte would
stop every thread of the process for seconds."""

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MORE = ("additional_special_tokens", "extra_special_tokens")


class Tokenizer:
    """One model's tokenizer; safe to use from many threads.

    Raises:
        ConfigError: ``tokenizer_json`` or ``tokenizer_config`` can't be read.
    """

    def __init__(self, tokenizer_json: bytes, tokenizer_config: bytes = b"{}") -> None:
        try:
            self._backend = Backend.from_buffer(tokenizer_json)
            document: dict[str, Any] = json.loads(tokenizer_json)
            config: dict[str, Any] = json.loads(tokenizer_config)
        except Exception as error:  # noqa: BLE001 - the library raises plain Exception for a broken file
            raise ConfigError("tokenizer", f"can't be read: {error}") from None
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special_tokens: dict[str, str] = {
            name: text for name in _NAMED if (text := _text_of(config.get(name))) is not None
        }
        """Named ones, as chat templates know them: bos_token, eos_token and so on."""
        self._mark_special([*self.special_tokens.values(), *_listed(config)])
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._rules = _rules_of(document.get("decoder"))
        self._bytes: dict[int, bytes] = {}

    @property
    def has_known_bytes(self) -> bool:
        """Whether ``token_bytes`` is exact: false where the text of a token depends on its neighbours."""
        return self._rules is not None

    def to_json(self) -> str:
        """A tokenizer.json of the same, with everything special marked as such."""
        return str(self._backend.to_str())

    def encode(
        self, text: str, *, add_special_tokens: bool = True, limit: int | None = None, field: str = "prompt"
    ) -> list[int]:
        """The text's tokens. With ``add_special_tokens`` what the model wants around a prompt, such as BOS, is added.

        Raises:
            RequestError: the text holds lone surrogates, which no tokenizer knows.
            PromptTooLong: it has ``limit`` tokens or more, as the ``field`` of a request. They are counted, not listed: a list
                of a million holds up every thread.
        """
        try:
            if len(text) <= LONG_TEXT:
                encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            else:
                encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
            if limit is not None and len(encoding) >= limit:
                raise PromptTooLong(field, len(encoding), limit)
            ids: list[int] = encoding.ids
        except (UnicodeError, TypeError):
            raise RequestError("prompt can't be encoded: it is not valid Unicode text", field="prompt") from None
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """All text of these tokens; the same that a detokenizer gives piece by piece."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join([*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.flush()])

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A new one, for one stream of tokens."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        if self._rules is not None:
            return ByteDetokenizer(self.token_bytes, skipped, self._rules)
        return WindowDetokenizer(lambda ids: str(self._backend.decode(ids, skip_special_tokens=False)), skipped)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text, as far as it is known without its neighbours; empty for unknown ids.

        Bytes of consecutive tokens, joined, are the text in UTF-8 (but for a blank that some tokenizers drop at the
        start).
        """
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell_out(token_id)
        return known

    def _spell_out(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        if token is None:
            return b""
        if self._rules is None:
            return str(self._backend.decode([token_id], skip_special_tokens=False)).encode("utf-8", "replace")
        if self._rules.is_byte_level:
            return unspell(token)
        if self._rules.has_byte_tokens and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return token.encode()
        return token.replace(_BLANK, " ").encode()

    def _mark_special(self, texts: Sequence[str]) -> None:
        """Tokens that the configuration names are special, also where tokenizer.json does not say so."""
        known = {token.content for token in self._backend.get_added_tokens_decoder().values() if token.special}
        for text in texts:
            if text not in known and self._backend.token_to_id(text) is not None:
                self._backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _text_of(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _listed(config: Mapping[str, Any]) -> list[str]:
    found = []
    for name in _MORE:
        entry = config.get(name) or []
        items = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else []
        found += [text for item in items if (text := _text_of(item)) is not None]
    return found


def _rules_of(decoder: Any) -> TextRules | None:
    """How tokens become text, for the two usual families; None for others, whose text only the library can make."""
    kind = decoder.get("type") if isinstance(decoder, dict) else None
    if kind == "ByteLevel":
        return TextRules(is_byte_level=True)
    if kind == "Metaspace" and decoder.get("replacement") == _BLANK:
        drops = decoder.get("prepend_scheme", "always") != "never" and decoder.get("add_prefix_space", True)
        return TextRules(drops_blanks_of_first_token=drops)
    if kind != "Sequence":
        return None
    steps = decoder.get("decoders") or []
    kinds = [step.get("type") for step in steps]
    is_blank = steps and steps[0].get("pattern") == {"String": _BLANK} and steps[0].get("content") == " "
    if kinds == ["ByteLevel"]:
        return TextRules(is_byte_level=True)
    if not is_blank or kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or kinds[3:] not in ([], ["Strip"]):
        return None
    if len(steps) == 4 and (steps[3].get("content") != " " or steps[3].get("stop", 0) != 0):
        return None
    return TextRules(has_byte_tokens=True, num_blanks_stripped=steps[3].get("start", 0) if len(steps) == 4 else 0)
