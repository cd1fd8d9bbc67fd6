"""Numbers on their way between host and device. Where both are the CPU nothing is copied and nothing is waited for."""

import torch

from worker.transfer import HostCopy, to_device

CPU = torch.device("cpu")


def test_on_the_cpu_nothing_moves():
    values = torch.arange(5)
    assert to_device(values, CPU).data_ptr() == values.data_ptr()
    assert HostCopy(values).numpy().tolist() == [0, 1, 2, 3, 4]
    assert HostCopy(torch.tensor([True, False])).numpy().tolist() == [True, False]
