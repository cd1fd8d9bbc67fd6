"""One thread: on a busy machine, threads that wait for each other make small tensors a hundred times slower."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.oracle import Oracle


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def path(checkpoints) -> Path:
    return checkpoints.fx_r


@pytest.fixture(scope="session")
def oracle(path) -> Oracle:
    return Oracle.of(path)
