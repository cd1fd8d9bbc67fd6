"""A tokenizer of bytes, and grammars over its vocabulary."""

from pathlib import Path

import pytest

from engine.config import ModelFiles
from engine.grammar import Vocabulary
from tests.tiny import EOS, byte_vocabulary, write_tokenizer

VOCAB_SIZE = 290
"""Not a multiple of 32, and more than the tokenizer has names for bytes."""


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, byte_vocabulary(280), merges=[(b"\xfe", b"\xff")], bos="<s>", eos="</s>", pad="<pad>")
    return ModelFiles(
        tokenizer=(folder / "tokenizer.json").read_bytes(), tokenizer_config=(folder / "tokenizer_config.json").read_bytes()
    )


@pytest.fixture(scope="session")
def vocabulary(files: ModelFiles) -> Vocabulary:
    return Vocabulary(files, VOCAB_SIZE, (EOS,))
