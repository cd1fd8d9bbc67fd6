"""Does text stream in whole characters, never taken back, equal to what the tokenizers library makes of all tokens?"""

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from engine.outputs import Answer
from engine.text.byte_alphabet import CHARACTER_OF_BYTE, spell, unspell
from engine.text.detokenizer import CUT, WINDOW_LIMIT, Detokenizer, WindowDetokenizer
from engine.text.sources import read_text_files
from engine.text.tokenizer import Tokenizer
from ipc.messages import RequestOutput
from ipc.params import SamplingParams
from tests.text_samples import many_samples

MIXED = "A 世界 — naïve ǆ café 👩‍💻 한국어 Příliš žluťoučký 🇩🇪 \u0301 end"


def stream(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.flush()]


def backend_of(vocabulary: Sequence[str], decoder: decoders.Decoder | None, special: Sequence[str] = ("<s>",)) -> Backend:
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return backend


def both(backend: Backend) -> tuple[Tokenizer, Backend]:
    return Tokenizer(backend.to_str().encode()), backend


@cache
def byte_level() -> tuple[Tokenizer, Backend]:
    """<s>, an added token that is not special, one outside the alphabet, and every byte."""
    backend = backend_of(["<s>", "<tool>", "日", *(spell(bytes([b])) for b in range(256)), spell(b"Hello"), spell("é".encode())],
                         decoders.ByteLevel())  # fmt: skip
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return both(backend)


WORDS = ["▁the", "the", "▁", "▁▁", "ing", "日", "é", "▁a▁b", "<0x", "<0xZZ>"]


@cache
def byte_fallback(*, strips: int = 1) -> tuple[Tokenizer, Backend]:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips:
        steps.append(decoders.Strip(" ", strips, 0))
    return both(backend_of(["<s>", *(f"<0x{b:02X}>" for b in range(256)), *WORDS], decoders.Sequence(steps)))


@cache
def metaspace(scheme: str) -> tuple[Tokenizer, Backend]:
    return both(backend_of(["<s>", *WORDS], decoders.Metaspace(replacement="▁", prepend_scheme=scheme)))


def check(pair: tuple[Tokenizer, Backend], token_ids: Sequence[int], *, skip: bool = True) -> None:
    tokenizer, backend = pair
    pieces = stream(tokenizer.detokenizer(skip_special_tokens=skip), token_ids)
    expected = backend.decode(list(token_ids), skip_special_tokens=skip)
    assert "".join(pieces) == expected == tokenizer.decode(token_ids, skip_special_tokens=skip)


# ------------------------------------------------------------------------------------- equal to decoding at once


@given(st.lists(st.integers(0, 262), max_size=40), st.booleans())
def test_byte_level_equals_the_library(token_ids: list[int], skip: bool) -> None:
    """Most of these are no UTF-8, and 261 and above are no tokens at all (D3 D5)."""
    check(byte_level(), token_ids, skip=skip)


@given(st.text(max_size=30), st.data())
def test_byte_level_text_cut_anywhere_never_shows_a_cut_character(text: str, data: st.DataObject) -> None:
    """D3: no U+FFFD that is not in the text, and each character as soon as it is whole."""
    tokenizer, _ = byte_level()
    raw = text.encode()
    sent = ""
    detokenizer = tokenizer.detokenizer()
    for index, byte in enumerate(raw):
        sent += detokenizer.add(3 + byte)
        assert sent == raw[: index + 1].decode(errors="ignore")
    assert detokenizer.flush() == ""


@given(st.lists(st.one_of(st.integers(257, 256 + len(WORDS)), st.just(0)), max_size=20), st.booleans(), st.sampled_from([0, 1, 2]))
def test_sentencepiece_words_equal_the_library(token_ids: list[int], skip: bool, strips: int) -> None:
    check(byte_fallback(strips=strips), token_ids, skip=skip)


@given(st.lists(st.one_of(st.text(min_size=1, max_size=3), st.integers(257, 256 + len(WORDS))), max_size=12))
def test_sentencepiece_bytes_equal_the_library(parts: list[str | int]) -> None:
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else [1 + byte for byte in part.encode()]
    check(byte_fallback(), ids)


@given(st.lists(st.integers(0x80, 0xBF), min_size=1, max_size=6), st.integers(257, 256 + len(WORDS)))
def test_sentencepiece_broken_bytes_equal_the_library(broken: list[int], word: int) -> None:
    """D5: one mark for each byte, and the stream goes on."""
    check(byte_fallback(), [word, *(1 + byte for byte in broken), word, 1 + 0xE4, 1 + 0xB8, word, 1 + 0xF0])


