# Sourced by quickstart.sh and test.sh: which Python they use, and how Brigade and its demo model get there.
# Expects: bash with `set -euo pipefail`, the current directory at the root of the clone, and a function `say`.

fail() {
    printf 'brigade: %s\n' "$*" >&2
    exit 1
}

# Prints the first Python 3.11 or newer. Each candidate is run: a name on the PATH may be a shim without a Python behind.
find_python() {
    local candidate
    for candidate in python3 python3.11 python3.12 python3.13 python3.14 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    return 1
}

# Sets PYTHON: the activated virtual environment's, or that of .venv in the clone, made when it is missing.
choose_python() {
    local base
    if [ -n "${VIRTUAL_ENV:-}" ]; then
        PYTHON=$VIRTUAL_ENV/bin/python
        "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
            fail "the active environment $VIRTUAL_ENV has no Python 3.11 or newer; deactivate it or activate another"
        say "environment: $VIRTUAL_ENV (active)"
    else
        PYTHON=$PWD/.venv/bin/python
        if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
            base=$(find_python) || fail "no Python 3.11 or newer on the PATH; install one and run this again"
            say "environment: making .venv with $("$base" --version)"
            "$base" -m venv --clear .venv || fail "'$base -m venv' failed; on Debian and Ubuntu install python3-venv"
        else
            say "environment: .venv"
        fi
    fi
    "$PYTHON" -m pip --version >/dev/null 2>&1 ||
        fail "$PYTHON has no pip; run: $PYTHON -m ensurepip"
}

# A package of another project called `kernels` would be imported instead of our folder.
refuse_clash() {
    if "$PYTHON" -c 'import importlib.metadata as m; m.distribution("kernels")' >/dev/null 2>&1; then
        fail "the package 'kernels' in this environment hides our folder of that name;" \
            "run: $PYTHON -m pip uninstall kernels, or use a new environment"
    fi
}

# From a directory without our folders, so that only what is installed counts.
check_imports() {
    (cd / && "$PYTHON" - "$1") <<'PYTHON_END' || fail "after the installation some of our folders are not importable"
import importlib.util
import pathlib
import sys

root = pathlib.Path(sys.argv[1]).resolve()
for name in ("ipc", "kernels", "engine", "worker", "scripts"):
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or pathlib.Path(spec.origin).resolve().parent != root / name:
        sys.exit(f"brigade: 'import {name}' finds {spec and spec.origin}, not {root / name}")
PYTHON_END
}

# Seconds between two signs of life of a silent command.
SIGN_OF_LIFE_S=30

# with_sign_of_life WHAT COMMAND...: runs a command that may be silent for minutes, and says every SIGN_OF_LIFE_S seconds that WHAT goes on.
# Returns the command's exit code.
with_sign_of_life() {
    local what=$1 ticker code=0
    shift
    (
        exec 3<> <(:)  # nothing ever comes: `read` waits without a process that could outlive this one
        seconds=0
        while kill -0 $$ 2>/dev/null; do
            read -r -t 1 -u 3 || true
            seconds=$((seconds + 1))
            [ $((seconds % SIGN_OF_LIFE_S)) -ne 0 ] || say "$what: still at it after $seconds s"
        done
    ) &
    ticker=$!
    "$@" || code=$?
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    return "$code"
}

# install_brigade EXTRAS: installs the clone with EXTRAS ("test" or others of setup.cfg), unless the environment holds just that already.
install_brigade() {
    local extras=$1 stamp wanted
    refuse_clash
    stamp=$("$PYTHON" -c 'import sys; print(sys.prefix)')/brigade-installed
    wanted="$PWD $(cat setup.cfg setup.py pyproject.toml constraints.txt kernels/cpu/src/* | sha256sum | cut -d' ' -f1)"
    if [ -f "$stamp" ] && grep -qxF -e "$wanted [$extras]" -e "$wanted [test]" "$stamp"; then
        say "packages: already installed"
    else
        say "packages: installing Brigade${extras:+ with the extra [$extras]} and what it needs (torch is large, and native kernels are compiled: minutes)"
        rm -f "$stamp"
        with_sign_of_life packages \
            "$PYTHON" -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".${extras:+[$extras]}" </dev/null ||
            fail "the installation failed; pip's own words are above"
        refuse_clash
        printf '%s [%s]\n' "$wanted" "$extras" >"$stamp"
        say "packages: installed"
    fi
    check_imports "$PWD"
}

# Sets BRIGADE_DEMO_MODEL to the path of the demo model, unless the caller's environment names one.
fetch_demo_model() {
    if [ -z "${BRIGADE_DEMO_MODEL:-}" ]; then
        BRIGADE_DEMO_MODEL=$("$PYTHON" -m scripts.demo_model) || fail "the demo model can't be fetched"
    fi
    export BRIGADE_DEMO_MODEL
    say "demo model: $BRIGADE_DEMO_MODEL"
}
