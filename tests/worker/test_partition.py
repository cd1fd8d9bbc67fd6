"""Does every layer go to exactly one stage, for every split that is possible, and does each other one say why?"""

import pytest

from ipc.errors import ConfigError
from worker.partition import split_layers


@pytest.mark.parametrize("partition", ["even", "auto"])
def test_c2_every_layer_exactly_once_in_order(partition: str) -> None:
    for num_layers in range(1, 40):
        for num_stages in range(1, num_layers + 1):
            stages = split_layers(num_layers, num_stages, partition)
            assert [layer for stage in stages for layer in stage] == list(range(num_layers))
            sizes = [len(stage) for stage in stages]
            assert len(sizes) == num_stages
            assert max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True), "the last stage has the head besides"


def test_by_hand() -> None:
    assert split_layers(5, 2, "3,2") == (range(0, 3), range(3, 5))
    assert split_layers(5, 3, " 1, 3 ,1") == (range(0, 1), range(1, 4), range(4, 5))


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "partition", "why"),
    [
        (5, 2, "5,1", "adds up to 6"),
        (5, 2, "5", "names 1 ranks"),
        (5, 2, "2,2,1", "names 3 ranks"),
        (5, 2, "5,0", "at least one layer"),
        (5, 2, "6,-1", "separated by commas"),
        (5, 2, "", "separated by commas"),
        (5, 2, "3,2,", "separated by commas"),
        (5, 2, "half", "separated by commas"),
        (5, 2, "²,3", "separated by commas"),
        (5, 2, "9999999999,1", "separated by commas"),
        (2, 3, "even", "at least one layer"),
        (2, 3, "1,1,0", "at least one layer"),
        (5, 0, "even", "separated by commas"),
    ],
)
def test_c3_impossible_splits_name_everything(num_layers: int, num_stages: int, partition: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_layers(num_layers, num_stages, partition)
    assert caught.value.field == "--pipeline-partition"
    text = str(caught.value)
    assert f"{num_layers} layers over {num_stages} ranks as {partition!r}" in text
    assert why in text
    assert "\n" not in text