@given(st.lists(st.integers(0, len(WORDS)), max_size=12), st.sampled_from(["always", "first", "never"]), st.booleans())
def test_metaspace_equals_the_library(token_ids: list[int], scheme: str, skip: bool) -> None:
    check(metaspace(scheme), token_ids, skip=skip)


def test_a_broken_run_of_byte_tokens_keeps_its_whole_characters() -> None:
    """The one place where we differ: what was streamed as a character is not taken back for a bad byte behind it."""
    tokenizer, backend = byte_fallback()
    ids = [1 + byte for byte in "世".encode() + b"\xff"]
    assert tokenizer.decode(ids) == "世" + CUT
    assert backend.decode(ids) == 4 * CUT


# ----------------------------------------------------------------------------------------------- what may be sent


def test_d4_the_sent_offset_never_goes_back() -> None:
    """Text states as a decoder may give them: a cut character, the character and another cut one, both whole."""
    states = ["A 世" + CUT, "A 世a" + CUT, "A 世ab"]
    detokenizer = WindowDetokenizer(lambda ids: states[len(ids) - 1])
    assert [detokenizer.add(i) for i in range(3)] == ["A 世", "a", "b"]
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("states", [["世世", "世"], ["ab", "a", "abc"], ["a" + CUT, "a", "ab"], ["", CUT, CUT * 2, "é"]])
def test_d4_a_decoder_that_takes_text_back_does_not_repeat_any(states: list[str]) -> None:
    detokenizer = WindowDetokenizer(lambda ids: states[len(ids) - 1])
    sent = ""
    for index, state in enumerate(states):
        sent += detokenizer.add(index)
        assert sent.startswith(state) or state.startswith(sent) or CUT in state
    assert sent + detokenizer.flush() == max(states, key=lambda s: (len(s.rstrip(CUT)), s))


@pytest.mark.parametrize("window", [False, True])
def test_d4_500_random_cuts_of_a_mixed_text(window: bool) -> None:
    draw = random.Random(4)
    raw = (MIXED * 3).encode()
    for _ in range(500):
        cuts = sorted(draw.sample(range(1, len(raw)), draw.randint(1, 40)))
        pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        tokenizer = byte_level()[0]
        detokenizer: Detokenizer = tokenizer.detokenizer()
        if window:
            detokenizer = WindowDetokenizer(lambda ids, pieces=pieces: b"".join(pieces[i] for i in ids).decode(errors="replace"))  # type: ignore[misc]
        sent = ""
        for index, piece in enumerate(pieces):
            added = detokenizer.add(index) if window else "".join(detokenizer.add(3 + byte) for byte in piece)
            assert CUT not in added
            sent += added
            assert (MIXED * 3).startswith(sent)
        assert sent + detokenizer.flush() == MIXED * 3


def test_d4_500_random_cuts_into_byte_tokens_and_words() -> None:
    """The same for a tokenizer whose tokens are words or single bytes."""
    draw = random.Random(5)
    tokenizer, _ = byte_fallback()
    for _ in range(500):
        words = [draw.choice([257, 258, 262, 263]) for _ in range(draw.randint(1, 6))]
        ids, text = [257], "the"  # the blank in front is taken away
        for word in words:
            piece = "".join(draw.choices(MIXED, k=draw.randint(1, 6)))
            ids += [*(1 + byte for byte in piece.encode()), word]
            text += piece + tokenizer.token_bytes(word).decode()
        sent = ""
        detokenizer = tokenizer.detokenizer()
        for token_id in ids:
            added = detokenizer.add(token_id)
            assert CUT not in added
            sent += added
            assert text.startswith(sent)
        assert sent + detokenizer.flush() == text


def test_d4_500_random_cuts_of_2000_texts_by_the_demo_models_tokens(demo_model: Path) -> None:
    """Texts are cut anywhere, at bytes as well: each part's tokens on their own, in messages of random size."""
    files = read_text_files(str(demo_model))
    tokenizer = Tokenizer(files.tokenizer, files.tokenizer_config)
    byte_ids = {tokenizer.token_bytes(i): i for i in range(len(json.loads(files.tokenizer)["model"]["vocab"]))}
    draw = random.Random(6)
    for text in draw.sample(many_samples(), 500):
        ids: list[int] = []
        while text and len(ids) < 400:
            part, text = text[: (size := draw.randint(1, 12))], text[size:]
            raw = part.encode()
            in_bytes = draw.random() < 0.5 and all(raw[i : i + 1] in byte_ids for i in range(len(raw)))
            ids += [byte_ids[raw[i : i + 1]] for i in range(len(raw))] if in_bytes else tokenizer.encode(part)
        whole = b"".join(map(tokenizer.token_bytes, ids)).decode()
        answer = Answer("r", SamplingParams(), 1, tokenizer.detokenizer(skip_special_tokens=False), tokenizer.token_bytes)
        sent = ""
        while True:
            new, ids = ids[: (size := draw.randint(1, 5))], ids[size:]
            output = answer.take(message(new, "length" if not ids else None))
            sent += output.delta
            assert sent == output.text and whole.startswith(sent)
            if not ids:
                break
        assert sent == whole


