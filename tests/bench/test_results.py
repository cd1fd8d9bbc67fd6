"""Do the scripts say what they measured, fail below their bars, and take turns?"""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ipc.errors import ConfigError
from scripts.bench import alternate as alternate_module
from scripts.bench import async_sync, ceiling, cohorts, overlap, tracked, versus, workload
from scripts.bench.alternate import Runs
from scripts.bench.cases import Case, Figures
from scripts.bench.results import Verdict, finish, markdown


def figures(rate: float) -> Figures:
    return Figures(seconds=1.0, output_tok_s=rate, total_tok_s=rate, steady_tok_s=rate, client_cpu_share=0.01)


def runs(*rates: float) -> Runs:
    return Runs(figures=[figures(rate) for rate in rates], busy_shares=[[0.9, 0.8]] * len(rates))


@pytest.mark.parametrize("script", [async_sync, ceiling, cohorts, overlap, tracked, versus, workload])
def test_every_script_explains_itself(script: object) -> None:
    result = CliRunner().invoke(script.command, ["--help"])  # type: ignore[attr-defined]
    assert result.exit_code == 0 and "Usage:" in result.output


@pytest.mark.parametrize(("value", "check", "code"), [(0.9, True, 1), (0.9, False, 0), (0.98, True, 0)])
def test_only_a_check_fails_below_a_bar(value: float, check: bool, code: int, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with pytest.raises(SystemExit) as ended:
        finish({"x": 1}, "table", [Verdict(name="ratio", value=value, bar=0.98)], json_path=str(path), check=check)
    assert ended.value.code == code
    written = json.loads(path.read_text())
    assert written["verdicts"] == [{"name": "ratio", "value": value, "bar": 0.98, "holds": value >= 0.98}]
    assert written["x"] == 1 and written["cores"] >= 1 and written["command"] and written["torch"]


def test_a_table_in_markdown() -> None:
    assert markdown(["a", "b"], [[1, 2.34], ["x", "0.98"]]) == "| a | b |\n| --- | --- |\n| 1 | 2.3 |\n| x | 0.98 |"


def test_the_choice_of_cohorts_is_judged_by_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def fake(settings: dict[str, list[str]], cases: list[Case], rounds: int) -> dict[str, dict[Case, Runs]]:
        seen.update(settings)
        rates = {"chosen": (97.0, 300.0, 98.0), "1": (100.0, 100.0, 1.0), "2": (90.0, 90.0, 90.0), "3": (1.0, 1.0, 400.0)}
        return {name: dict.fromkeys(cases, runs(*rates[name])) for name in settings}

    monkeypatch.setattr(cohorts, "alternate", fake)
    result = CliRunner().invoke(cohorts.command, ["M", "--requests", "8", "--check"])
    assert result.exit_code == 0 and "| 8 | 98.0 | 100.0 | 90.0 | 1.0 | 0.980 |" in result.output
    assert seen["3"][-2:] == ["--num-cohorts", "3"] and seen["chosen"] == ["M", "--pp", "2", "--dtype", "bfloat16"]
    assert CliRunner().invoke(cohorts.command, ["M", "--bar", "0.99", "--check"]).exit_code == 1


def test_overlap_is_judged_by_rates_and_by_how_busy_ranks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(settings: dict[str, list[str]], cases: list[Case], rounds: int, **_: object) -> dict[str, dict[Case, Runs]]:
        assert "--single-batch" in settings["one batch"] and "--single-batch" not in settings["batches in flight"]
        return {name: dict.fromkeys(cases, runs(160 if name == "batches in flight" else 100)) for name in settings}

    monkeypatch.setattr(overlap, "alternate", fake)
    result = CliRunner().invoke(overlap.command, ["M", "--check"])
    assert result.exit_code == 0 and result.output.count("ok ") == 6 and "| 1.60 | 90% / 80% |" in result.output


def test_ratios_are_held_against_stored_ones(tmp_path: Path) -> None:
    rows, verdicts = tracked.judge({"m": {"a": 0.81, "b": 0.67, "new": 0.9}}, {"m": {"a": 0.8, "b": 0.8}})
    assert rows == [["m", "a", "0.810", "0.800"], ["m", "b", "0.670", "0.800"], ["m", "new", "0.900", "-"]]
    assert [verdict.holds for verdict in verdicts] == [True, False, False]
    assert tracked.read_floors(tmp_path / "none") == {}
    assert isinstance(tracked.read_floors(tracked.FLOORS), dict)
    for text in ("", "[]", '{"ratios": {"m": 3}}', '{"ratios": {"m": {"a": "x"}}}'):
        (tmp_path / "floors").write_text(text)
        with pytest.raises(ConfigError):
            tracked.read_floors(tmp_path / "floors")


def test_settings_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class FakeEngine:
        def __init__(self, words: list[str]) -> None:
            self.address = words[0]
            log.append(f"start {' '.join(words)}")

        def wait_ready(self) -> None:
            log.append(f"ready {self.address}")

        def partition(self) -> str:
            return "1"

        def ranks(self) -> dict[int, int]:
            return {}

        def stop(self) -> None:
            log.append(f"stop {self.address}")

    class FakeClient:
        def __init__(self, address: str, name: str) -> None:
            self.address = address
            self.model = type("Model", (), {"vocab_size": 300})

        async def __aenter__(self) -> "FakeClient":
            return self

        async def __aexit__(self, *exc_info: object) -> None:
            log.append(f"leave {self.address}")

    async def run_case(client: FakeClient, case: Case, prompts: list[list[int]]) -> Figures:
        log.append(f"{client.address}{prompts[0][0]}")
        return figures(1.0)

    monkeypatch.setattr(alternate_module, "Engine", FakeEngine)
    monkeypatch.setattr(alternate_module, "AsyncTokenClient", FakeClient)
    monkeypatch.setattr(alternate_module, "run_case", run_case)
    results = alternate_module.alternate({"x": ["a"], "y": ["b"]}, [Case(1, 1, 1)], 2)
    assert [len(results[name][Case(1, 1, 1)].figures) for name in ("x", "y")] == [2, 2]
    # The second one gets the split that the first one measured.
    assert log[:4] == ["start a", "ready a", "start b --pipeline-partition 1", "ready b"] and log[-2:] == ["stop b", "stop a"]
    played = log[4:-4]
    assert [entry[0] for entry in played] == list("baabba")
    # The same prompts for all in one round, others in the next.
    assert all(first[1:] == second[1:] for first, second in zip(played[::2], played[1::2], strict=True))
    assert len({entry[1:] for entry in played}) == 3
