"""What happens on a rank in one step, from the plan to what is handed on?"""

from collections.abc import Callable, Iterable, Sequence

from ipc.errors import ProtocolError
from ipc.messages import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from ipc.spans import Kind
from worker.clock import LINK, MASKS, ROOM, TOKENS, StageClock
from worker.graphs.dispatcher import Dispatch
from worker.graphs.graph import GraphPool
from worker.graphs.modes import CudagraphMode
from worker.graphs.stage_graphs import PaddedStep
from worker.input_batch import InputBatch
from worker.links.link import Receiver, Sender
from worker.model_runner import ModelRunner
from worker.threads import StepThreads, computes_alone
from worker.token_return import TokenInbox, TokenOutbox
from worker.topology import Topology
from worker.warm_up import first_step, rehearsals

TakeMasks = Callable[[int, float], GrammarOutput]
"""The masks of a step, waited for at most so many seconds."""


class Stage:
    """A model runner between its links; steps come in order, each number once.

    Waits are bounded: every method that waits raises PeerLost when a neighbour doesn't do its part in time.
    """

    def __init__(
        self,
        topology: Topology,
        runner: ModelRunner,
        clock: StageClock,
        *,
        receiver: Receiver | None,
        sender: Sender | None,
        token_inbox: TokenInbox | None,
        token_outbox: TokenOutbox | None,
        max_tokens: int,
        timeout_s: float,
        threads: StepThreads | None = None,
    ) -> None:
        """``threads``: to be told in each step whether others compute too; None leaves their number alone."""
        self._topology = topology
        self._runner = runner
        self._clock = clock
        self._receiver = receiver
        self._sender = sender
        self._token_inbox = token_inbox
        self._token_outbox = token_outbox
        self._max_tokens = max_tokens
        self._timeout_s = timeout_s
        self._threads = threads
        self._last_step = -1
        self._last_posted = -1

    def post_receives(self, plans: Iterable[SchedulerOutput]) -> None:
        """Make ready for the activations of these steps, as far as there are buffers. Twice does no harm."""
        if self._receiver is None:
            return
        for plan in plans:
            if plan.step_id > self._last_posted and plan.rows:
                if not self._receiver.has_room:
                    return
                self._receiver.post(plan.step_id, self._num_tokens(plan))
                self._last_posted = plan.step_id

    def run_step(
        self, plan: SchedulerOutput, upcoming: Sequence[SchedulerOutput] = (), take_masks: TakeMasks | None = None
    ) -> ModelRunnerOutput | None:
        """Compute one step and hand on what comes out; the output for the core on the last stage, None elsewhere.

        ``upcoming``: plans behind this one, whose receives are posted before this one is waited for. ``take_masks``: for
        steps with a grammar, called when the step is computed.
        """
        if plan.step_id != self._last_step + 1:
            raise ProtocolError("SchedulerOutput.step_id", f"is {plan.step_id} after step {self._last_step}")
        self._last_step = plan.step_id
        self._clock.doing(Kind.PREPARE, plan.step_id)
        self.post_receives([plan])
        batch = self._runner.prepare(plan)
        self._count(batch)
        if self._token_inbox is not None and plan.step_id > 0:
            self._take_tokens(self._token_inbox, plan.needs_tokens_of_step)
        received = None
        if self._receiver is not None and batch.num_tokens:
            self.post_receives(upcoming)
            self._clock.doing(LINK)
            received = self._receiver.wait(plan.step_id)[0]
        self._clock.doing(Kind.FORWARD)
        self._begin_computing(plan, upcoming, batch.num_tokens)
        result = self._runner.execute_model(batch, received)
        if self._topology.is_last:
            grammar = self._take_masks(plan.step_id, take_masks) if plan.has_grammar else None
            self._clock.doing(Kind.SAMPLE)
            output = self._runner.sample_tokens(batch, result, grammar)
            self._end_computing()
            self._clock.doing(Kind.RETURN)
            self._return_tokens(output)
            return output
        self._end_computing()
        assert self._sender is not None
        if batch.num_tokens:
            self._clock.doing(ROOM)
            self._sender.make_room()
            self._clock.doing(Kind.SEND)
            self._sender.send(plan.step_id, [result.hidden])
        return None

    def warm_up(self, max_model_len: int, block_size: int) -> None:
        """Compute what nobody asked for, step 0 at last, so that kernels, threads and every channel have been used once.

        It writes to block 0 and row 0; their first owners write before they read.
        """
        num_groups = self._runner.num_groups
        for plan in rehearsals(max_model_len, num_groups, block_size):
            self._runner.rehearse(plan)
        self.run_step(first_step(max_model_len, num_groups, block_size, self._max_tokens))
        if self._token_inbox is not None:
            self._take_tokens(self._token_inbox, 0)

    def capture_graphs(
        self, shapes: Sequence[Dispatch], pool: GraphPool, progress: Callable[[int, int], None]
    ) -> int:
        """Serve steps of these shapes by graphs from now on; see ``ModelRunner.capture_graphs``."""
        receive_buffers = [] if self._receiver is None else self._receiver.buffers()
        return self._runner.capture_graphs(shapes, receive_buffers=receive_buffers, pool=pool, progress=progress)

    def flush(self, timeout_s: float) -> None:
        """Wait until the next stage has taken everything that was sent to it. Raises PeerLost."""
        if self._sender is not None:
            self._sender.flush(timeout_s)

    def _count(self, batch: InputBatch) -> None:
        self._clock.num_tokens += batch.num_tokens
        if isinstance(batch.forward, PaddedStep):
            self._clock.num_padded_tokens += batch.forward.num_padded
            if batch.forward.dispatch.mode is CudagraphMode.FULL:
                self._clock.num_full_graph_steps += 1
            else:
                self._clock.num_piecewise_graph_steps += 1

    def _take_tokens(self, inbox: TokenInbox, step_id: int) -> None:
        with self._clock.waiting(TOKENS):
            inbox.take_until(
                step_id, self._accept, timeout_s=self._timeout_s, peer=self._topology.num_stages - 1
            )

    def _take_masks(self, step_id: int, take_masks: TakeMasks | None) -> GrammarOutput:
        assert take_masks is not None, "steps with a grammar are for workers with a core"
        with self._clock.waiting(MASKS):
            return take_masks(step_id, self._timeout_s)

    def _begin_computing(self, plan: SchedulerOutput, upcoming: Sequence[SchedulerOutput], num_tokens: int) -> None:
        if self._threads is not None:
            last_sampled_step = None if self._token_inbox is None else self._token_inbox.last_step
            next_plan = upcoming[0] if upcoming else None
            self._threads.begin(
                num_tokens,
                is_alone=computes_alone(self._topology, plan, next_plan, last_sampled_step),
            )

    def _end_computing(self) -> None:
        if self._threads is not None:
            self._threads.end()

    def _return_tokens(self, output: ModelRunnerOutput) -> None:
        if self._topology.is_first:
            self._accept(output.step_id, output.rows, output.token_ids, output.counts)
        else:
            assert self._token_outbox is not None
            self._token_outbox.send(
                output.step_id, output.rows, output.token_ids, output.counts, timeout_s=self._timeout_s
            )

    def _accept(self, step_id: int, rows: list[int], token_ids: list[int], counts: list[int]) -> None:
        with self._clock.during(Kind.ACCEPT, step_id):
            self._runner.accept_tokens(step_id, rows, token_ids, counts)

    def _num_tokens(self, plan: SchedulerOutput) -> int:
        num_tokens = sum(plan.num_scheduled_tokens)
        if not 0 < num_tokens <= self._max_tokens:
            raise ProtocolError("SchedulerOutput.num_scheduled_tokens", f"{num_tokens} tokens, limit {self._max_tokens}")
        return num_tokens
