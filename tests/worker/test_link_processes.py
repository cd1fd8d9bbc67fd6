"""A hop to a process that is stopped, goes on, or dies: what it gets is what was sent, or the loss is named in time."""

import json
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from torch.distributed import FileStore

from ipc.errors import PeerLost
from tests.worker.link_peer import START_S, wide_hop
from worker.links.gloo import GlooSender, connect_group
from worker.links.staged import StagedSender
from worker.links.streams import HostStreams

WIDE = {"width": 1 << 14, "num_tokens": 256}
"""16 MB a message: more than the system's own buffers hold, so that a stopped peer leaves most of it with the sender."""

NARROW = {"width": 8, "num_tokens": 3}

MUCH_LATER_S = 20.0
"""On a busy machine; the other end's own deadline is 30 s."""


@contextmanager
def peer(tmp_path, *, num_steps: int, transport: str = "gloo", **size: int):
    """Rank 1 as a process; yields it, and what makes our end."""
    store = str(tmp_path / "store")
    values = {"store": store, "num_steps": num_steps, "transport": transport, **size}
    command = [sys.executable, "-m", "tests.worker.link_peer", json.dumps(values)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            group = connect_group(FileStore(store, 2), rank=0, world_size=2, host=None, timeout_s=START_S)
            assert process.stdout.readline() == "connected\n"

            def make_sender(timeout_s: float):
                hop = wide_hop(0, size["width"], size["num_tokens"], timeout_s)
                return StagedSender(group, hop, HostStreams()) if transport == "staged" else GlooSender(group, hop)

            yield process, make_sender
        finally:
            process.kill()


@pytest.mark.parametrize("transport", ["gloo", "staged"])
def test_a_peer_that_is_stopped_at_random_gets_every_step_as_it_was(tmp_path, transport):
    """One tensor is used for all steps, as a stage does: what is sent too late, or changed too early, is of two steps."""
    num_steps, generator = 24, random.Random(3)
    with peer(tmp_path, num_steps=num_steps, transport=transport, **WIDE) as (process, make_sender):
        sender = make_sender(30)
        tensor = torch.zeros(WIDE["num_tokens"], WIDE["width"])
        timers = []
        for step_id in range(1, num_steps + 1):
            if generator.random() < 0.4:
                process.send_signal(signal.SIGSTOP)
                timers.append(threading.Timer(generator.uniform(0.005, 0.06), process.send_signal, [signal.SIGCONT]))
                timers[-1].start()
            sender.send(step_id, [tensor.fill_(step_id)])
        for timer in timers:
            timer.join()
        process.send_signal(signal.SIGCONT)
        got = [process.stdout.readline().split() for _ in range(num_steps)]
        sender.flush(30)
        del sender
    assert got == [[str(step_id), f"{step_id}.0", f"{step_id}.0"] for step_id in range(1, num_steps + 1)]
    assert len(timers) > 5


@pytest.mark.parametrize("transport", ["gloo", "staged"])
def test_a_process_that_is_killed_is_noticed_at_once(tmp_path, transport):
    with peer(tmp_path, num_steps=2, transport=transport, **NARROW) as (process, make_sender):
        sender = make_sender(30)
        for step_id in (1, 2):
            sender.send(step_id, [torch.full((3, 8), 0.5)])
            assert process.stdout.readline() == f"{step_id} 0.5 0.5\n"
        sender.send(3, [torch.zeros(3, 8)])
        started = time.monotonic()
        process.kill()
        with pytest.raises(PeerLost, match="rank 0, step 3: sending to rank 1 failed: .*Connection (closed|reset) by peer"):
            sender.flush(30)
        assert time.monotonic() - started < MUCH_LATER_S
        del sender


@pytest.mark.parametrize("transport", ["gloo", "staged"])
def test_a_process_that_is_frozen_is_lost_at_the_deadline(tmp_path, transport):
    with peer(tmp_path, num_steps=2, transport=transport, **NARROW) as (process, make_sender):
        sender = make_sender(0.5)
        process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(PeerLost, match=r"rank 0, step \d: sending to rank 1 failed: Timed out waiting \d+ms"):
            for step_id in range(1, 6):
                sender.send(step_id, [torch.zeros(3, 8)])
        assert time.monotonic() - started < MUCH_LATER_S
        del sender


def test_a_message_longer_than_any_permitted_one_ends_the_receiver(tmp_path):
    """gloo's own protection; the agent then restarts the group. It takes a rank with a larger --max-num-batched-tokens."""
    with peer(tmp_path, num_steps=2, **NARROW) as (process, make_sender):
        sender = make_sender(5)
        sender._hop = wide_hop(0, 8, 64, 5)
        sender._free = [type(sender._free[0])(sender._hop.boundary, 64)]
        sender.send(1, [torch.zeros(64, 8)])
        assert process.wait(10) == -signal.SIGABRT
        del sender
