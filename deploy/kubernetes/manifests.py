"""One edge or one region of a topology as Kubernetes objects. Pure.

The topology is written anew for the cluster: processes listen where their pods are found by name.
Nodes that are called PREFIX-1, PREFIX-2, … and are alike become one StatefulSet whose pods have
exactly these names; others get one each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from core.config import Edge, Node, Region, Topology
from core.errors import ConfigError
from deploy import toml_write
from deploy.kubernetes import objects
from deploy.kubernetes.objects import Object
from deploy.kubernetes.values import Values

HTTP, GRPC = 8701, 8702
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_NUMBERED = re.compile(r"(?P<prefix>.+)-(?P<number>\d+)")


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes `prefix`-`first` … that are alike but for their names."""

    prefix: str
    first: int
    nodes: tuple[Node, ...]

    def pod(self, node: Node) -> str:
        return f"{self.prefix}-{self.first + self.nodes.index(node)}"


def manifests(topology: Topology, unit: str, values: Values) -> list[Object]:
    """Of the edge or region `unit`. Raises ConfigError."""
    text = toml_write.dump(in_cluster(topology, values))
    for edge in topology.edges:
        if edge.name == unit:
            return list(_edge(edge, text, values))
    for region in topology.regions:
        if region.name == unit:
            _no_pools(region)
            return list(_region(region, text, values))
    known = ", ".join([*(one.name for one in topology.edges), *(r.name for r in topology.regions)])
    raise ConfigError(f"no edge and no region is named {unit!r}; the topology has: {known}")


def _no_pools(region: Region) -> None:
    """Raises ConfigError for one with pools: who gives way to whom is decided by the launcher of
    one machine, and in a cluster nobody would."""
    if region.pools:
        raise ConfigError(
            f"region {region.name!r} has pools ({', '.join(region.pools)}): nodes that share a "
            "place need `skerry up` on that machine; in a cluster places are the cluster's to "
            "give: leave [regions.pools] and each node's `pool` out of the topology"
        )


def in_cluster(topology: Topology, values: Values) -> Topology:
    """With the addresses that its processes have in the cluster, and secrets from its Secret."""
    replace = msgspec.structs.replace
    regions = []
    for region in topology.regions:
        router = _name(f"{region.name}-router-0", f"{region.name}-router", values)
        nodes = tuple(
            replace(node, host=_name(group.pod(node), f"{region.name}-nodes", values))
            for group in groups(region)
            for node in group.nodes
        )
        regions.append(
            replace(region, http=f"{router}:{HTTP}", grpc=f"{router}:{GRPC}", nodes=nodes)
        )
    return replace(
        topology,
        edges=tuple(  # the Ingress speaks https with callers
            replace(one, listen=f"0.0.0.0:{values.port}", tls=None) for one in topology.edges
        ),
        regions=tuple(regions),
        routing=replace(topology.routing, network_trusted=True, simulate_round_trips=False),
        secrets=replace(
            topology.secrets,
            region=f"file:{objects.SECRETS}/region",
            fleet=f"file:{objects.SECRETS}/fleet",
        ),
    )


def groups(region: Region) -> list[Group]:
    """In the order of the topology's nodes, which stays that of the whole."""
    found: list[Group] = []
    for node in region.nodes:
        numbered = _NUMBERED.fullmatch(node.name)
        last = found[-1] if found else None
        if last is not None and numbered is not None and _continues(last, node, numbered):
            found[-1] = Group(last.prefix, last.first, (*last.nodes, node))
        elif numbered is None or any(one.prefix == numbered["prefix"] for one in found):
            found.append(Group(node.name, 0, (node,)))  # its pod is called NAME-0
        else:
            found.append(Group(numbered["prefix"], int(numbered["number"]), (node,)))
    return found


def _continues(group: Group, node: Node, numbered: re.Match[str]) -> bool:
    before = group.nodes[-1]
    alike = msgspec.structs.replace(before, name=node.name) == node
    next_number = group.first + len(group.nodes)
    return group.prefix == numbered["prefix"] and int(numbered["number"]) == next_number and alike


def _edge(edge: Edge, text: str, values: Values) -> Iterator[Object]:
    name = f"edge-{edge.name}"
    labels = {"app.kubernetes.io/name": "skerry-edge", "skerry/edge": edge.name}
    yield objects.config_map(values, name, text)
    yield objects.service(values, name, labels, {"http": values.port}, kind=values.service)
    yield objects.service(values, f"{name}-pods", labels, {"http": values.port}, headless=True)
    template = objects.pod(
        values, labels, image=values.images.edge, command=["edge", "--name", edge.name],
        sizes=values.edge, topology=name, probe_port=values.port,
    )  # fmt: skip
    yield objects.stateful(
        values, name, labels, template, service_name=f"{name}-pods", replicas=values.edges.least
    )
    yield objects.disruption(values, name, labels, spare=1)
    if values.edges.most > values.edges.least:
        yield _scaling(values, name, labels)


