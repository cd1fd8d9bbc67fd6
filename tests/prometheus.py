"""Prometheus' text, read by the library that scrapers read it with."""

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

Samples = Mapping[str | tuple[str, ...], float]
"""A sample's name, or its name and its labels as NAME=VALUE in order of their names, to its value."""


def parse(text: bytes) -> Samples:
    """Every sample; none may be there twice."""
    samples: dict[str | tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = [f"{name}={value}" for name, value in sorted(sample.labels.items())]
            key = (sample.name, *labels) if labels else sample.name
            assert key not in samples, key
            samples[key] = sample.value
    return samples


def counters(text: bytes) -> Samples:
    """Those samples alone that may only grow: counters, and counts and sums of histograms."""
    families = {family.name: family.type for family in text_string_to_metric_families(text.decode())}
    growing = {f"{name}_total" for name, kind in families.items() if kind == "counter"}
    for name, kind in families.items():
        if kind == "histogram":
            growing |= {f"{name}_bucket", f"{name}_count", f"{name}_sum"}
    return {key: value for key, value in parse(text).items() if (key if isinstance(key, str) else key[0]) in growing}
