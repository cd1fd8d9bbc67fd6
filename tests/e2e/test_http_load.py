"""Does the server answer at once while others keep it busy? (F6)"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.conftest import Checkpoints
from tests.e2e.harness import EnginePool
from tests.e2e.test_http_cases import url_of

pytestmark = pytest.mark.e2e

MEGABYTE = "word " * 200_000

FLAGS = ("--http", "127.0.0.1:0", "--dtype", "float32", "--num-kv-blocks", "1024", "--max-num-seqs", "64")
"""Room for all streams at once: one that is preempted has a gap that is not the server's."""


@pytest.mark.parametrize(
    ("num_posts", "num_streams", "longest_gap_s"),
    [(3, 10, 60.0), pytest.param(20, 50, 1.0, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_f6_health_answers_while_megabytes_are_tokenized(
    engines: EnginePool, checkpoints: Checkpoints, num_posts: int, num_streams: int, longest_gap_s: float
) -> None:
    url = url_of(engines.get(checkpoints.fx_r, flags=FLAGS))
    is_over = threading.Event()

    def post() -> int:
        return httpx.post(f"{url}/v1/completions", json={"prompt": MEGABYTE}, timeout=600).status_code

    def read(number: int) -> float:
        """The longest time between two events."""
        longest = 0.0
        while not is_over.is_set():
            body = {"prompt": [5, number + 5], "max_tokens": 200, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as response:
                last = None
                for _ in response.iter_lines():
                    now = time.monotonic()
                    longest = max(longest, now - (last or now))
                    last = now
                    if is_over.is_set():
                        break
        return longest

    times = []
    with ThreadPoolExecutor(num_posts + num_streams) as pool, httpx.Client(base_url=url, timeout=60) as http:
        streams = [pool.submit(read, number) for number in range(num_streams)]
        posts = [pool.submit(post) for _ in range(num_posts)]
        while not all(one.done() for one in posts):
            began = time.monotonic()
            assert http.get("/health").status_code == 200
            times.append(time.monotonic() - began)
        is_over.set()
        assert {one.result() for one in posts} == {400}, "the text is longer than the context"
        assert max(one.result() for one in streams) < longest_gap_s
    times.sort()
    assert len(times) > 10 and times[int(0.99 * len(times))] < 0.5, times[-5:]