def _scaling(values: Values, name: str, labels: dict[str, str]) -> Object:
    target = {"type": "Utilization", "averageUtilization": values.edges.cpu_percent}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": objects.meta(values, name, labels),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name},
            "minReplicas": values.edges.least,
            "maxReplicas": values.edges.most,
            "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
        },
    }


def _region(region: Region, text: str, values: Values) -> Iterator[Object]:
    name, router = f"region-{region.name}", f"{region.name}-router"
    labels = {"app.kubernetes.io/name": "skerry-router", "skerry/region": region.name}
    yield objects.config_map(values, name, text)
    ports = {"http": HTTP, "grpc": GRPC}
    yield objects.service(values, router, labels, ports, headless=True)
    template = objects.pod(
        values, labels, image=values.images.router, command=["router", "--name", region.name],
        sizes=values.router, topology=name, probe_port=HTTP,
    )  # fmt: skip
    yield objects.stateful(values, router, labels, template, service_name=router)
    yield objects.inner_policy(values, router, labels)
    inside = {"app.kubernetes.io/name": "skerry-node", "skerry/region": region.name}
    yield objects.service(values, f"{region.name}-nodes", inside, {"kv": 1}, headless=True)
    yield objects.inner_policy(values, f"{region.name}-nodes", inside)
    for group in groups(region):
        yield from _nodes(region, group, inside, name, values)


def _nodes(
    region: Region, group: Group, inside: dict[str, str], topology: str, values: Values
) -> Iterator[Object]:
    node = group.nodes[0]
    labels = {**inside, "skerry/nodes": group.prefix, "skerry/role": node.role.value}
    numbered = group.pod(node) == node.name
    gpus = {values.gpu: str(node.parallel.ranks)} if node.device == "cuda" else None
    template = objects.pod(
        values, labels, image=values.images.node,
        command=["node", "--name", "$(POD_NAME)" if numbered else node.name],
        sizes=values.node, topology=topology, extra=gpus,
        selector=values.gpu_selector if gpus else None,
    )  # fmt: skip
    least, most = _bounds(region, group)
    yield objects.stateful(
        values, group.prefix, labels, template, service_name=f"{region.name}-nodes",
        replicas=least, first=group.first,
    )  # fmt: skip
    yield objects.disruption(values, group.prefix, labels, spare=1)
    if most > least:
        yield _wanted(region, node, values, group.prefix, labels, least, most)


def _bounds(region: Region, group: Group) -> tuple[int, int]:
    """How many of its pods there may be: all, but for a model that is scaled and whose nodes of a
    role are all alike. Where they are several sets, none of them could tell its share."""
    node, there = group.nodes[0], len(group.nodes)
    scale = region.scale.get(node.model)
    alike = sum((one.model, one.role) == (node.model, node.role) for one in region.nodes) == there
    if scale is None or not alike:
        return there, there
    most = there if scale.most is None else min(scale.most, there)
    return min(scale.least, most), most


def _wanted(
    region: Region,
    node: Node,
    values: Values,
    name: str,
    labels: dict[str, str],
    least: int,
    most: int,
) -> Object:
    """As many pods as the region's router wants. Raises ConfigError for a model that no label can
    name."""
    if not _LABEL.fullmatch(node.model):
        raise ConfigError(
            f"region {region.name!r} scales {node.model!r}, which Kubernetes cannot have as a "
            "label: give the model a short name of letters, digits, '-', '_' and '.', and this one "
            "as an alias"
        )
    chosen = {"region": region.name, "model": node.model, "role": node.role.value}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": objects.meta(values, name, labels),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name},
            "minReplicas": least,
            "maxReplicas": most,
            # The router has its own bounds on how often: ours would only come late.
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
            "metrics": [
                {
                    "type": "External",
                    "external": {
                        "metric": {
                            "name": "skerry_router_wanted_nodes",
                            "selector": {"matchLabels": chosen},
                        },
                        "target": {"type": "AverageValue", "averageValue": "1"},
                    },
                }
            ],
        },
    }


def _name(pod: str, service: str, values: Values) -> str:
    """What a pod is called in the cluster; it knows itself by it from the start."""
    return f"{pod}.{service}.{values.namespace}.svc.cluster.local"
