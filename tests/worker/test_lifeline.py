"""Ranks end with their parent; time and progress are told truthfully."""

import io
import os
import signal
import subprocess
import sys

import psutil
import pytest

from worker.lifeline import watch_process
from worker.progress import Progress
from worker.topology import Topology

CHILD = """
import os, time
from ipc.parent import die_with_parent
print(die_with_parent(os.getppid()), os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_a_process_ends_when_its_parent_is_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        is_parent, pid = parent.stdout.readline().split()
        child = psutil.Process(int(pid))
        parent.send_signal(signal.SIGKILL)
        assert is_parent == "True"
        psutil.wait_procs([child], timeout=5)
        assert not child.is_running()


def test_a_parent_that_is_gone_already_is_noticed():
    code = "from ipc.parent import die_with_parent; import sys; sys.exit(die_with_parent(1))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_process_can_be_watched():
    with subprocess.Popen(["sleep", "60"]) as process:
        descriptor = watch_process(process.pid)
        assert descriptor is not None
        os.close(descriptor)
        process.kill()
    assert watch_process(process.pid) is None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_drawn_on_a_terminal_only():
    terminal, file = Terminal(), io.StringIO()
    for stream, draws in ((terminal, True), (file, True)):
        bar = Progress("loading", draws=draws, stream=stream)
        for done in (1, 2, 4):
            bar(done, 4)
    assert terminal.getvalue().endswith(f"\rloading [{'#' * 30}] 4/4\n")
    assert file.getvalue() == ""


@pytest.mark.parametrize(
    ("rank", "num_stages", "expected"),
    [(0, 1, (True, True, None, None)), (0, 3, (True, False, None, 1)), (1, 3, (False, False, 0, 2)), (2, 3, (False, True, 1, None))],
)
def test_neighbours(rank, num_stages, expected):
    place = Topology(rank=rank, num_stages=num_stages)
    assert (place.is_first, place.is_last, place.previous_rank, place.next_rank) == expected
