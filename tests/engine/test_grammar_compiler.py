"""Do requests come back from the compiling thread once each: ready, refused, or too late?"""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import zmq

from engine.grammar_compiler import MAX_CACHED, MAX_PENDING_BYTES, TIME_LIMIT_S, GrammarCompiler
from engine.request import AnswerGrammar, Request
from ipc.errors import RequestError
from ipc.params import SamplingParams
from ipc.structured import MAX_GRAMMAR_BYTES, StructuredOutput
from tests.fakes import FakeClock, FakeGrammar

DEADLINE_MS = 60_000


class FakeCompiler:
    """``regex`` "bad" is refused, "broken" fails, and "slow" waits for ``go_on``."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.go_on = threading.Event()
        self.is_busy = threading.Event()

    def compile(self, structured: StructuredOutput) -> FakeGrammar:
        assert structured.regex is not None
        self.compiled.append(structured.regex)
        if structured.regex == "bad":
            raise RequestError("bad is not a word", field="structured.regex")
        if structured.regex == "broken":
            raise KeyError("oops")
        if structured.regex == "slow":
            self.is_busy.set()
            assert self.go_on.wait(DEADLINE_MS / 1000)
        return FakeGrammar(6)


class Bench:
    def __init__(self, load: Callable[[], FakeCompiler] | None = None) -> None:
        self.compiler = FakeCompiler()
        self.clock = FakeClock()
        self.thread_of_load = 0
        self.num_requests = 0
        self.grammars = GrammarCompiler(load or self._load, clock=self.clock)

    def _load(self) -> FakeCompiler:
        assert not self.thread_of_load
        self.thread_of_load = threading.get_ident()
        return self.compiler

    def submit(self, regex: str, outputs: list[int] | None = None) -> Request:
        self.num_requests += 1
        request = Request(
            request_id="r", internal_id=self.num_requests, client=b"c", prompt_token_ids=[1], params=SamplingParams(seed=1),
            output_token_ids=outputs or [],
        )  # fmt: skip
        self.grammars.submit(request, StructuredOutput(regex=regex))
        return request

    def wait(self, num_done: int = 1) -> list[tuple[Request, AnswerGrammar | RequestError]]:
        """As the core's loop waits: for the descriptor, among others."""
        poller = zmq.Poller()
        poller.register(self.grammars.fd, zmq.POLLIN)
        done: list[tuple[Request, AnswerGrammar | RequestError]] = []
        while len(done) < num_done:
            assert poller.poll(DEADLINE_MS), f"only {len(done)} of {num_done} came back"
            done += self.grammars.take_done()
        return done


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.compiler.go_on.set()


def test_nothing_is_loaded_before_the_first_grammar_and_then_in_another_thread(bench: Bench) -> None:
    assert bench.grammars.take_done() == [] and bench.grammars.deadline() is None and not bench.thread_of_load
    requests = [bench.submit("a"), bench.submit("b")]
    done = bench.wait(2)
    assert [request for request, _ in done] == requests and all(isinstance(g, FakeGrammar) for _, g in done)
    assert bench.thread_of_load not in (0, threading.get_ident())
    assert bench.grammars.deadline() is None and bench.grammars.take_done() == []


def test_equal_forms_are_compiled_once_and_each_request_gets_its_own(bench: Bench) -> None:
    for regex in ("a", "b", "a"):
        bench.submit(regex)
    grammars = [grammar for _, grammar in bench.wait(3)]
    assert bench.compiler.compiled == ["a", "b"] and len({id(grammar) for grammar in grammars}) == 3


def test_the_forms_used_longest_ago_are_forgotten(bench: Bench) -> None:
    for regex in ("first", *map(str, range(MAX_CACHED - 1)), "first", "more", "first", "0"):
        bench.submit(regex)
    bench.wait(MAX_CACHED + 4)
    assert bench.compiler.compiled == ["first", *map(str, range(MAX_CACHED - 1)), "more", "0"]


def test_what_can_not_be_compiled_comes_back_with_its_error_and_others_go_on(bench: Bench) -> None:
    for regex in ("bad", "broken", "a"):
        bench.submit(regex)
    (_, bad), (_, broken), (_, good) = bench.wait(3)
    assert isinstance(bad, RequestError) and (bad.field, bad.reason) == ("structured.regex", "bad is not a word")
    assert isinstance(broken, RequestError) and broken.code == "internal" and "KeyError" in broken.reason
    assert isinstance(good, FakeGrammar)


