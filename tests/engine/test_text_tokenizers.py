"""Are token ids the ones that transformers gives, from GGUF files and from folders, and are other kinds refused?"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from engine.text.chat_template import ChatTemplate
from engine.text.gguf_tokenizer import convert
from engine.text.sources import read_text_files
from engine.text.tokenizer import Tokenizer
from ipc.errors import ConfigError, RequestError
from tests.conftest import GOLDEN, Checkpoints
from tests.text_samples import ids_hash, many_samples, samples

CONTROL, NORMAL, USER, BYTE, UNKNOWN = 3, 1, 4, 6, 2


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((GOLDEN / "smollm2_tokenizer.json").read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> tuple[Tokenizer, ChatTemplate]:
    files = read_text_files(str(demo_model))
    tokenizer = Tokenizer(files.tokenizer, files.tokenizer_config)
    return tokenizer, ChatTemplate(files.chat_template, tokenizer.special_tokens)


@cache
def reader(path: Path) -> Any:
    """transformers' tokenizer of a GGUF file."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


# ------------------------------------------------------------------------------------------------- the demo model


def test_ids_of_varied_texts_equal_transformers(demo: tuple[Tokenizer, ChatTemplate], stored: dict[str, Any]) -> None:
    assert len(stored["texts"]) >= 300
    assert [row["text"] for row in stored["texts"]] == samples()
    for row in stored["texts"]:
        assert demo[0].encode(row["text"]) == row["token_ids"], row["text"]


def test_ids_of_2000_texts_equal_transformers_by_their_hashes(demo: tuple[Tokenizer, ChatTemplate]) -> None:
    stored = json.loads((GOLDEN / "smollm2_tokenizer_hashes.json").read_text(encoding="utf-8"))["hashes"]
    texts = many_samples()
    assert len(set(texts)) > 1950 and len(texts) == len(stored) == 2000
    wrong = [text for text, known in zip(texts, stored, strict=True) if ids_hash(demo[0].encode(text)) != known]
    assert wrong == []
    for text in texts:
        assert demo[0].decode(demo[0].encode(text), skip_special_tokens=False) == text


@pytest.mark.slow
def test_ids_of_2000_texts_equal_transformers_itself(demo: tuple[Tokenizer, ChatTemplate], demo_model: Path) -> None:
    theirs = reader(demo_model)
    for text in many_samples():
        assert demo[0].encode(text) == theirs(text)["input_ids"], text


def test_texts_come_back_from_their_ids(demo: tuple[Tokenizer, ChatTemplate], stored: dict[str, Any]) -> None:
    for row in stored["texts"]:
        assert demo[0].decode(row["token_ids"], skip_special_tokens=False) == row["text"]
        assert b"".join(map(demo[0].token_bytes, row["token_ids"])) == row["text"].encode()


def test_c17_chats_are_tokenized_as_transformers_does(demo: tuple[Tokenizer, ChatTemplate], stored: dict[str, Any]) -> None:
    tokenizer, template = demo
    for row in stored["chats"]:
        text = template.render(row["conversation"], add_generation_prompt=row["add_generation_prompt"])
        assert tokenizer.encode(text, add_special_tokens=False) == row["token_ids"]


def test_special_tokens_of_the_demo_model(demo: tuple[Tokenizer, ChatTemplate]) -> None:
    assert demo[0].special_ids == frozenset(range(17))
    assert demo[0].special_tokens["eos_token"] == "<|im_end|>"
    assert demo[0].decode([1, 19556, 2]) == "Hello"


# --------------------------------------------------------------------------------------------- other GGUF files


