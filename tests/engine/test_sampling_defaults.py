"""What does a model's generation_config make of parameters that a request leaves unset? (S14)"""

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from engine.sampling_defaults import sampling_defaults
from ipc.params import DrawRules
from tests.engine.test_core import add, running_core


def of(config: Any, mode: str = "auto") -> Any:
    return sampling_defaults(json.dumps(config).encode(), mode)


def test_every_parameter_that_a_model_has_is_a_default() -> None:
    config = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "typical_p": 0.9, "repetition_penalty": 1.05}
    found = of(config | {"do_sample": True, "eos_token_id": [1, 2], "max_new_tokens": 2048, "transformers_version": "4.51"})
    assert found.rules == DrawRules(**config) and found.warnings == ()
    assert found.origin == (
        "sampling defaults from generation_config: temperature=0.6 top_k=20 top_p=0.95 min_p=0.05 typical_p=0.9 "
        "repetition_penalty=1.05; a request's own values win"
    )


@pytest.mark.parametrize("config", [{}, {"eos_token_id": 2}, {"temperature": None, "top_k": None}, [], "x", {"do_sample": True}])
def test_without_any_the_engines_own_stay(config: Any) -> None:
    found = of(config)
    assert (found.rules, found.warnings) == (DrawRules(), ())
    assert found.origin == "sampling defaults: none from generation_config"


def test_the_flag_leaves_all_of_it_aside() -> None:
    found = of({"temperature": 0.6, "top_k": "bad"}, "none")
    assert (found.rules, found.warnings) == (DrawRules(), ())
    assert "--generation-config none" in found.origin


def test_do_sample_false_is_greedy_only_where_it_is_written() -> None:
    assert of({"temperature": 0.6}).rules.temperature == 0.6
    found = of({"do_sample": False, "temperature": 0.6, "top_p": 0.9})
    assert found.rules == DrawRules(temperature=0.0, top_p=0.9) and "temperature=0 top_p=0.9 (do_sample is false)" in found.origin


@pytest.mark.parametrize("field, value, rule", [
    ("temperature", -1, "must be between 0 and 100"), ("temperature", "hot", "must be a number"),
    ("temperature", True, "must be a number"), ("temperature", float("nan"), "must be between 0 and 100"),
    ("top_k", -1, "must be between 0 and"), ("top_k", 2.5, "must be an integer"), ("top_p", 0, "must be above 0"),
    ("min_p", 2, "must be between 0 and 1"), ("typical_p", [0.5], "must be a number"), ("repetition_penalty", 0, "must be above 0"),
    ("do_sample", "no", "must be true or false"),
])
def test_a_bad_value_is_told_and_left_out(field: str, value: Any, rule: str, caplog: pytest.LogCaptureFixture) -> None:
    other = "top_k" if field == "top_p" else "top_p"
    found = of({field: value, other: 1})
    assert found.rules == DrawRules()._replace(**{other: 1})
    (warning,) = found.warnings
    assert warning.startswith(f"generation_config: {field}={value!r}") and rule in warning
    with caplog.at_level(logging.INFO):
        found.log()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_default_reaches_workers_and_clients_and_an_explicit_value_wins(tmp_path: Path) -> None:
    config = json.dumps({"temperature": 0.6, "top_k": 5, "top_p": -1}).encode()
    with running_core(tmp_path, generation_config_file=config) as engine:
        group, client = engine.group(), engine.client()
        info = client.attach()
        expected = DrawRules(temperature=0.6, top_k=5)
        assert info.sampling_defaults == expected._asdict()
        for name, params in (("unset", {}), ("set", {"temperature": 1.0, "top_k": 0}), ("cold", {"temperature": 0.0})):
            client.ask(add(name, [1, 2], **params))
            client.collect(name)
        group.stop()
        seen = {new.request_id: new.params for plan in group.plans for new in plan.new_requests}
        assert [seen[name].draw_rules() for name in ("unset", "set", "cold")] == [
            expected, DrawRules(), expected._replace(temperature=0.0)
        ]
        assert None not in (seen["unset"].temperature, seen["unset"].repetition_penalty), "workers see no gaps"


def drawn_seed(tmp_path: Path, name: str) -> int:
    with running_core(tmp_path / name) as engine:
        group, client = engine.group(), engine.client()
        client.attach()
        client.ask(add("r", [1], seed=None, max_tokens=1))
        output: Any = client.hear()
        group.stop()
        return int(output.seed)


def test_s14_unseeded_is_random_from_start_to_start(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    random.seed(1)
    assert drawn_seed(tmp_path, "a") != drawn_seed(tmp_path, "b")
