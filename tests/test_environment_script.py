"""scripts/environment.sh: what quickstart.sh and test.sh share."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRELUDE = "set -euo pipefail; say() { printf '== %s\\n' \"$*\"; }; source scripts/environment.sh; SIGN_OF_LIFE_S=1; "


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", PRELUDE + script], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_a_silent_command_shows_signs_of_life_and_keeps_its_exit_code() -> None:
    # The command ends when the sign was seen, however long that takes: it reads what `say` writes.
    script = (
        "fifo=$(mktemp -u); mkfifo \"$fifo\"; trap 'rm -f \"$fifo\"' EXIT; "
        'say() { printf "== %s\\n" "$*"; echo seen >"$fifo"; }; '
        "with_sign_of_life packages bash -c 'read -r word <\"$1\"; [ \"$word\" = seen ]; exit 7' - \"$fifo\" || echo \"code $?\""
    )
    done = run(script)
    assert done.returncode == 0, done.stderr
    assert "== packages: still at it after 1 s\n" in done.stdout
    assert done.stdout.endswith("code 7\n")


def test_a_quick_command_shows_none_and_nothing_outlives_it() -> None:
    done = run("with_sign_of_life packages true; echo \"code $?\"; jobs -r")
    assert (done.stdout, done.stderr) == ("code 0\n", "")


def test_signs_of_life_end_with_the_script() -> None:
    script = PRELUDE + "with_sign_of_life packages bash -c 'kill -KILL $PPID'"
    with subprocess.Popen(["bash", "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.wait(60) == -9  # reaped first: a zombie counts as alive
        process.communicate(timeout=60)  # the pipes close only when nobody holds them any more
