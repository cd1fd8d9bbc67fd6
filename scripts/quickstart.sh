#!/usr/bin/env bash
# Installs Brigade, fetches the demo model, starts two stages, asks one question, checks the answer, shuts down.
# Usage: ./scripts/quickstart.sh        (from any directory; uses the active virtual environment, else .venv in the clone)
# Exit code 0 when the answer is the known one and everything ended clean; otherwise 1 and a line that says why.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '== %s\n' "$*"; }
source scripts/environment.sh

PROMPT="The three primary colors are"
MAX_TOKENS=39
SECONDS_TO_START=300

choose_python
install_brigade http,ui,structured
fetch_demo_model

work=$(mktemp -d)
server=
clean_up() {
    if [ -n "$server" ] && kill -TERM "$server" 2>/dev/null; then
        wait "$server" || true
    fi
    rm -rf "$work"
}
trap clean_up EXIT
trap 'say "interrupted"; exit 130' INT
trap 'exit 143' TERM

flags=(--pp 2 --dtype float32 --kv-cache-memory 256M)
say "server: brigade serve ${BRIGADE_DEMO_MODEL##*/} ${flags[*]}"
: >"$work/log"
# In a session of its own: a Ctrl-C ends this script, which then asks the server once, not twice, to stop.
setsid "$PYTHON" -m scripts.cli serve "$BRIGADE_DEMO_MODEL" "${flags[@]}" </dev/null >"$work/log" 2>&1 &
server=$!

address=
deadline=$((SECONDS + SECONDS_TO_START))
while [ $SECONDS -lt $deadline ] && IFS= read -r -t $((deadline - SECONDS)) line; do
    printf '   %s\n' "$line"
    if [[ $line =~ ^brigade\ ready:.*\ listen=([^ ,]+) ]]; then
        address=${BASH_REMATCH[1]}
        break
    fi
done < <(tail -n +1 -f --pid="$server" "$work/log")
if [ -z "$address" ]; then
    cat "$work/log" >&2
    kill -0 "$server" 2>/dev/null || fail "the server ended before it was ready; its output is above"
    fail "the server was not ready within $SECONDS_TO_START s; its output is above"
fi

say "prompt: $PROMPT"
"$PYTHON" -m scripts.cli generate --connect "$address" --temperature 0 --max-tokens "$MAX_TOKENS" "$PROMPT" \
    >"$work/answer" || fail "the request failed"
say "answer:"
cat "$work/answer"
cmp -s "$work/answer" scripts/quickstart_answer.txt ||
    fail "this is not the known answer (scripts/quickstart_answer.txt): $(cat scripts/quickstart_answer.txt)"
say "the answer is the known one"

say "server: shutting down"
kill -TERM "$server"
code=0
wait "$server" || code=$?
server=
if [ "$code" -ne 0 ]; then
    tail -n 20 "$work/log" >&2
    fail "the server ended with code $code instead of 0; the end of its output is above"
fi
say "done; to go on: brigade serve $BRIGADE_DEMO_MODEL --pp 2 --dtype float32"
