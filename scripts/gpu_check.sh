#!/usr/bin/env bash
# Compares stages on GPUs with stages on the CPU: ids of greedy answers in float32, and figures. Then measures what graphs
# save in decode steps of a random model of Llama 3 8B's shape, which takes 30 GB of the first GPU.
# Usage: ./scripts/gpu_check.sh [MODEL]     MODEL: a folder or a .gguf file; without one the demo model.
# Installs nothing and needs no network when MODEL is given. Uses $PYTHON, else the active environment, else .venv, else python3.
# Exit code 0 when all agree, 1 when something differs or fails, 2 when there is no GPU that torch can use.
set -euo pipefail
clone="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
model=${1:-}
[ -z "$model" ] || model=$(realpath -m -- "$model")
cd "$clone"

if [ -z "${PYTHON:-}" ]; then
    if [ -n "${VIRTUAL_ENV:-}" ]; then PYTHON=$VIRTUAL_ENV/bin/python
    elif [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python
    else PYTHON=python3
    fi
fi
export PYTHONPATH="$clone${PYTHONPATH:+:$PYTHONPATH}"

missing=$("$PYTHON" - <<'PYTHON_END'
from importlib.util import find_spec
print(*(name for name in ("torch", "zmq", "msgpack", "numpy", "click", "tokenizers", "safetensors") if find_spec(name) is None))
PYTHON_END
)
if [ -n "$missing" ]; then
    printf 'gpu_check: %s lacks: %s\n' "$PYTHON" "$missing" >&2
    exit 1
fi
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    printf 'gpu_check: this machine has no GPU that torch can use; nothing was checked\n' >&2
    exit 2
fi
[ -n "$model" ] || model=$("$PYTHON" -m scripts.demo_model)
status=0
"$PYTHON" -m scripts.gpu_check "$model" || status=1
"$PYTHON" -m scripts.gpu_graphs || status=1
exit "$status"
