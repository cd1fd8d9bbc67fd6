"""Which stage holds which layers?"""

from ipc.errors import ConfigError

FIELD = "--pipeline-partition"


def split_layers(num_layers: int, num_stages: int, partition: str) -> tuple[range, ...]:
    """Every layer exactly once, in order, at least one for each stage.

    ``partition`` is ``even``, ``auto`` (the same for now) or the number of layers of each stage, as in ``16,14``.
    An even split gives what is left over to the first stages: the last one has the head to compute.

    Raises:
        ConfigError: naming the layer count, the rank count and the split that was asked for.
    """
    sizes = _even_sizes(num_layers, num_stages) if partition in ("even", "auto") else _parse_sizes(partition)
    problem = _problem(sizes, num_layers, num_stages)
    if problem:
        raise ConfigError(
            FIELD, f"cannot split {num_layers} layers over {num_stages} ranks as {partition!r}: {problem}"
        )
    ends = [sum(sizes[: i + 1]) for i in range(num_stages)]
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))


def _even_sizes(num_layers: int, num_stages: int) -> list[int]:
    if num_stages < 1:
        return []
    size, num_longer = divmod(num_layers, num_stages)
    return [size + (stage < num_longer) for stage in range(num_stages)]


def _parse_sizes(partition: str) -> list[int]:
    texts = [text.strip() for text in partition.split(",")]
    if not all(text.isascii() and text.isdigit() and len(text) < 7 for text in texts):
        return []
    return [int(text) for text in texts]


def _problem(sizes: list[int], num_layers: int, num_stages: int) -> str:
    if not sizes:
        return "give even, auto, or layers per rank separated by commas, such as 16,14"
    if num_stages > num_layers:
        return "every rank needs at least one layer; start fewer ranks"
    if len(sizes) != num_stages:
        return f"it names {len(sizes)} ranks"
    if min(sizes) < 1:
        return "every rank needs at least one layer"
    if sum(sizes) != num_layers:
        return f"it adds up to {sum(sizes)} layers"
    return ""
