"""Dashboards and alerts speak of metrics that exist, and Prometheus's own tool finds no fault."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, Metric

from core.errors import BY_CODE
from core.metrics import EdgeMetrics, RouterMetrics, StatusCollector, watch_certificate
from core.status import NodeStatus, RankStatus, RegionStatus, TierStatus
from core.types import ModelName, NodeName, RegionName, Role
from deploy.observe import dashboards
from tests.servers import needed

FOLDER = Path(dashboards.__file__).parent
_NAME = re.compile(r"\bskerry_[a-z_]+")


def _exported() -> set[str]:
    """Names of all samples that our processes can export."""
    registry = CollectorRegistry()
    EdgeMetrics(registry)
    RouterMetrics(registry)
    watch_certificate(registry, lambda: 0.0)
    ranks = tuple(RankStatus(number, 1, "") for number in range(2))
    node = NodeStatus(
        name=NodeName("n"), role=Role.DECODE, model=ModelName("m"), ranks=ranks,
        stage_seconds=(1.0, 1.0), tiers=(TierStatus(kind="disk"),),
    )  # fmt: skip
    status = RegionStatus(region=RegionName("r"), epoch="e", sequence=1, nodes=(node,))
    StatusCollector(registry, lambda: [status])
    names: set[str] = set()
    families: list[Metric] = list(registry.collect())
    for family in families:
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
        names |= {family.name + suffix for suffix in suffixes.get(family.type, ("",))}
    return names


def test_every_query_is_about_a_metric_that_there_is() -> None:
    exported = _exported()
    told = (FOLDER / "alerts.yml").read_text()
    asked = set(_NAME.findall(told))
    for one in dashboards.ALL:
        asked |= {name for panel in one.panels for query, _ in panel.queries
                  for name in _NAME.findall(query)}  # fmt: skip
    assert asked - exported == set()
    assert len(asked) > 20


def test_alerts_know_the_error_codes() -> None:
    told = (FOLDER / "alerts.yml").read_text()
    codes = {code for group in re.findall(r'outcome=~"([^"]+)"', told) for code in group.split("|")}
    assert codes
    assert codes <= set(BY_CODE)


def test_the_kept_dashboards_are_those_of_the_code() -> None:
    for one in dashboards.ALL:
        kept = (FOLDER / "grafana" / "dashboards" / f"{one.uid}.json").read_bytes()
        assert kept == one.as_json(), "run python -m deploy.observe"
        page = json.loads(kept)
        places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in page["panels"]]
        assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
        ("check", "config", "--syntax-only", "prometheus.yml"),
    ],
)
def test_prometheus_finds_no_fault(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [needed("promtool"), *arguments], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_test_or_a_runbook_that_is_there() -> None:
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
    for rule in rules:
        file, _, anchor = rule["annotations"]["runbook"].partition("#")
        titles = {
            re.sub(r"[^a-z0-9 -]", "", line[3:].lower()).strip().replace(" ", "-")
            for line in (FOLDER.parents[1] / file).read_text().splitlines()
            if line.startswith("## ")
        }
        assert not anchor or anchor in titles, rule["alert"]
