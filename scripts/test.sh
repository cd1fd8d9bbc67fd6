#!/usr/bin/env bash
# Installs Brigade with what its tests need, then runs ruff, mypy and pytest.
# Usage: ./scripts/test.sh [pytest arguments]     e.g. ./scripts/test.sh tests/ipc -x, or ./scripts/test.sh -m slow
# pytest runs twice: first the tests that don't mind company, two at a time, then those marked alone, one by one.
# Uses the active virtual environment, else .venv in the clone. Exit code 0 when all pass.
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

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
color=()
if [ -t 1 ]; then color=(--color=yes); fi

# run_share NAME ARGUMENTS: pytest over one share of the tests; what it prints is also in $logs/NAME. Sets CODE.
run_share() {
    local name=$1
    shift
    say "pytest, $name${*:+: $*}"
    CODE=0
    "$PYTHON" -m pytest --share "$name" ${color[@]+"${color[@]}"} "$@" 2>&1 | tee "$logs/$name" || CODE=${PIPESTATUS[0]}
}

# What failed, and the last line.
sum_up() {
    say "pytest, $1:"
    grep -aE '^[^A-Za-z]*(\[[0-9;]*m)*(FAILED|ERROR) ' "$logs/$1" || true
    tail -n 1 "$logs/$1"
}

# One share may hold none of the tests that were asked for. Ctrl-C, -x and arguments that are wrong end the whole.
NO_TESTS=5
run_share side-by-side -n 2 --dist loadfile --no-loadscope-reorder "$@"
first=$CODE
case $first in 0 | 1 | $NO_TESTS) ;; *) exit "$first" ;; esac
run_share alone "$@"
second=$CODE
sum_up side-by-side
sum_up alone
if [ "$first" -eq $NO_TESTS ]; then exit "$second"; fi
if [ "$second" -eq $NO_TESTS ]; then exit "$first"; fi
exit $((first > second ? first : second))
