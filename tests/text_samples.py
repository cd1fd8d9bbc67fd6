"""Varied strings for tokenizer tests, the same on every run."""

import hashlib
import random
from collections.abc import Sequence

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


_SCRIPTS = (
    "ÀÉÎÕÜßæœşğıřžåø", "абвгдежзийклмнопЁЇЄ", "αβγδεζηθάέήΩ", "אבגדהוזחט", "ابتثجحخدذءآ", "अआइईकखगघि्ा", "กขคงจฉช่้ำ",
    "日本語中文漢字仮名かなカナ々〆", "한국어글자조합", "ქართული", "հայերեն", "தமிழ்", "ខ្មែរ", "ᚠᚢᚦ", "𐍈𝄞𝕏𝟘", "ⅫⅣ①⑳½¾", "٠١٢٣۴५६７８",
    "😀😅🤖👍🏽👩‍🚀🧑🏾‍🤝‍🧑🏻🇯🇵🏴‍☠️❤️", "←↑→∀∂∈∑√∞≈≠⊂", "€£¥₿฿₹", "\u0300\u0301\u0327\u20dd\u200c\u200d\ufe0f", "\u00a0\u2002\u2009\u202f\u3000\u2028\u0085\t",
    "«»„“”‘’‹›…–—", "{}[]()<>;:=+-*/%&|^~!?@#$\\\"'`_.,",
)  # fmt: skip
_CODE = (
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}", "async def f(*args, **kwargs) -> None:\n    await g(x=1)\n", "SELECT * FROM t WHERE a >= 10;",
    "<div class=\"a b\">\n  <!-- c -->\n</div>", "fn main() { println!(\"{:?}\", vec![1u8; 4]); }", "x = {'a': [1, 2.5e-3], \"b\": None}", "#include <stdio.h>\r\n",
    "git commit -m 'msg' && ls -la | grep \\.py$", "const f = (x) => `${x}!`;", "\\begin{equation} e^{i\\pi} + 1 = 0 \\end{equation}", "0x1F 0b101 1_000 1e-9",
    "2026-11-30T18:25:27.123Z", "192.168.0.1:8080", "+49 (0)30 1234-5678", "a@b.example", "C:\\dir\\file.txt", "key=value; path=/; HttpOnly",
)  # fmt: skip


def many_samples(count: int = 2000) -> list[str]:
    """The ones of ``samples``, then mixtures of more scripts, blanks, digits, code and emoji."""
    draw = random.Random(8)
    found = samples()
    while len(found) < count:
        pieces = []
        for _ in range(draw.randint(1, 9)):
            kind = draw.random()
            if kind < 0.45:
                pieces.append("".join(draw.choices(draw.choice(_SCRIPTS), k=draw.randint(1, 9))))
            elif kind < 0.6:
                pieces.append(draw.choice(_CODE)[draw.randrange(8) :])
            elif kind < 0.75:
                pieces.append(str(draw.randrange(10 ** draw.randint(1, 12))))
            elif kind < 0.9:
                pieces.append(draw.choice(_WORDS).upper() if draw.random() < 0.3 else draw.choice(_WORDS))
            else:
                pieces.append(draw.choice(("<|im_start|>", "<|im_end|>", "<|endoftext|>", "'s", "'LL", "\n\n", "\r\n", "...")))
            pieces.append(draw.choice(("", "", " ", " ", "  ", "\n", "\t", " \n ", "    ")))
        found.append("".join(pieces))
    return found


def ids_hash(token_ids: Sequence[int]) -> str:
    """Eight hexadecimal digits that stand for these ids."""
    return hashlib.blake2b(",".join(map(str, token_ids)).encode(), digest_size=4).hexdigest()


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
