"""Which transport carries the hops of an epoch? All ranks decide alike, from what each of them publishes."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined,unused-ignore]

from ipc.errors import ConfigError, PeerLost, ProtocolError
from worker.links.gloo import reason
from worker.settings import TRANSPORTS

MAX_OFFER_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What one rank has to choose from."""

    rank: int
    host: str
    """The same text on ranks that share devices."""

    device: str
    """Identity of the device: "cpu", or "cuda:" with a text that no other GPU has."""

    nccl: str
    """NCCL's version; empty where it can't be used."""

    wish: str
    """--transport as this rank was given it."""

    @property
    def is_gpu(self) -> bool:
        return self.device != "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What all ranks of an epoch use, and why."""

    transport: str
    reason: str


def exchange_offers(store: Store, offer: Offer, world_size: int, timeout_s: float) -> list[Offer]:
    """Publish this rank's offer in the epoch's store, and read everybody's, in rank order.

    Raises PeerLost when one does not come in time, ProtocolError for one that can't be read.
    """
    store.set_timeout(timedelta(seconds=timeout_s))
    waited_for = offer.rank
    offers = []
    try:
        store.set(_key(offer.rank), json.dumps(asdict(offer)))
        for waited_for in range(world_size):
            offers.append(_decode(waited_for, store.get(_key(waited_for))))
    except RuntimeError as error:
        raise PeerLost(
            f"rank {offer.rank}: could not connect to the other {world_size - 1} ranks: nothing from rank {waited_for} "
            f"in the epoch's store: {reason(error)}"
        ) from None
    return offers


def choose_transport(offers: Sequence[Offer]) -> Choice:
    """The transport of an epoch; the same on every rank. Raises ConfigError when it can't be the one that is wished for.

    ``auto``: gloo where every rank computes on the CPU, NCCL where each has a GPU of its own, else staged.
    """
    wishes = {offer.wish: offer.rank for offer in reversed(offers)}
    if len(wishes) > 1:
        told = ", ".join(f"{wish} on rank {rank}" for wish, rank in sorted(wishes.items(), key=lambda item: item[1]))
        raise ConfigError("--transport", f"must be the same on every rank, it is {told}")
    wish = offers[0].wish
    obstacle = _obstacle_to_nccl(offers)
    on_gpu = next((offer for offer in offers if offer.is_gpu), None)
    if wish == "nccl" and obstacle:
        raise ConfigError("--transport", f"nccl needs one GPU for each rank, and NCCL: {obstacle}; use staged or auto")
    if wish == "gloo" and on_gpu is not None:
        raise ConfigError(
            "--transport", f"gloo carries tensors of the CPU, rank {on_gpu.rank} computes on {on_gpu.device}; use staged"
        )
    if wish != "auto":
        return Choice(transport=wish, reason="as --transport says")
    if on_gpu is None:
        return Choice(transport="gloo", reason="every rank computes on the CPU")
    if obstacle:
        return Choice(transport="staged", reason=f"no NCCL, since {obstacle}")
    return Choice(transport="nccl", reason="every rank has a GPU of its own")


def _obstacle_to_nccl(offers: Sequence[Offer]) -> str:
    """Empty when there is none."""
    for offer in offers:
        if not offer.is_gpu:
            return f"rank {offer.rank} computes on the CPU"
    users: Mapping[tuple[str, str], list[int]] = defaultdict(list)
    for offer in offers:
        users[offer.host, offer.device].append(offer.rank)
    for (_, device), ranks in users.items():
        if len(ranks) > 1:
            return f"ranks {', '.join(map(str, ranks))} share {device}"
    for offer in offers:
        if not offer.nccl:
            return f"rank {offer.rank} has no NCCL"
        if offer.nccl != offers[0].nccl:
            return f"rank 0 has NCCL {offers[0].nccl}, rank {offer.rank} has {offer.nccl}"
    return ""


def _key(rank: int) -> str:
    return f"links/{rank}"


def _decode(rank: int, data: bytes) -> Offer:
    """Raises ProtocolError."""
    try:
        values = json.loads(data) if len(data) <= MAX_OFFER_BYTES else {}
    except ValueError:
        values = {}
    if not isinstance(values, dict) or set(values) != {field.name for field in fields(Offer)}:
        values = {"rank": None}
    has_types = all(type(value) is (int if name == "rank" else str) for name, value in values.items())
    if not has_types or values["rank"] != rank or values["wish"] not in TRANSPORTS:
        raise ProtocolError(_key(rank), f"is no offer of rank {rank}; it may run another version")
    return Offer(**values)
