"""How does a rank come to the links of an epoch? It agrees with the others, then connects."""

import logging
from dataclasses import dataclass

import torch

from ipc.endpoints import host_id
from ipc.messages import EpochStart
from ipc.promptness import prompt_threads
from worker.device import device_identity, resolve_device
from worker.epoch_store import EpochStore, open_store
from worker.links.choice import Choice, Offer, choose_transport, exchange_offers
from worker.links.gloo import (
    NUM_RECEIVE_BUFFERS,
    NUM_SEND_BUFFERS,
    GlooReceiver,
    GlooSender,
    Group,
    connect_group,
)
from worker.links.link import Boundary, Hop, HopBuffer, Receiver, Sender
from worker.links.nccl import NcclReceiver, NcclSender, PairGroup, connect_pair, nccl_version
from worker.links.staged import StagedReceiver, StagedSender
from worker.links.streams import CudaStreams, HostStreams, Streams
from worker.memory import free_host_memory, memory_for
from worker.settings import WorkerSettings
from worker.topology import Topology

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """This rank's ends, as far as it has neighbours."""

    receiver: Receiver | None
    sender: Sender | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What the ranks of an epoch agreed on before they load."""

    store: EpochStore
    device: torch.device
    """This rank's."""

    choice: Choice


def meet(settings: WorkerSettings, topology: Topology, start: EpochStart) -> Meeting:
    """Agree with the other ranks on a transport: before weights are read, since a wish may be one that can't be met.

    Raises PeerLost, and ConfigError for what no restart can cure.
    """
    store = open_store(settings, start)
    device = resolve_device(settings.device, settings.local_rank)
    offer = Offer(
        rank=topology.rank, host=host_id(), device=device_identity(device), nccl=nccl_version(), wish=settings.transport
    )
    choice = choose_transport(exchange_offers(store, offer, settings.world_size, settings.link_timeout_s))
    logger.log(
        logging.INFO if topology.is_first else logging.DEBUG, "hops go by %s: %s", choice.transport, choice.reason
    )
    return Meeting(store=store, device=device, choice=choice)


def open_links(
    settings: WorkerSettings, topology: Topology, meeting: Meeting, boundary: Boundary, epoch: int
) -> Links:
    """Connect to the neighbours by the transport agreed on, and send one message over each hop.

    Raises PeerLost, and ConfigError for what no restart can cure.
    """
    with prompt_threads():
        transport = _connect(settings, topology, meeting)
    links = make_links(settings, topology, boundary, transport, epoch)
    warm_up(links, boundary, settings.max_num_batched_tokens, meeting.device, settings.link_timeout_s)
    return links


class GlooTransport:
    """Between CPUs."""

    num_host_buffers = 1

    def __init__(self, group: Group) -> None:
        self._group = group

    def receiver(self, hop: Hop) -> Receiver:
        return GlooReceiver(self._group, hop)

    def sender(self, hop: Hop) -> Sender:
        return GlooSender(self._group, hop)


class StagedTransport:
    """Between devices, by way of the hosts."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.num_host_buffers = 1 if device.type == "cuda" else 2

    def receiver(self, hop: Hop) -> Receiver:
        return StagedReceiver(self._group, hop, _streams(self._device))

    def sender(self, hop: Hop) -> Sender:
        return StagedSender(self._group, hop, _streams(self._device))


class NcclTransport:
    """Between GPUs."""

    num_host_buffers = 0

    def __init__(self, groups: dict[int, PairGroup], device: torch.device) -> None:
        """``groups``: by neighbour."""
        self._groups = groups
        self._device = device

    def receiver(self, hop: Hop) -> Receiver:
        return NcclReceiver(self._groups[hop.peer], hop, _streams(self._device))

    def sender(self, hop: Hop) -> Sender:
        return NcclSender(self._groups[hop.peer], hop, _streams(self._device))


Transport = GlooTransport | StagedTransport | NcclTransport


def make_links(
    settings: WorkerSettings, topology: Topology, boundary: Boundary, transport: Transport, epoch: int
) -> Links:
    """Both ends of this stage's hops, as far as it has them. Raises ConfigError when their buffers don't fit."""
    max_tokens = settings.max_num_batched_tokens
    num_buffers = NUM_RECEIVE_BUFFERS * (not topology.is_first) + NUM_SEND_BUFFERS * (not topology.is_last)

    def hop(peer: int) -> Hop:
        return Hop(
            boundary=boundary, rank=topology.rank, peer=peer, epoch=epoch, max_tokens=max_tokens,
            timeout_s=settings.link_timeout_s,
        )  # fmt: skip

    with memory_for("--max-num-batched-tokens", f"hops of {max_tokens} tokens between stages", "give fewer"):
        # The buffers are touched when they are made, and the system would rather end a process than refuse memory.
        needed = transport.num_host_buffers * num_buffers * HopBuffer.size_of(boundary, max_tokens)
        free = free_host_memory()
        if needed > free:
            raise MemoryError(f"they take {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are free")
        before, behind = topology.previous_rank, topology.next_rank
        return Links(
            receiver=None if before is None else transport.receiver(hop(before)),
            sender=None if behind is None else transport.sender(hop(behind)),
        )


def warm_up(links: Links, boundary: Boundary, num_tokens: int, device: torch.device, timeout_s: float) -> None:
    """Pass on one message of the largest size, so that whatever a transport sets up on first use is there. Raises PeerLost."""
    if links.receiver is not None:
        links.receiver.post(0, num_tokens)
        links.receiver.wait(0)
    if links.sender is not None:
        links.sender.send(0, [torch.zeros(num_tokens, part.width, dtype=part.dtype, device=device) for part in boundary])
        links.sender.flush(timeout_s)


def _connect(settings: WorkerSettings, topology: Topology, meeting: Meeting) -> Transport:
    timeout_s, device = settings.link_timeout_s, meeting.device
    if meeting.choice.transport == "nccl":
        # In rank order, so that the two sides of a pair never wait for each other across another pair.
        neighbours = [rank for rank in (topology.previous_rank, topology.next_rank) if rank is not None]
        return NcclTransport({
            peer: connect_pair(meeting.store, rank=topology.rank, peer=peer, device=device, timeout_s=timeout_s)
            for peer in neighbours
        }, device)  # fmt: skip
    group = connect_group(
        meeting.store,
        rank=settings.rank,
        world_size=settings.world_size,
        host=settings.advertise_host,
        timeout_s=timeout_s,
    )
    return GlooTransport(group) if meeting.choice.transport == "gloo" else StagedTransport(group, device)


def _streams(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