def write_gguf(path: Path, tokens: list[str], types: list[int], *, kind: str = "gpt2", **entries: Any) -> Path:
    """A file with a tokenizer and no tensors. ``entries`` are keys below tokenizer.ggml; None leaves one out."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {"block_count": 1, "embedding_length": 8, "feed_forward_length": 8, "context_length": 64}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    adders: dict[type, Callable[[str, Any], None]] = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
    for key, value in entries.items():
        if value is not None:
            adders[type(value)](f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@cache
def byte_level_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges of a small byte-level BPE learned from the golden text."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.train_from_iterator(
        [(GOLDEN / "text.txt").read_text(encoding="utf-8"), "a1 12 123 1234 ''' \n\n \r\n !? !!", *samples()],
        trainers.BpeTrainer(vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    model = json.loads(backend.to_str())["model"]
    return list(model["vocab"]), [" ".join(merge) for merge in model["merges"]]


def byte_level_file(path: Path, **entries: Any) -> Path:
    tokens, merges = byte_level_vocabulary()
    # transformers would invent "<|endoftext|>", at an id that the model does not have.
    tokens = ["<s>", "<|endoftext|>", "<think>", *tokens]
    types = [CONTROL, CONTROL, USER, *([NORMAL] * (len(tokens) - 3))]
    base = {"merges": merges, "bos_token_id": 0, "eos_token_id": 1}
    return write_gguf(path, tokens, types, **base | entries)


def tokenizer_of(path: Path) -> Tokenizer:
    files = read_text_files(str(path))
    return Tokenizer(files.tokenizer, files.tokenizer_config)


@pytest.mark.parametrize(
    ("pre", "adds_bos"),
    [("default", None), ("gpt-2", False), ("llama-bpe", True), ("smollm", True), ("qwen2", None), ("tekken", True)],
)
def test_byte_level_kinds_equal_transformers(tmp_path: Path, pre: str, adds_bos: bool | None) -> None:
    path = byte_level_file(tmp_path / "m.gguf", pre=pre, add_bos_token=adds_bos)
    ours, theirs = tokenizer_of(path), reader(path)
    for text in (*samples(150), "<s>a<|endoftext|> <think>b</think> <think>"):
        assert ours.encode(text) == theirs(text)["input_ids"], text
    assert ours.encode("x")[0] == 0 or not adds_bos
    assert ours.special_ids == {0, 1}
    assert ours.decode(ours.encode("a<think>b")) == "a<think>b"


@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("qwen2", False), ("gpt-2", False)])
def test_bos_when_the_file_says_nothing(tmp_path: Path, pre: str, adds: bool) -> None:
    ids = tokenizer_of(byte_level_file(tmp_path / "m.gguf", pre=pre)).encode("x")
    assert (ids[0] == 0) is adds


def test_eos_is_added_when_the_file_says_so(tmp_path: Path) -> None:
    ids = tokenizer_of(byte_level_file(tmp_path / "m.gguf", pre="gpt-2", add_eos_token=True, add_bos_token=True)).encode("x")
    assert (ids[0], ids[-1], len(ids)) == (0, 1, 3)


def sentencepiece_file(path: Path, **entries: Any) -> Path:
    words = ["the", "▁the", "▁a", "an", "▁an", "in", "▁in", "ing", "er", "re", "on", "▁w", "▁we", "or", "ord", "▁word", "▁▁", "▁▁▁▁"]
    letters = [*"▁abcdefghijklmnopqrstuvwxyzABC.,é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    types = [UNKNOWN, CONTROL, CONTROL, *([BYTE] * 256), *([NORMAL] * (len(words) + len(letters)))]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))] + [-1000.0 - i for i in range(len(letters))]
    base = {"scores": scores, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return write_gguf(path, tokens, types, kind="llama", **base | entries)


def test_sentencepiece_equals_transformers(tmp_path: Path) -> None:
    path = sentencepiece_file(tmp_path / "m.gguf")
    ours, theirs = tokenizer_of(path), reader(path)
    for text in (*samples(200), "the word in an error", "  we  are", "a</s>b <s> c", "日本"):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    assert ours.encode("")[:1] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("pre", ["default", "gpt-2", "llama-bpe", "smollm", "qwen2", "tekken", "sentencepiece"])
def test_2000_texts_in_every_kind_equal_transformers(tmp_path: Path, pre: str) -> None:
    path = tmp_path / "m.gguf"
    path = sentencepiece_file(path) if pre == "sentencepiece" else byte_level_file(path, pre=pre, add_bos_token=True)
    ours, theirs = tokenizer_of(path), reader(path)
    for text in many_samples():
        assert ours.encode(text) == theirs(text)["input_ids"], text


def test_sentencepiece_without_a_space_in_front(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(sentencepiece_file(tmp_path / "m.gguf", add_space_prefix=False, add_bos_token=False))
    assert tokenizer.decode(tokenizer.encode("the")) == "the"
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"
    assert tokenizer.encode("the") != tokenizer.encode(" the")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: byte_level_file(path, kind="bert"), "tokenizer.ggml.model='bert' is not supported.*'gpt2'.*'llama'"),
        (lambda path: byte_level_file(path, pre="viking"), "tokenizer.ggml.pre='viking' is not supported.*qwen2"),
        (lambda path: byte_level_file(path, merges=None), "tokenizer.ggml.merges is missing"),
        (lambda path: byte_level_file(path, eos_token_id=4000), "eos_token_id=4000 is not below"),
        (lambda path: sentencepiece_file(path, scores=[1.0]), "one score for each"),
        (lambda path: path.write_bytes(b"") and path, "can't be read as a GGUF file|ends in the middle|neither"),
        (lambda path: path.write_bytes(b"PK\3\4" * 9) and path, "not a GGUF file"),
        (lambda path: path.write_bytes(b"GGUF\0\0\0\3" + bytes(40)) and path, "GGUF version"),
        (lambda path: path.write_bytes(b"GGUF\3\0\0\0" + bytes(8) + b"\xff" * 8) and path, "ends in the middle"),
    ],
)
def test_what_can_not_be_used_is_refused(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    path = tmp_path / "m.gguf"
    make(path)
    with pytest.raises(ConfigError, match=message):
        read_text_files(str(path))


def test_a_cut_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    whole = byte_level_file(tmp_path / "whole.gguf", pre="gpt-2").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (1, 4, 9, 23, 24, 30, 100, len(whole) // 2, len(whole) - 1):
        cut.write_bytes(whole[:size])
        with pytest.raises(ConfigError):
            convert(cut)


# -------------------------------------------------------------------------------------------------------- folders


def folder_with(path: Path, **files: Any) -> str:
    path.mkdir()
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return str(path)


def small_backend(*, bos: bool) -> Backend:
    letters = {"<s>": 0, "</s>": 1, "<pad>": 2, "\u0120": 3} | {c: 4 + i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz")}
    backend = Backend(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


@pytest.mark.parametrize("bos", [True, False])
def test_a_folder_adds_what_its_tokenizer_json_says(tmp_path: Path, bos: bool) -> None:
    """The rule of tokenizer(text) in transformers; add_bos_token of the configuration does not count there."""
    import transformers

    backend = small_backend(bos=bos)
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "add_bos_token": not bos}
    folder = folder_with(tmp_path / "m", tokenizer__json=backend.to_str(), tokenizer_config__json=config)
    files = read_text_files(folder)
    ours = Tokenizer(files.tokenizer, files.tokenizer_config)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("ab c", "", "<s>a</s>"):
        assert ours.encode(text) == theirs(text, truncation=False, padding=False)["input_ids"]
    assert ours.encode("ab")[0] == (0 if bos else 4)
    assert ours.special_ids == {0, 1}
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_the_folders_of_our_fixtures(checkpoints: Checkpoints) -> None:
    files, from_gguf = read_text_files(str(checkpoints.fx_r)), read_text_files(str(checkpoints.fx_r_gguf))
    folder, converted = Tokenizer(files.tokenizer, files.tokenizer_config), Tokenizer(from_gguf.tokenizer, from_gguf.tokenizer_config)
    for text in samples(120):
        assert folder.encode(text) == converted.encode(text)


@pytest.mark.parametrize("other", ["tokenizer.model", "vocab.json", "tekken.json"])
def test_other_forms_of_tokenizer_are_refused_with_the_remedy(tmp_path: Path, other: str) -> None:
    folder = folder_with(tmp_path / "m", **{other.replace(".", "__"): "x"})
    with pytest.raises(ConfigError, match=f"{other} only, which is not supported.*save_pretrained"):
        read_text_files(folder)


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a folder nor a file"):
        read_text_files(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="tokenizer_config.json is not JSON"):
        read_text_files(folder_with(tmp_path / "a", tokenizer_config__json="{"))
    with pytest.raises(ConfigError, match="must hold a JSON object, holds list"):
        read_text_files(folder_with(tmp_path / "b", generation_config__json=[1]))
    with pytest.raises(ConfigError, match="tokenizer: can't be read"):
        Tokenizer(b'{"model": 1}')


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "{", '{"model": {"type": "BPE", "vocab": {"a": 0}}}', '{"model": 1}', "[" * 100_000]
)
def test_a_tokenizer_that_can_not_be_loaded_is_refused_at_once(tmp_path: Path, content: str) -> None:
    folder = folder_with(tmp_path / "m", tokenizer__json=content)
    with pytest.raises(ConfigError, match="^MODEL: .*") as caught:
        read_text_files(folder)
    assert str(tmp_path / "m" / "tokenizer.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 900 + "1" + "}" * 900, '{"a": "\\ud800"}'])
def test_json_that_can_not_be_passed_on_names_its_file(tmp_path: Path, name: str, content: str) -> None:
    folder = folder_with(tmp_path / "m", **{name.replace(".", "__"): content})
    try:
        read_text_files(folder)
    except ConfigError as error:
        assert ".json " in str(error)
    else:
        assert "ud800" not in content and len(content) < 100_000


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path / "m", tokenizer__json="{}")

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match="cannot read .*tokenizer.json: Permission denied"):
        read_text_files(folder)


def test_a_folder_without_a_tokenizer_speaks_ids_only(tmp_path: Path) -> None:
    assert read_text_files(folder_with(tmp_path / "m", config__json={})).tokenizer == b""


def test_the_chat_template_is_found_in_its_three_places(tmp_path: Path) -> None:
    in_config = {"chat_template": "from config"}
    assert read_text_files(folder_with(tmp_path / "a", tokenizer_config__json=in_config)).chat_template == "from config"
    named = {"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "from list"}]}
    assert read_text_files(folder_with(tmp_path / "b", tokenizer_config__json=named)).chat_template == "from list"
    both = folder_with(tmp_path / "c", tokenizer_config__json=in_config, chat_template__jinja="from file")
    assert read_text_files(both).chat_template == "from file"
    assert read_text_files(folder_with(tmp_path / "d")).chat_template is None


def test_text_that_is_not_unicode_is_the_requests_fault() -> None:
    with pytest.raises(RequestError, match="prompt can't be encoded") as caught:
        Tokenizer(small_backend(bos=False).to_str().encode()).encode("a\ud800b")
    assert caught.value.field == "prompt"
