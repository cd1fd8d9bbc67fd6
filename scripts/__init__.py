"""Commands that a person starts. The only place where engine and worker meet; nobody imports it."""

import os
import sys
from pathlib import Path

# ``python -m scripts.…`` looks for modules in the current directory first: a worker.py there would be taken for our folder.
if not sys.flags.safe_path and sys.path and sys.path[0] == os.getcwd() != str(Path(__file__).resolve().parents[1]):
    del sys.path[0]
