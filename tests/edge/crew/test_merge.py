"""Metrics of several workers as one page."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from core.metrics import SEEN_BY_ALL, EdgeMetrics, render
from edge.crew.merge import merge


def _page(requests: int, seconds: float) -> bytes:
    registry = CollectorRegistry()
    metrics = EdgeMetrics(registry)
    metrics.requests.labels("chat", "ok").inc(requests)
    if requests > 2:
        metrics.requests.labels("chat", "cancelled").inc()
    metrics.in_flight.set(requests)
    metrics.region_up.labels("eu").set(1)
    metrics.request_seconds.labels("eu").observe(seconds)
    return render(registry)


def _values(page: bytes) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def test_counts_and_histograms_add_up_and_what_all_see_does_not() -> None:
    pages = [_page(2, 0.02), _page(3, 7.0)]
    values = _values(merge(pages))
    chat = "skerry_edge_requests_total[('dialect', 'chat'), ('outcome', '{}')]".format
    assert values[chat("ok")] == 5.0
    assert values[chat("cancelled")] == 1.0
    assert values["skerry_edge_in_flight[]"] == 5.0
    assert values["skerry_edge_region_up[('region', 'eu')]"] == 1.0
    assert values["skerry_edge_request_seconds_count[('region', 'eu')]"] == 2.0
    assert values["skerry_edge_request_seconds_sum[('region', 'eu')]"] == 7.02
    assert values["skerry_edge_request_seconds_bucket[('le', '0.025'), ('region', 'eu')]"] == 1.0
    assert set(values) == set(_values(pages[1]))


def test_one_page_is_left_as_it_is() -> None:
    page = _page(1, 0.1)
    assert merge([page]) is page


def test_all_that_is_not_added_exists() -> None:
    text = render(EdgeMetrics(CollectorRegistry()).registry).decode()
    for name in SEEN_BY_ALL:
        assert f"# TYPE {name} gauge" in text
