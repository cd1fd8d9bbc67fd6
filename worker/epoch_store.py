"""Where do the ranks of one epoch find each other?"""

from datetime import timedelta

from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined,unused-ignore]

from ipc.errors import PeerLost
from ipc.messages import EpochStart
from worker.settings import WorkerSettings
from worker.shortage import shortage

EpochStore = FileStore | PrefixStore


def open_store(settings: WorkerSettings, start: EpochStart) -> EpochStore:
    """A store that the ranks of this epoch, and of no other, use. Raises PeerLost, or ConfigError for a limit."""
    try:
        if settings.agent_store is None:
            return FileStore(start.store, settings.world_size)
        host, port = settings.agent_store
        timeout = timedelta(seconds=settings.link_timeout_s)
        return PrefixStore(start.store, TCPStore(host, port, is_master=False, timeout=timeout))
    except RuntimeError as error:
        if (limit := shortage(error)) is not None:
            raise limit from None
        raise PeerLost(f"rank {settings.rank}: the store of epoch {start.epoch} can't be reached: {error}") from None
