"""Two sides in turn: are their lines read, their medians compared, and their failures told?"""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from scripts.bench.cases import Case
from scripts.bench.versus import Side, command, compete, parse_lines

PEER = """
import json, pathlib, sys
counter = pathlib.Path(sys.argv[1])
number = len(counter.read_text()) if counter.exists() else 0
counter.write_text("x" * (number + 1))
print("starting up"); print("{}"); print("3")
for (n, prompt, output), rates in {(1, 32, 128): sys.argv[3], (16, 128, 64): sys.argv[4]}.items():
    rate = float(rates.split(",")[number])
    print(json.dumps({"engine": sys.argv[2], "requests": n, "prompt": prompt, "output": output, "seconds": 1.0,
                      "output_tok_s": rate, "total_tok_s": 2 * rate}))
"""


def side(tmp_path: Path, name: str, alone: str, many: str) -> str:
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    return f"{sys.executable} {script} {tmp_path / name} {name} {alone} {many}"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments))


def test_medians_and_ratios_of_two_peers(tmp_path: Path) -> None:
    result = run(
        "--ours", side(tmp_path, "new", "30,50,40", "100,100,400"), "--peer", side(tmp_path, "old", "20,20,80", "80,90,70"),
        "--bar", "1x32:128=2", "--bar", "16x128:64=1.3", "--markdown", str(tmp_path / "table.md"),
        "--json", str(tmp_path / "out.json"), "--check",
    )  # fmt: skip
    assert result.exit_code == 1, result.output
    table = (tmp_path / "table.md").read_text()
    assert table.splitlines()[0] == "| requests x prompt:output | new | old | ratio | by round |"
    assert "| 1x32:128 | 40.0 | 20.0 | 2.00 | 0.50 to 2.50 |" in table
    assert "| 16x128:64 | 100.0 | 80.0 | 1.25 | 1.11 to 5.71 |" in table
    written = json.loads((tmp_path / "out.json").read_text())
    assert [(v["value"], v["holds"]) for v in written["verdicts"]] == [(2.0, True), (1.25, False)]
    assert [len(round_) for round_ in written["sides"]["ours"]["rounds"]] == [2, 2, 2]
    assert {"commit", "cpu", "cores", "command", "date"} <= set(written)


def test_sides_begin_in_turn() -> None:
    order: list[str] = []
    sides = [Side("a", []), Side("b", [])]

    def run_one(one: Side) -> dict[Case, dict[str, object]]:
        order.append(one.name)
        return {Case(1, 2, 3): {"engine": one.name, "output_tok_s": 1.0}}

    compete(sides, 3, run_one)
    assert "".join(order) == "abbaab"


def test_a_case_with_a_bar_that_one_side_lacks_is_below_it(tmp_path: Path) -> None:
    words = ("--ours", side(tmp_path, "a", "9", "9"), "--peer", side(tmp_path, "b", "3", "3"), "--rounds", "1")
    result = run(*words, "--check")
    assert result.exit_code == 1 and "64x128:64 (not run by both)" in result.output


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        ("/nonexistent/peer", "peer can't be started"),
        (f"{sys.executable} -c 'raise SystemExit(\"no model\")'", "no model"),
        (f"{sys.executable} -c 'print(1)'", "peer printed no case"),
        ("'", "can't be split into words"),
    ],
)
def test_a_side_that_fails_is_named_with_its_last_words(peer: str, message: str, tmp_path: Path) -> None:
    result = run("--ours", side(tmp_path, "a", "9", "9"), "--peer", peer, "--rounds", "1")
    assert result.exit_code == 3 and message in result.output


def test_a_side_that_hangs_is_ended(tmp_path: Path) -> None:
    sleeper = f"{sys.executable} -c 'import signal; signal.pause()'"
    result = run("--ours", side(tmp_path, "a", "9", "9"), "--peer", sleeper, "--rounds", "1", "--timeout", "1")
    assert result.exit_code == 3 and "did not end within 1 s" in result.output


def test_wrong_options() -> None:
    assert "--model: is needed" in run("--peer", "x").output
    assert "--bar" in run("--peer", "x", "--ours", "y", "--bar", "1x2:3").output
    assert "--bar" in run("--peer", "x", "--ours", "y", "--bar", "1x2=3").output


def test_lines_without_every_field_are_passed_over() -> None:
    good = {"engine": "e", "requests": 1, "prompt": 2, "output": 3, "seconds": 1, "output_tok_s": 3, "total_tok_s": 5.0}
    broken = [{**good, "requests": "1"}, {key: value for key, value in good.items() if key != "seconds"}, [good]]
    text = "\n".join(["INFO x", *map(json.dumps, [*broken, good])])
    assert parse_lines(text) == {Case(1, 2, 3): good}
