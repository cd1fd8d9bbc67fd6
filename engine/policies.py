"""Who runs first, who gives way, who may pass, and who has waited too long? Heaps: each operation is O(log n) or less."""

import heapq
from collections.abc import Callable, Iterator
from enum import Enum

from engine.request import Request
from ipc.errors import RequestError

Rank = tuple[int, int]
"""Smaller runs earlier and is preempted later. No two requests have the same."""

MAX_PASSES = 32
"""How many requests may overtake a head of the queue that does not fit; after that nobody passes until it runs.

What a passer needs from prompt to longest answer must fit into blocks that are free now, so that it never costs anyone a
preemption, and with the ones before it is bounded: the head waits for the requests that run already, and for at most
this many small ones.
"""

LOOK_AHEAD = 8
"""Requests behind such a head that one step looks at."""

SPARE_ENTRIES = 64
"""Dead entries that a heap may hold beside as many as there are live ones."""


class SchedulingPolicy(Enum):
    """In which order requests run, and who is preempted first when blocks run out."""

    FCFS = "fcfs"
    """First come, first served; the newest is preempted first."""
    PRIORITY = "priority"
    """The lowest number first, then first come; the highest number is preempted first, of equals the newest.

    A waiting request that does not fit also takes seat and blocks from running ones with a higher number.
    """


def rank_function(policy: SchedulingPolicy) -> Callable[[Request], Rank]:
    """How a policy orders requests. Internal ids grow in the order of arrival."""
    if policy is SchedulingPolicy.PRIORITY:
        return lambda request: (request.priority, request.internal_id)
    return lambda request: (0, request.internal_id)


