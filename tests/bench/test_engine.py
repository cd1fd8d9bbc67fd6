"""Does a benchmark start its engine as a person would, from the folder that it is in?"""

from pathlib import Path

import pytest

from ipc.errors import PeerLost
from scripts.bench.engine import Engine


@pytest.mark.e2e
def test_a_models_path_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.txt").write_text("not a model")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PeerLost, match=r"model\.txt is not a folder"), Engine(["model.txt"]):
        pass