def message(token_ids: list[int], finish_reason: str | None) -> RequestOutput:
    return RequestOutput(core_id=1, request_id="r", new_token_ids=token_ids, finish_reason=finish_reason)


def test_a_cut_tail_is_one_mark_at_the_end() -> None:
    tokenizer, _ = byte_level()
    pieces = stream(tokenizer.detokenizer(), [3 + byte for byte in b"a \xe2\x98"])
    assert pieces == ["a", " ", "", "", CUT]


def test_d5_bytes_that_can_never_be_text_do_not_hold_the_stream_up() -> None:
    tokenizer, _ = byte_level()
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.add(3 + byte) for byte in b"\xff\xffa"] == [CUT, CUT, "a"]
    window = WindowDetokenizer(lambda ids: CUT * len(ids))
    sent = [window.add(0) for _ in range(200)]
    assert len("".join(sent)) >= 190


def test_special_tokens_are_left_out_or_shown() -> None:
    tokenizer, _ = byte_level()
    ids = [0, 259, 1, 0]
    assert tokenizer.decode(ids) == "Hello<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>Hello<tool><s>"


def test_a_special_token_inside_a_character_does_not_break_it() -> None:
    tokenizer, _ = byte_level()
    cut = [3 + 0xC3, 0, 3 + 0xA9]
    assert tokenizer.decode(cut) == "é"


# ------------------------------------------------------------------------------------------- other kinds of decoder


@pytest.mark.parametrize("decoder", [decoders.WordPiece(prefix="##"), decoders.Fuse(), None])
def test_other_decoders_stream_what_the_library_gives(decoder: decoders.Decoder | None) -> None:
    words = ["<s>", "play", "##ing", "the", "un", "##able", "日", "##本"]
    tokenizer, backend = both(backend_of(words, decoder))
    draw = random.Random(3)
    for length in (0, 1, 5, WINDOW_LIMIT, 3 * WINDOW_LIMIT + 5):
        ids = [draw.randrange(1, len(words)) for _ in range(length)]
        if isinstance(decoder, decoders.WordPiece) and ids:
            ids[0] = 1
        assert "".join(stream(tokenizer.detokenizer(), ids)) == backend.decode(ids)


def test_the_window_costs_the_same_for_every_token() -> None:
    decoded = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return "".join(chr(97 + i % 26) for i in ids)

    detokenizer = WindowDetokenizer(decode)
    text = "".join(detokenizer.add(i) for i in range(2000))
    assert text == "".join(chr(97 + i % 26) for i in range(2000))
    assert max(decoded) <= WINDOW_LIMIT
    assert len(decoded) < 2 * 2000


# ---------------------------------------------------------------------------------------------------------- bytes


def test_d6_bytes_of_tokens_joined_are_the_text() -> None:
    tokenizer, _ = byte_level()
    ids = [3 + byte for byte in MIXED.encode()]
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == MIXED
    assert tokenizer.token_bytes(5000) == tokenizer.token_bytes(-1) == tokenizer.token_bytes(1 << 40) == b""
    pieces, _ = byte_fallback()
    ids = [257, *(1 + byte for byte in "世".encode()), 264]
    assert b"".join(map(pieces.token_bytes, ids)).decode() == " the世 a b"


def test_the_byte_alphabet_is_the_librarys() -> None:
    assert sorted(CHARACTER_OF_BYTE) == list(range(256))
    for byte in range(128):
        backend, tokenizer = byte_level()[1], byte_level()[0]
        assert backend.decode([3 + byte]).encode() == tokenizer.token_bytes(3 + byte) == unspell(spell(bytes([byte])))
    assert unspell("日Ġ") == "日Ġ".encode()


@settings(max_examples=50)
@given(st.recursive(st.one_of(st.none(), st.text(max_size=5), st.integers()), lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["type", "decoders", "pattern"]), x, max_size=3), max_leaves=8))
def test_odd_decoders_are_never_taken_for_a_known_kind(decoder: object) -> None:
    """A tokenizer.json that the library accepts with a decoder that we do not know must not crash us."""
    from engine.text.tokenizer import _rules_of

    assert _rules_of(json.loads(json.dumps(decoder))) is None
