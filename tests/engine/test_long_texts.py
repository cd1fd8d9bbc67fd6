"""Does the tokenizing of a long text stop the other threads of its process? (F6)"""

import threading
import time

import pytest

from engine.text.sources import read_text_files
from engine.text.tokenizer import LONG_TEXT, Tokenizer
from ipc.errors import PromptTooLong
from tests.conftest import Checkpoints
from tests.tiny import text_ids


def test_f6_long_texts_leave_other_threads_alone_and_give_the_same_ids(checkpoints: Checkpoints) -> None:
    files = read_text_files(checkpoints.fx_r)
    tokenizer = Tokenizer(files.tokenizer, files.tokenizer_config)
    text = "Grüße an alle " * 20_000
    assert len(text) > LONG_TEXT
    begins = threading.Event()
    ids: list[list[int]] = []

    def encode() -> None:
        begins.set()
        ids.append(tokenizer.encode(text))

    thread = threading.Thread(target=encode)
    thread.start()
    assert begins.wait(10)
    num_turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert ids == [text_ids(text)]
    with pytest.raises(PromptTooLong, match=f"prompt has {len(ids[0])} tokens; the context limit is {len(ids[0])} "):
        tokenizer.encode(text, limit=len(ids[0]))
    assert tokenizer.encode(text, limit=len(ids[0]) + 1) == ids[0]
    assert num_turns > 10, "a lock that is held throughout leaves one turn or two"
