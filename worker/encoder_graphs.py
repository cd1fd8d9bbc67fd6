"""How does an encoder run items of any size on a few captured graphs?"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ipc.errors import RequestError
from worker.encoders import ITEM_IDS, Item, PackedEncoder
from worker.encoders.packing import Pack, pack_items, token_budgets
from worker.graphs.graph import Graph, GraphPool, make_pool
from worker.memory import is_out_of_memory

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class EncoderGraphStatistics:
    """Counted since the start."""

    num_items_replayed: int = 0
    num_items_eager: int = 0
    """Larger than the largest graph, or too small for the smallest."""

    num_replays: Counter[int] = field(default_factory=Counter)
    """By budget."""

    num_tokens_replayed: int = 0
    """Real ones."""

    num_tokens_padded: int = 0
    """Computed beside them."""

    @property
    def hit_share(self) -> float:
        """Of the items, those that ran on a graph; 0 before the first item."""
        num_items = self.num_items_replayed + self.num_items_eager
        return self.num_items_replayed / num_items if num_items else 0.0

    def count(self, pack: Pack) -> None:
        if pack.budget is None:
            self.num_items_eager += len(pack.items)
            return
        self.num_items_replayed += len(pack.items)
        self.num_replays[pack.budget] += 1
        self.num_tokens_replayed += pack.num_tokens
        self.num_tokens_padded += pack.budget - pack.num_tokens


class EncoderCudaGraphManager:
    """One graph for each budget of tokens; items are packed along the tokens into as few as fit.

    All graphs read one set of buffers of the largest budget, each their first rows. What no graph fits runs
    eagerly, so before ``capture`` everything does.
    """

    def __init__(self, encoder: PackedEncoder, *, smallest: int, largest: int, pool: GraphPool | None = None) -> None:
        """Budgets are the powers of two from ``smallest`` to ``largest`` tokens.

        ``pool``: None makes one for the encoder's device. Raises ConfigError when there is no budget.
        """
        self._encoder = encoder
        self._budgets = token_budgets(smallest, largest)
        self._pool = pool or make_pool(encoder.device)
        self._inputs = encoder.inputs()
        self._buffers = {
            each.name: torch.full(
                (self._budgets[-1], *each.shape), each.padding, dtype=each.dtype, device=encoder.device
            )
            for each in (*self._inputs, ITEM_IDS)
        }
        self._graphs: dict[int, Graph] = {}
        self.statistics = EncoderGraphStatistics()

    @property
    def budgets(self) -> tuple[int, ...]:
        """Those that were captured, ascending."""
        return tuple(sorted(self._graphs))

    @property
    def buffer_bytes(self) -> int:
        """Memory of the inputs that the graphs share; what they need inside and for results is the pool's."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Record every budget's graph, the largest first, since the others fit in what it needed.

        One for which there is no memory is left out with a warning. ``progress(done, total)`` counts budgets.
        """
        for done, budget in enumerate(reversed(self._budgets), start=1):
            try:
                self._graphs[budget] = self._captured(self._rows(budget))
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                logger.warning("no memory for the encoder's graph of %d tokens, which is left out", budget)
            progress(done, len(self._budgets))

    def encode(self, items: Sequence[Item]) -> list[Tensor]:
        """The output of each item, [N, C], in their order; the caller's own.

        Raises:
            RequestError: for an item that ``check`` refuses, before anything is computed.
        """
        counts = [self.check(item, f"items[{index}]") for index, item in enumerate(items)]
        outputs: dict[int, Tensor] = {}
        for pack in pack_items(counts, self.budgets):
            packed = [items[index] for index in pack.items]
            sizes = [counts[index] for index in pack.items]
            parts = (
                self._run_eagerly(packed, sizes) if pack.budget is None else self._replay(packed, sizes, pack.budget)
            )
            outputs |= zip(pack.items, parts, strict=True)
            self.statistics.count(pack)
        return [outputs[index] for index in range(len(items))]

    def check(self, item: Item, name: str) -> int:
        """How many tokens an item has.

        Raises:
            RequestError: for inputs that are missing, unknown, empty, of another type or shape, or of unequal lengths.
        """
        wanted = {each.name for each in self._inputs}
        if item.keys() != wanted:
            raise RequestError(f"{name} has {sorted(item)}, must have {sorted(wanted)}", field=name)
        num_tokens = item[self._inputs[0].name].shape[:1].numel()
        for each in self._inputs:
            tensor, field_name = item[each.name], f"{name}.{each.name}"
            expected = (num_tokens, *each.shape)
            if tensor.dtype != each.dtype:
                raise RequestError(f"{field_name} is of type {tensor.dtype}, must be {each.dtype}", field=field_name)
            if tuple(tensor.shape) != expected:
                raise RequestError(
                    f"{field_name} has shape {list(tensor.shape)}, must be {list(expected)}", field=field_name
                )
        if num_tokens == 0:
            raise RequestError(f"{name} has no tokens, must have at least 1", field=name)
        return num_tokens

    def _captured(self, rows: tuple[Tensor, ...]) -> Graph:
        # Compiles what has to be compiled, and lets libraries make what a capture must not see them make.
        self._compute(rows)
        graph = self._pool.graph()
        graph.capture(self._compute, rows)
        graph.release()
        return graph

    def _compute(self, rows: tuple[Tensor, ...]) -> Tensor:
        """What a graph records."""
        *inputs, item_ids = rows
        names = (each.name for each in self._inputs)
        return self._encoder(dict(zip(names, inputs, strict=True)), item_ids)

    def _rows(self, budget: int) -> tuple[Tensor, ...]:
        """The buffers' first rows: the encoder's inputs in their order, then the items' ids."""
        return tuple(buffer[:budget] for buffer in self._buffers.values())

    def _replay(self, items: Sequence[Item], sizes: list[int], budget: int) -> list[Tensor]:
        """Copied out, since the next replay takes the same memory."""
        num_tokens = sum(sizes)
        *inputs, item_ids = rows = self._rows(budget)
        for each, buffer in zip(self._inputs, inputs, strict=True):
            for item, rows_of_item in zip(items, buffer[:num_tokens].split(sizes), strict=True):
                rows_of_item.copy_(item[each.name])
            buffer[num_tokens:].fill_(each.padding)
        _write_item_ids(item_ids, sizes)
        output: Tensor = self._graphs[budget].replay(rows)
        return [rows_of_item.clone() for rows_of_item in output[:num_tokens].split(sizes)]

    def _run_eagerly(self, items: Sequence[Item], sizes: list[int]) -> list[Tensor]:
        inputs = {each.name: torch.cat([item[each.name] for item in items]) for each in self._inputs}
        item_ids = torch.empty(sum(sizes), dtype=ITEM_IDS.dtype, device=self._encoder.device)
        _write_item_ids(item_ids, sizes)
        return list(self._encoder(inputs, item_ids).split(sizes))


def _write_item_ids(item_ids: Tensor, sizes: list[int]) -> None:
    num_tokens = sum(sizes)
    for index, rows in enumerate(item_ids[:num_tokens].split(sizes)):
        rows.fill_(index)
    item_ids[num_tokens:].fill_(ITEM_IDS.padding)
