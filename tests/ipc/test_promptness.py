"""Threads that wait get short slices, threads that compute keep theirs."""

import os
import threading

import pytest
import zmq

from ipc.channel import open_socket
from ipc.promptness import SLICE_NS, prompt_threads, slice_ns


@pytest.fixture(autouse=True)
def kernel_grants_slices() -> None:
    with prompt_threads():
        if slice_ns() != SLICE_NS:
            pytest.skip("this kernel knows no slices per thread")


def threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def test_threads_started_inside_are_prompt_and_the_caller_is_as_before() -> None:
    usual = slice_ns()
    seen: list[int | None] = []
    with prompt_threads():
        inside = threading.Thread(target=lambda: seen.append(slice_ns()))
        inside.start()
    outside = threading.Thread(target=lambda: seen.append(slice_ns()))
    outside.start()
    for thread in (inside, outside):
        thread.join(10)
    assert seen == [SLICE_NS, usual]
    assert slice_ns() == usual != SLICE_NS


def test_the_threads_behind_a_socket_are_prompt() -> None:
    before = threads()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with prompt_threads():
        socket = open_socket(context, zmq.PUSH)
    new = threads() - before
    try:
        assert new and {slice_ns(thread) for thread in new} == {SLICE_NS}
    finally:
        socket.close(0)
        context.term()


def test_another_scheduling_policy_is_left_alone() -> None:
    seen: list[int] = []

    def batch() -> None:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        with prompt_threads():
            seen.append(os.sched_getscheduler(0))
        seen.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=batch)
    thread.start()
    thread.join(10)
    assert seen == [os.SCHED_BATCH, os.SCHED_BATCH]
