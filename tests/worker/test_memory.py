"""Free memory as a rank sees it, and where, with what and with how many threads it computes."""

import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ipc.errors import ConfigError
from worker.device import choose_num_threads, device_identity, resolve_device, resolve_dtype, sharing_note
from worker.memory import free_host_memory, free_memory, resident_bytes

GB = 1 << 30
MACHINE = {"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {32 << 20} kB\n", "proc/self/statm": "1000 500 0 0 0 0 0\n"}


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in (MACHINE | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "sys/fs/cgroup/"
V1 = "sys/fs/cgroup/memory/"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 32 * GB),
        ({"proc/self/cgroup": "0::/pod/me\n", V2 + "pod/me/memory.max": "max\n"}, 32 * GB),
        (
            {
                "proc/self/cgroup": "0::/pod/me\n",
                V2 + "pod/me/memory.max": "max\n",
                V2 + "pod/me/memory.current": f"{GB}\n",
                V2 + "pod/memory.max": f"{8 * GB}\n",
                V2 + "pod/memory.current": f"{3 * GB}\n",
                V2 + "pod/memory.stat": f"anon 5\ninactive_file {GB}\n",
            },
            6 * GB,
        ),
        (
            {
                "proc/self/cgroup": "0::/pod/me\n",
                V2 + "pod/me/memory.max": f"{2 * GB}\n",
                V2 + "pod/me/memory.current": f"{GB}\n",
                V2 + "pod/memory.max": f"{8 * GB}\n",
                V2 + "pod/memory.current": f"{GB}\n",
            },
            GB,
        ),
        (
            # In a container the own path is often not visible; the mounted root then is the container's cgroup.
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/x\n3:memory:/docker/abc\n",
                V1 + "memory.limit_in_bytes": f"{4 * GB}\n",
                V1 + "memory.usage_in_bytes": f"{3 * GB}\n",
                V1 + "memory.stat": f"total_inactive_file {GB // 2}\n",
            },
            3 * GB // 2,
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                V2 + "memory.max": f"{GB}\n",
                V2 + "memory.current": f"{2 * GB}\n",
            },
            0,
        ),
    ],
)
def test_the_tightest_limit_counts(tmp_path, files, expected):
    assert free_host_memory(machine(tmp_path, files)) == expected


def test_an_address_space_limit_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2 * GB, resource.RLIM_INFINITY))
    assert free_host_memory(machine(tmp_path, {})) == 2 * GB - 1000 * resource.getpagesize()
    assert resident_bytes(tmp_path) == 500 * resource.getpagesize()


def test_this_machine_has_memory():
    assert free_memory(torch.device("cpu")) > 1 << 20
    assert resident_bytes() > 1 << 20


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto", 1) == torch.device("cpu")
    assert resolve_device("cpu", 1) == torch.device("cpu")
    with pytest.raises(ConfigError, match="--device: cuda: this machine has no CUDA device"):
        resolve_device("cuda", 1)
    with pytest.raises(ConfigError, match="'tpu' must be auto, cpu or cuda"):
        resolve_device("tpu", 0)


def test_fewer_gpus_than_ranks(monkeypatch):
    """Ranks share them in turn, and say so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert resolve_device("auto", 1) == torch.device("cuda", 1)
    for name in ("auto", "cuda"):
        assert [resolve_device(name, rank).index for rank in (2, 3, 4)] == [0, 1, 0]
    assert sharing_note(2, torch.device("cuda", 0)) == " (shared: local rank 2 has no GPU of its own)"
    assert sharing_note(1, torch.device("cuda", 1)) == sharing_note(1, torch.device("cpu")) == ""
    assert resolve_device("cpu", 2) == torch.device("cpu")


def test_a_device_is_known_by_what_does_not_depend_on_its_number(monkeypatch):
    """CUDA_VISIBLE_DEVICES may give one GPU different numbers in two ranks."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1f-2e"))
    assert device_identity(torch.device("cuda", 3)) == "cuda:1f-2e"
    assert device_identity(torch.device("cpu")) == "cpu"


def test_dtypes():
    cpu = torch.device("cpu")
    assert resolve_dtype("auto", "bfloat16", cpu) is torch.bfloat16
    assert resolve_dtype("float32", "bfloat16", cpu) is torch.float32
    with pytest.raises(ConfigError, match="--dtype: 'int8' must be auto or one of"):
        resolve_dtype("int8", "bfloat16", cpu)


def test_threads_are_a_share_of_the_cores_unless_they_are_given(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    assert [choose_num_threads(None, n) for n in (1, 2, 4, 7)] == [6, 3, 1, 1]
    assert choose_num_threads(5, 2) == 5
