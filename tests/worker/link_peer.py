"""The other end of a link, as a process of its own: rank 1 receives steps until it is told otherwise.

Arguments: store path, number of steps to receive. Says "connected", then one line per step received.
"""

import sys
import time

import torch
from torch.distributed import FileStore

from tests.worker.test_links import BOUNDARY, make_receiver
from worker.links.gloo import connect_group


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(store: str, num_steps: int) -> None:
    torch.set_num_threads(1)
    group = connect_group(FileStore(store, 2), rank=1, world_size=2, host=None, timeout_s=30)
    receiver = make_receiver(group, timeout_s=30)
    say("connected")
    for step_id in range(1, num_steps + 1):
        receiver.post(step_id, 3)
        tensors = receiver.wait(step_id)
        say(" ".join(str(value) for value in (step_id, *(float(tensor.sum()) for tensor in tensors))))
    assert len(BOUNDARY) == len(tensors)
    time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