class WaitingQueue:
    """Requests that hold nothing, in the order in which they shall run."""

    def __init__(self, rank: Callable[[Request], Rank]) -> None:
        self._rank = rank
        self._heap: list[tuple[Rank, int, Request]] = []
        self._entries: dict[int, tuple[int, int]] = {}
        """By internal id: the number of the live heap entry, and the request's tokens when it came."""
        self._num_pushed = 0
        self.num_tokens = 0
        """Of all these requests together, when they came."""
        self.num_squares = 0
        """The squares of the same, for attention."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: Request) -> bool:
        return request.internal_id in self._entries

    def __iter__(self) -> Iterator[Request]:
        """In order. O(n log n): for tests and the end of an epoch."""
        return (request for _, number, request in sorted(self._heap, key=lambda entry: entry[:2]) if self._lives(number, request))

    def push(self, request: Request) -> None:
        self._num_pushed += 1
        num_tokens = request.num_tokens
        self._entries[request.internal_id] = (self._num_pushed, num_tokens)
        self.num_tokens += num_tokens
        self.num_squares += num_tokens * num_tokens
        heapq.heappush(self._heap, (self._rank(request), self._num_pushed, request))

    def discard(self, request: Request) -> None:
        """Take a request out, wherever it stands; nothing happens if it is not in."""
        entry = self._entries.pop(request.internal_id, None)
        if entry is None:
            return
        self.num_tokens -= entry[1]
        self.num_squares -= entry[1] * entry[1]
        if len(self._heap) > 2 * len(self._entries) + SPARE_ENTRIES:
            self._heap = [item for item in self._heap if self._lives(item[1], item[2])]
            heapq.heapify(self._heap)

    def head(self) -> Request | None:
        """The request that shall run next."""
        while self._heap and not self._lives(self._heap[0][1], self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def first(self, count: int) -> list[Request]:
        """The first requests in order, at most this many."""
        taken: list[tuple[Rank, int, Request]] = []
        while len(taken) < count and self.head() is not None:
            taken.append(heapq.heappop(self._heap))
        for entry in taken:
            heapq.heappush(self._heap, entry)
        return [request for _, _, request in taken]

    def _lives(self, number: int, request: Request) -> bool:
        entry = self._entries.get(request.internal_id)
        return entry is not None and entry[0] == number


class RunningSet:
    """Requests that hold a row, by internal id, and which of them gives way first."""

    def __init__(self, rank: Callable[[Request], Rank]) -> None:
        self._rank = rank
        self._requests: dict[int, Request] = {}
        self._heap: list[tuple[int, int, Request]] = []
        """Ranks turned around: the one that gives way first on top. May hold some that have left."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.internal_id in self._requests

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they would be served. O(n log n): for tests and the end of an epoch."""
        return iter(sorted(self._requests.values(), key=self._rank))

    def add(self, request: Request) -> None:
        self._requests[request.internal_id] = request
        self._push(request)

    def remove(self, request: Request) -> None:
        del self._requests[request.internal_id]
        if len(self._heap) > 2 * len(self._requests) + SPARE_ENTRIES:
            self._heap = []
            for other in self._requests.values():
                self._push(other)

    def victim(self) -> Request:
        """The one that gives way first. There must be one."""
        while self._heap[0][2].internal_id not in self._requests:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def ranked_below(self, request: Request, enough: Callable[[list[Request]], bool]) -> list[Request]:
        """The fewest running requests of higher priority number that give ``enough``, first victims first; else none."""
        chosen: list[Request] = []
        seen: set[int] = set()
        popped = []
        found = False
        while self._requests and self._heap and not found:
            entry = heapq.heappop(self._heap)
            victim = entry[2]
            if victim.internal_id not in self._requests or victim.internal_id in seen:
                continue
            seen.add(victim.internal_id)
            popped.append(entry)
            if self._rank(victim)[0] <= self._rank(request)[0]:
                break
            chosen.append(victim)
            found = enough(chosen)
        for entry in popped:
            heapq.heappush(self._heap, entry)
        return chosen if found else []

    def _push(self, request: Request) -> None:
        major, minor = self._rank(request)
        heapq.heappush(self._heap, (-major, -minor, request))


class Deadlines:
    """When do requests with a time limit run out of it?"""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._open: set[int] = set()

    def add(self, request: Request) -> None:
        """Watch a request that has a ``deadline``; any other is ignored."""
        if request.deadline is not None:
            self._open.add(request.internal_id)
            heapq.heappush(self._heap, (request.deadline, request.internal_id, request))

    def discard(self, request: Request) -> None:
        """Watch no longer; nothing happens if the request was not watched."""
        if request.deadline is None:
            return
        self._open.discard(request.internal_id)
        if len(self._heap) > 2 * len(self._open) + SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[1] in self._open]
            heapq.heapify(self._heap)

    def nearest(self) -> float | None:
        """When the next one is due; None without any."""
        while self._heap and self._heap[0][1] not in self._open:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: float) -> list[Request]:
        """Requests whose time is over; they are watched no longer."""
        due = []
        while (deadline := self.nearest()) is not None and deadline <= now:
            request = heapq.heappop(self._heap)[2]
            self._open.discard(request.internal_id)
            due.append(request)
        return due


def check_open_room(num_open: int, num_choices: int, max_num_seqs: int, max_queued_requests: int) -> None:
    """Refuse what would be more open requests than run and may wait; each choice counts as one.

    Raises:
        RequestError: with the numbers.
    """
    most = max_num_seqs + max_queued_requests
    if num_choices > most:
        raise RequestError(
            f"n={num_choices} is more than the {most} requests that may be open at once (--max-num-seqs and "
            "--max-queued-requests)",
            field="n",
        )
    if num_open + num_choices > most:
        raise RequestError(
            f"{num_open} requests are open, --max-queued-requests allows {max_queued_requests} to wait; try again later",
            code="overloaded",
        )


def check_queue_room(num_waiting_tokens: int, num_tokens: int, max_queued_tokens: int) -> None:
    """Refuse what a full queue can't take; an empty one takes any request.

    Raises:
        RequestError: with both numbers.
    """
    if num_waiting_tokens and num_waiting_tokens + num_tokens > max_queued_tokens:
        raise RequestError(
            f"{num_waiting_tokens} prompt tokens wait, with the {num_tokens} of this request more than the "
            f"--max-queued-tokens={max_queued_tokens} that may; try again later",
            code="overloaded",
        )
