"""Writes down every use of pickle in a process that has this folder on its PYTHONPATH.

One JSON line per use in the file that BRIGADE_PICKLE_LOG names: pid, command, function, and the files on the stack.
"""

import _pickle
import json
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any

_LOG = os.environ.get("BRIGADE_PICKLE_LOG")


def _record(what: str) -> None:
    files = [frame.filename for frame in traceback.extract_stack()[:-2]]
    if any(file.startswith("<frozen importlib") for file in files):
        return
    entry = {"pid": os.getpid(), "words": sys.orig_argv, "what": what, "files": files}
    with open(str(_LOG), "a", encoding="utf-8") as log:
        log.write(json.dumps(entry) + "\n")


def _watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        _record(name)
        return function(*args, **kwargs)

    return call


class _Pickler(pickle.Pickler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _record("Pickler")
        super().__init__(*args, **kwargs)


class _Unpickler(pickle.Unpickler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _record("Unpickler")
        super().__init__(*args, **kwargs)


if _LOG is not None:
    for _name in ("loads", "load", "dumps", "dump"):
        for _module in (pickle, _pickle):
            setattr(_module, _name, _watched(_name, getattr(_module, _name)))
    pickle.Pickler, pickle.Unpickler = _Pickler, _Unpickler  # type: ignore[misc]
