"""The other end of a link, as a process of its own: rank 1 receives steps until it has its number of them.

Arguments: JSON with the store's path, the number of steps, and the hop's width, tokens and transport. Says "connected",
then one line per step received: its number, and the least and the greatest value of its tensor.
"""

import json
import sys
import time
from typing import Any

import torch
from torch.distributed import FileStore

from worker.links.gloo import GlooReceiver, connect_group
from worker.links.link import Hop
from worker.links.staged import StagedReceiver
from worker.links.streams import HostStreams
from worker.models import BoundaryTensor

START_S = 120.0
"""Until both are there: on a busy machine loading torch alone takes a minute."""


def wide_hop(rank: int, width: int, num_tokens: int, timeout_s: float) -> Hop:
    boundary = (BoundaryTensor(name="hidden", width=width, dtype=torch.float32),)
    return Hop(boundary=boundary, rank=rank, peer=1 - rank, epoch=4, max_tokens=num_tokens, timeout_s=timeout_s)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(values: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    group = connect_group(FileStore(values["store"], 2), rank=1, world_size=2, host=None, timeout_s=START_S)
    hop = wide_hop(1, values["width"], values["num_tokens"], 30)
    is_staged = values["transport"] == "staged"
    receiver = StagedReceiver(group, hop, HostStreams()) if is_staged else GlooReceiver(group, hop)
    say("connected")
    posted = 0
    for step_id in range(1, values["num_steps"] + 1):
        while receiver.has_room and posted < values["num_steps"]:
            posted += 1
            receiver.post(posted, values["num_tokens"])
        (tensor,) = receiver.wait(step_id)
        say(f"{step_id} {float(tensor.min())} {float(tensor.max())}")
    time.sleep(60)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
