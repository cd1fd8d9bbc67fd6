"""Did something fail because the system has no more open files or threads to give?"""

import errno

from ipc.errors import ConfigError

_MORE_FILES = "raise the limit of open files (`ulimit -n`)"
_MORE_THREADS = "raise the limit of threads (`ulimit -u`, or the container's limit of processes)"
_REMEDIES = {
    "Too many open files": _MORE_FILES,
    "can't start new thread": _MORE_THREADS,
    "Resource temporarily unavailable": _MORE_THREADS,
}
"""By the words of Python and of the C++ libraries, which tell no number."""


def shortage(error: Exception) -> ConfigError | None:
    """The error to raise instead, since a new start would meet the same limit; None if it failed for another reason."""
    text = (str(error).splitlines() or [""])[0]
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
        text = "Too many open files"
    for words, remedy in _REMEDIES.items():
        if words in text:
            return ConfigError("start", f"{text:.200}; {remedy}, or use fewer ranks on this host")
    return None
