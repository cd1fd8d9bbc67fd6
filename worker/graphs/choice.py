"""Which steps does this rank capture? What the flags ask for, as far as its attention backend can serve it."""

import logging

from worker.attention import AttentionBackend
from worker.graphs.dispatcher import Dispatch, shapes_to_capture
from worker.graphs.modes import MODE_FLAG, SIZES_FLAG, CudagraphMode, GraphSupport, default_mode, lowered, sizes_by_rule
from worker.settings import WorkerSettings

logger = logging.getLogger(__name__)


def choose_shapes(
    settings: WorkerSettings, backend: AttentionBackend, device_type: str, *, level: int = logging.INFO
) -> tuple[Dispatch, ...]:
    """Largest first; empty when nothing is captured. What was chosen is told at this level of the log."""
    is_asked = settings.cudagraph_mode != "auto"
    wanted = CudagraphMode(settings.cudagraph_mode) if is_asked else default_mode(device_type)
    support = backend.capabilities.graphs
    mode = lowered(wanted, support)
    if mode is not wanted:
        logger.log(
            level, "%s %s is lowered to %s: attention backend %s supports graphs %s",
            MODE_FLAG, wanted.value, mode.value, backend.name, _SUPPORT[support],
        )  # fmt: skip
    sizes = settings.cudagraph_capture_sizes
    if mode is CudagraphMode.NONE:
        if sizes is not None:
            logger.log(level, "%s has no effect: nothing is captured", SIZES_FLAG)
        return ()
    if sizes is None:
        sizes = sizes_by_rule(
            max_num_seqs=settings.max_num_seqs, max_num_batched_tokens=settings.max_num_batched_tokens
        )
    logger.log(
        level, "graphs: mode %s (%s), steps of up to %d tokens in %d sizes",
        mode.value, "asked for" if is_asked else f"auto on {device_type}", sizes[-1], len(sizes),
    )  # fmt: skip
    return tuple(shapes_to_capture(mode, sizes, max_num_seqs=settings.max_num_seqs))


_SUPPORT = {
    GraphSupport.NEVER: "never",
    GraphSupport.UNIFORM_DECODE: "of decodes only",
    GraphSupport.ALWAYS: "always",
}
