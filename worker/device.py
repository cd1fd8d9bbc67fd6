"""Where, with which numbers and with how many threads does this rank compute?"""

import os

import torch

from ipc.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str, local_rank: int) -> torch.device:
    """``auto`` takes a GPU if this host has one, else the CPU. Raises ConfigError for an absent device.

    Ranks beyond the number of GPUs share them in turn.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError("--device", f"{name!r:.80} must be auto, cpu or cuda")
    if name == "cpu":
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not num_gpus:
        if name == "cuda":
            raise ConfigError("--device", "cuda: this machine has no CUDA device that torch can use; use --device cpu")
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % num_gpus)
    torch.cuda.set_device(device)
    return device


def sharing_note(local_rank: int, device: torch.device) -> str:
    """What the log says behind the device's name; empty for a rank that has the device of its number."""
    if device.type != "cuda" or device.index == local_rank:
        return ""
    return f" (shared: local rank {local_rank} has no GPU of its own)"


def device_identity(device: torch.device) -> str:
    """Equal on two ranks of one host exactly if they share the device, whatever number each of them knows it by."""
    if device.type != "cuda":
        return str(device)
    return f"{device.type}:{torch.cuda.get_device_properties(device).uuid}"


def resolve_dtype(name: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """``auto`` takes the checkpoint's. Raises ConfigError for one that is unknown or that the device can't compute."""
    wanted = checkpoint_dtype if name == "auto" else name
    if wanted not in DTYPES:
        raise ConfigError("--dtype", f"{wanted!r:.80} must be auto or one of {', '.join(DTYPES)}")
    if wanted == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError("--dtype", f"bfloat16 is not supported by {torch.cuda.get_device_name(device)}; use float16")
    return DTYPES[wanted]


def choose_num_threads(asked: int | None, ranks_on_host: int) -> int:
    """What was asked for, else this rank's share of the cores that this process may use."""
    return asked or max(1, len(os.sched_getaffinity(0)) // ranks_on_host)
