"""Varied strings for tokenizer tests, the same on every run."""

import random

HAND_PICKED = (
    "", " ", "  ", "\n", "\n\n\n", "\t", "\r\n", "a", " a", "a ", "  a  b   c    ", "Hello world", "Hello  world!",
    "The quick brown fox jumps over the lazy dog.", "I'm you're he'll they've we'd it's DON'T I'M", "'s 't 're", "don’t",
    "0", "1 2 3", "12345", "3.14159", "1,000,000", "a  12", "    5", "x=1;y=22", "v1.2.3-rc4", "١٢٣", "²³¼",
    "def f(x):\n    return x + 1\n\n\tif True:\n\t\tpass\n", "{\"key\": [1, 2.5e-3, null]}", "<html><body>&amp;</body>",
    "https://example.com/a?b=c&d=%20#frag", "user@example.com", "C:\\path\\to\\file.txt", "$100 €50 £7 ¥9",
    "naïve café Zürich Ångström", "Příliš žluťoučký kůň úpěl ďábelské ódy", "Съешь же ещё этих мягких французских булок",
    "Η γλώσσα μου έδωσαν ελληνική", "日本語のテキスト。", "中文字符，测试！", "한국어 텍스트", "العربية نص", "עברית", "हिन्दी पाठ", "ไทย",
    "😀", "👩‍💻 👨‍👩‍👧‍👦 🏳️‍🌈", "🇩🇪🇫🇷", "e\u0301 \u0065\u0301", "\u200b\u200d\ufeff", "\u00a0nbsp\u3000ideographic", "𝕳𝖊𝖑𝖑𝖔 𝟙𝟚",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<|endoftext|>", "a<|im_end|>b", "<|im_end|><|im_end|>",
    "<|im_ end|>", " <|im_start|> ", "<jupyter_code>x", "<repo_name>", "\u0000\u0001\u007f", "\x1b[31mred\x1b[0m",
    "ALLCAPSWORD", "camelCaseWordAndMore", "snake_case_word", "a" * 100, "ab" * 60, " " * 33, "\n" * 17, "-" * 40,
    "!@#$%^&*()_+-=[]{}|;':\",./<>?`~", "...", "…", "—–-", "“quoted” ‘single’", "Ġ Ċ ġ Ā", "▁ ▁a", "ﬁ ﬂ ǆ", "İi̇ıI",
)  # fmt: skip

_ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJ", "0123456789", "     \n\t", ".,;:!?'\"-()[]{}", "äöüßéèñçøåž", "абвгдежз", "αβγδε",
    "日本語中文字한국어", "ابتثج", "😀👩💻🏳🌈\u200d\ufe0f", "\u0000\u00ad\u2028\u3000",
)  # fmt: skip
_WORDS = (
    "the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not",
    "he", "I", "this", "are", "or", "his", "from", "at", "which", "but", "have", "an", "had",
)  # fmt: skip


def samples(count: int = 360) -> list[str]:
    """Hand-picked ones, then random mixtures of words and of scripts."""
    draw = random.Random(2)
    found = list(HAND_PICKED)
    while len(found) < count:
        if draw.random() < 0.4:
            words = [draw.choice(_WORDS) for _ in range(draw.randint(1, 30))]
            found.append(draw.choice((" ", "  ", "\n", ", ")).join(words).title() if draw.random() < 0.2 else " ".join(words))
        else:
            pieces = ["".join(draw.choices(alphabet, k=draw.randint(1, 6))) for alphabet in draw.choices(_ALPHABETS, k=8)]
            found.append("".join(pieces))
    return found


_TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say <b>\"hi\"</b> & 日本"},
    {"role": "assistant", "content": "日本 👋"},
    {"role": "user", "content": "  again\n"},
]
CHATS = [
    {"conversation": conversation, "add_generation_prompt": add}
    for conversation in ([{"role": "user", "content": "Hi"}], _TALK)
    for add in (True, False)
]
"""Arguments of apply_chat_template."""
