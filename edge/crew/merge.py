"""One page of metrics out of several workers'. Pure.

Counters and histograms add up, and so do gauges of what a worker has in hand. What every worker
sees of the same world is not added: the highest stands. When a worker is started again its counts
begin at nothing, which a scraper takes as the restart that it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from core.metrics import SEEN_BY_ALL


def merge(pages: Sequence[bytes]) -> bytes:
    """In the text format of each of `pages`."""
    if len(pages) == 1:
        return pages[0]
    registry = CollectorRegistry()
    registry.register(_Sum(pages))
    return generate_latest(registry)


class _Sum(Collector):
    def __init__(self, pages: Sequence[bytes]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        families: dict[str, list[Metric]] = {}
        for page in self._pages:
            for family in text_string_to_metric_families(page.decode()):
                families.setdefault(family.name, []).append(family)
        for same in families.values():
            yield _summed(same)


def _summed(same: Sequence[Metric]) -> Metric:
    first = same[0]
    out = Metric(first.name, first.documentation, first.type)
    values: dict[tuple[str, tuple[tuple[str, str], ...]], list[float]] = {}
    for family in same:
        for sample in family.samples:
            key = (sample.name, tuple(sample.labels.items()))
            values.setdefault(key, []).append(sample.value)
    for (name, labels), numbers in values.items():
        out.add_sample(name, dict(labels), _one(first.name, numbers))
    return out


def _one(family: str, numbers: Iterable[float]) -> float:
    if family.endswith("_created"):
        return min(numbers)
    return max(numbers) if family in SEEN_BY_ALL else sum(numbers)
