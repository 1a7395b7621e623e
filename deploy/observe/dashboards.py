"""Grafana's dashboards as data. `python -m deploy.observe` writes the files in `grafana/`, which
are kept so that nobody has to run it to use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

WIDTH, HEIGHT, COLUMNS = 8, 8, 3
"""Of a panel, in Grafana's grid of 24 columns."""
_RATE = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Panel:
    """`queries` are PromQL with the legend of each; `about` says how to read it."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    about: str = ""


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    panels: tuple[Panel, ...]

    def as_json(self) -> bytes:
        page = {
            "uid": self.uid,
            "title": self.title,
            "tags": ["skerry"],
            "schemaVersion": 39,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "browser",
            "editable": True,
            "templating": {"list": [_source()]},
            "panels": [_panel(one, number) for number, one in enumerate(self.panels)],
        }
        return msgspec.json.format(msgspec.json.encode(page), indent=2) + b"\n"


def rate(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}{_RATE}))"


def quantile(share: float, metric: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{_RATE})))"


def spread(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple((quantile(share, metric), f"p{share * 100:.0f}") for share in (0.5, 0.9, 0.99))


EDGE = Dashboard(
    "skerry-edge",
    "Skerry: edges",
    (
        Panel(
            "Answers a second, by outcome",
            "reqps",
            ((rate("skerry_edge_requests_total", "outcome"), "{{outcome}}"),),
        ),
        Panel(
            "Time to the first token",
            "s",
            spread("skerry_edge_first_delta_seconds"),
            "From the parsed request to its first piece, as callers see it.",
        ),
        Panel(
            "The same by region, p90",
            "s",
            ((quantile(0.9, "skerry_edge_first_delta_seconds", "region"), "{{region}}"),),
        ),
        Panel(
            "Requests to regions, by reason",
            "reqps",
            ((rate("skerry_edge_routes_total", "reason"), "{{reason}}"),),
            "prefix_home is the cache at work; *_spill and fastest are load, failover trouble.",
        ),
        Panel(
            "Requests by region",
            "reqps",
            (
                (rate("skerry_edge_routes_total", "region"), "{{region}}"),
                ("sum(rate(skerry_edge_hot_prompts_total[$__rate_interval]))", "alike to the end"),
            ),
            "Prompts that are alike to their end cannot be told apart: a retry loop, a load test.",
        ),
        Panel(
            "Failed attempts",
            "reqps",
            ((rate("skerry_edge_failovers_total", "region, code"), "{{region}} {{code}}"),),
            "Each was tried again elsewhere; callers saw nothing of it.",
        ),
        Panel(
            "Under way and held",
            "short",
            (("sum(skerry_edge_in_flight)", "in flight"), ("sum(skerry_edge_held)", "held")),
            "Held requests wait at the edge because every region is busy.",
        ),
        Panel(
            "Regions heard",
            "short",
            (("min by (region) (skerry_edge_region_up)", "{{region}}"),),
            "0: some edge has no fresh status of that region.",
        ),
        Panel(
            "Tokens a second",
            "short",
            (
                (rate("skerry_edge_prompt_tokens_total", "model"), "read {{model}}"),
                (rate("skerry_edge_completion_tokens_total", "model"), "written {{model}}"),
            ),
        ),
        Panel(
            "Certificates end in",
            "s",
            (("min by (instance) (skerry_edge_certificate_left_seconds)", "{{instance}}"),),
            "Of edges whose callers speak https.",
        ),
    ),
)

REGION = Dashboard(
    "skerry-region",
    "Skerry: regions",
    (
        Panel(
            "Requests active and queued",
            "short",
            (
                ("sum by (region) (skerry_running_requests)", "{{region}} active"),
                ("sum by (region) (skerry_queued_requests)", "{{region}} queued"),
            ),
        ),
        Panel("Time in the queue", "s", spread("skerry_router_queue_seconds")),
        Panel("From placement to the first token", "s", spread("skerry_router_prefill_seconds")),
        Panel(
            "Placements, by reason",
            "reqps",
            ((rate("skerry_router_placements_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            "Placed again, by cause",
            "reqps",
            ((rate("skerry_router_replacements_total", "code"), "{{code}}"),),
        ),
        Panel(
            "Prompt tokens found in a cache, share",
            "percentunit",
            tuple(
                (
                    f'sum(rate(skerry_router_prompt_tokens_total{{kind="{kind}"}}{_RATE})) / '
                    f'sum(rate(skerry_router_prompt_tokens_total{{kind="all"}}{_RATE}))',
                    kind,
                )
                for kind in ("reusable", "routed", "delivered")
            ),
            "reusable above routed: the wrong node was chosen. routed above delivered: what the "
            "index promised was not there.",
        ),
        Panel(
            "KV handed over",
            "Bps",
            (("sum(rate(skerry_router_kv_bytes_total[$__rate_interval]))", "bytes a second"),),
        ),
        Panel("Nodes joined", "short", (("sum by (role) (skerry_router_nodes)", "{{role}}"),)),
        Panel(
            "Nodes lost in ten minutes",
            "short",
            (("max by (node) (increase(skerry_router_lost_nodes_total[10m]))", "{{node}}"),),
            "Without having said so: killed, crashed, silent.",
        ),
        Panel(
            "Nodes wanted",
            "short",
            (("max by (region, model, role) (skerry_router_wanted_nodes)", "{{model}} {{role}}"),),
            "Of models that are scaled: what starts and stops nodes follows it.",
        ),
        Panel("Mean time per token", "s", spread("skerry_router_token_seconds")),
    ),
)

ENGINE = Dashboard(
    "skerry-engine",
    "Skerry: engines",
    (
        Panel(
            "Tokens written a second",
            "short",
            ((rate("skerry_generated_tokens_total", "node"), "{{node}}"),),
        ),
        Panel("KV blocks in use", "short", (("skerry_kv_blocks_used", "{{node}}"),)),
        Panel("KV blocks kept for reuse", "short", (("skerry_kv_blocks_cached", "{{node}}"),)),
        Panel(
            "Guessed tokens that were right, share",
            "percentunit",
            (
                (
                    "sum by (node) (rate(skerry_accepted_tokens_total[$__rate_interval])) / "
                    "sum by (node) (rate(skerry_drafted_tokens_total[$__rate_interval]))",
                    "{{node}}",
                ),
            ),
        ),
        Panel("Between ranks", "Bps", ((rate("skerry_rank_bytes_total", "node"), "{{node}}"),)),
        Panel(
            "Pipeline stages standing still, share",
            "percentunit",
            (("skerry_pipeline_bubble", "{{node}}"),),
        ),
        Panel(
            "Blocks in tiers below memory", "short", (("skerry_tier_blocks", "{{node}} {{tier}}"),)
        ),
        Panel(
            "What became of tiers' blocks",
            "short",
            ((rate("skerry_tier_block_events_total", "event"), "{{event}}"),),
        ),
        Panel("Tiers in use", "short", (("skerry_tier_up", "{{node}} {{tier}}"),)),
    ),
)

ALL = (EDGE, REGION, ENGINE)


def _source() -> dict[str, Any]:
    return {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _panel(panel: Panel, number: int) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": source,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": query, "legendFormat": legend,
             "datasource": source}
            for place, (query, legend) in enumerate(panel.queries)
        ],
    }  # fmt: skip