def test_a_missing_library_is_every_requests_error() -> None:
    def load() -> FakeCompiler:
        raise RequestError("needs llguidance", field="structured")

    bench = Bench(load)
    bench.submit("a")
    bench.submit("b")
    assert [str(outcome) for _, outcome in bench.wait(2)] == ["needs llguidance"] * 2


def test_an_answer_that_was_begun_elsewhere_is_followed_again(bench: Bench) -> None:
    begun = FakeGrammar(6)
    for _ in range(3):
        begun.accept(begun.allowed()[0])
    bench.submit("a", outputs=begun.accepted)
    bench.submit("a", outputs=[*begun.accepted, 499])
    (_, good), (_, bad) = bench.wait(2)
    assert isinstance(good, FakeGrammar) and good.accepted == begun.accepted
    assert isinstance(bad, RequestError) and bad.field == "output_token_ids"


def test_a_request_that_waits_too_long_is_refused_and_its_grammar_is_dropped(bench: Bench) -> None:
    slow, behind = bench.submit("slow"), bench.submit("a")
    assert bench.compiler.is_busy.wait(10)
    assert bench.grammars.deadline() == bench.clock.now + TIME_LIMIT_S
    bench.clock.advance(TIME_LIMIT_S - 1)
    assert bench.grammars.take_done() == []
    late = bench.submit("b")
    bench.clock.advance(1)
    refused = bench.grammars.take_done()
    assert [request for request, _ in refused] == [slow, behind]
    assert all("was not compiled within 30 s" in str(error) and error.field == "structured.regex" for _, error in refused)
    bench.compiler.go_on.set()
    ((request, grammar),) = bench.wait(1)
    assert request is late and isinstance(grammar, FakeGrammar)
    assert bench.compiler.compiled == ["slow", "b"], "what nobody waits for is not compiled"


def test_a_cancelled_request_does_not_come_back(bench: Bench) -> None:
    slow, other = bench.submit("slow"), bench.submit("a")
    assert bench.compiler.is_busy.wait(10)
    assert bench.grammars.num_pending_tokens == 2
    assert bench.grammars.cancel(slow) and not bench.grammars.cancel(slow)
    assert bench.grammars.num_pending_tokens == 1
    bench.compiler.go_on.set()
    assert [request for request, _ in bench.wait(1)] == [other]
    assert bench.grammars.num_pending_tokens == 0
    assert not bench.grammars.cancel(other)


def test_too_many_forms_at_once_are_refused(bench: Bench) -> None:
    first = bench.submit("slow")
    assert bench.compiler.is_busy.wait(10)
    large = "x" * MAX_GRAMMAR_BYTES
    requests = [bench.submit(large) for _ in range(MAX_PENDING_BYTES // MAX_GRAMMAR_BYTES - 1)]
    with pytest.raises(RequestError, match="try again later") as caught:
        bench.submit(large)
    assert caught.value.code == "overloaded"
    for request in [first, *requests]:
        assert bench.grammars.cancel(request)
    bench.submit(large)


DEEP_GRAMMAR = """
import sys, zmq
from llguidance import LLMatcher, LLTokenizer
from engine.grammar_compiler import GrammarCompiler
from engine.request import ClientId, Request
from ipc.params import SamplingParams
from ipc.structured import StructuredOutput

class Compiler:
    def compile(self, structured):
        LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(structured.grammar), log_level=0)
        return self

    def copy(self, params):
        return self

text = "start: r0\\n" + "".join(f"r{i}: r{i + 1}\\n" for i in range(4500)) + 'r4500: "a"\\n'
form = StructuredOutput(grammar=text)
grammars = GrammarCompiler(Compiler)
grammars.submit(
    Request(request_id="r", internal_id=1, client=ClientId(0, b"c"), prompt_token_ids=[1], params=SamplingParams(structured=form)), form
)
poller = zmq.Poller()
poller.register(grammars.fd, zmq.POLLIN)
assert poller.poll(60_000)
(_, grammar), = grammars.take_done()
assert isinstance(grammar, Compiler), grammar
"""


def test_a_deep_grammar_does_not_overflow_the_compiling_threads_stack() -> None:
    """In a process of its own, which it would end."""
    done = subprocess.run([sys.executable, "-c", DEEP_GRAMMAR], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr)
