"""Is a stop string found wherever tokens cut it, and is nothing else held back? (D2 A5)"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.stop_strings import StopStrings

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)
PIECES = st.lists(st.text("abc", min_size=1, max_size=4), max_size=12)


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopStrings(stops, include=include)
    text = "".join(map(matcher.push, pieces))
    return text + matcher.flush(), matcher.matched


def reference(stops: list[str], text: str, *, include: bool = False) -> tuple[str, str | None]:
    """The stop whose last character comes first; the longest among those that end there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            matched = max(found, key=len)
            return text[: end if include else end - len(matched)], matched
    return text, None


@settings(max_examples=500)
@given(STOPS, PIECES, st.booleans())
def test_the_result_does_not_depend_on_how_the_text_is_cut(stops: list[str], pieces: list[str], include: bool) -> None:
    assert run(stops, pieces, include=include) == reference(stops, "".join(pieces), include=include)


@settings(max_examples=500)
@given(STOPS, PIECES)
def test_only_what_may_still_become_a_stop_string_is_held_back(stops: list[str], pieces: list[str]) -> None:
    matcher = StopStrings(stops)
    received = sent = ""
    for piece in pieces:
        received += piece
        sent += matcher.push(piece)
        if matcher.matched is not None:
            return
        tails = [received[-n:] for n in range(1, 5) if n <= len(received)]
        held = max((len(tail) for tail in tails if any(s.startswith(tail) and s != tail for s in stops)), default=0)
        assert sent == received[: len(received) - held]


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "matched"),
    [
        (["Pari"], ["I saw", " Paris", " yesterday"], "I saw ", "Pari"),
        (["serv"], [" Obs", "erv", "ation"], " Ob", "serv"),
        (["ation"], ["Obs", "erv", "ation"], "Observ", "ation"),
        ([" "], ["Sky ", "blue"], "Sky", " "),
        (["x"], ["axb"], "a", "x"),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
        (["👩‍💻"], ["hi 👩", "\u200d", "💻 there"], "hi ", "👩‍💻"),
        (["abcd", "bc"], ["abcd"], "a", "bc"),
        (["STOP"], ["ST", "O", "ST", "OP!"], "STO", "STOP"),
        (["never"], ["nev", "nev", "ne"], "nevnevne", None),
        ([], ["a", "b"], "ab", None),
        (["b", "ab"], ["xab"], "x", "ab"),
        (["aab"], ["aa", "ab"], "a", "aab"),
        (["ababc"], ["abab", "abc"], "ab", "ababc"),
    ],
)
def test_d2_cuts_inside_a_token(stops: list[str], pieces: list[str], text: str, matched: str | None) -> None:
    assert run(stops, pieces) == (text, matched)


def test_a5_the_stop_string_can_be_kept() -> None:
    assert run(["Pari"], ["I saw", " Paris"], include=True) == ("I saw Pari", "Pari")


def test_nothing_passes_behind_a_match() -> None:
    matcher = StopStrings(["b"])
    assert [matcher.push(piece) for piece in ("ab", "c", "b")] == ["a", "", ""]
    assert matcher.flush() == ""


def test_a_bad_case_is_linear() -> None:
    """A prefix that almost matches again and again: each character is looked at a bounded number of times."""
    stop = "a" * 1000 + "b"
    matcher = StopStrings([stop])
    sent = sum(len(matcher.push("a" * 10)) for _ in range(20_000))
    assert sent == 200_000 - 1000
