#!/usr/bin/env bash
# Installs Brigade with what its tests need, then runs ruff, mypy and pytest.
# Usage: ./scripts/test.sh [pytest arguments]     e.g. ./scripts/test.sh tests/ipc -x, or ./scripts/test.sh -m slow
# Uses the active virtual environment, else .venv in the clone. Exit code 0 when all three pass.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '== %s\n' "$*"; }
source scripts/environment.sh

choose_python
install_brigade test
fetch_demo_model

say "ruff: style"
"$PYTHON" -m ruff check .
say "mypy: types"
"$PYTHON" -m mypy
say "pytest${*:+ $*}"
"$PYTHON" -m pytest "$@"
