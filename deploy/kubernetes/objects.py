"""The Kubernetes objects that more than one part of a world needs, as plain tables. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deploy.kubernetes.values import Sizes, Values

Object = dict[str, Any]
STATE, TOPOLOGY = "/var/lib/skerry", "/etc/skerry"
SECRETS = "/run/secrets/skerry"
PART_OF = "app.kubernetes.io/part-of"
GRACE_S = 60


def meta(values: Values, name: str, labels: Mapping[str, str]) -> Object:
    return {"name": name, "namespace": values.namespace, "labels": {PART_OF: "skerry", **labels}}


def config_map(values: Values, name: str, text: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": meta(values, name, {}),
        "data": {"topology.toml": text},
    }


def service(
    values: Values,
    name: str,
    labels: Mapping[str, str],
    ports: Mapping[str, int],
    *,
    headless: bool = False,
    kind: str = "ClusterIP",
) -> Object:
    """`headless`: names of the pods themselves, also before they are ready."""
    spec: Object = {
        "selector": dict(labels),
        "ports": [{"name": key, "port": port, "targetPort": port} for key, port in ports.items()],
    }
    if headless:
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    else:
        spec["type"] = kind
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta(values, name, labels),
            "spec": spec}  # fmt: skip


def disruption(values: Values, name: str, labels: Mapping[str, str], *, spare: int) -> Object:
    """At most `spare` pods are taken away at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": meta(values, name, labels),
        "spec": {"maxUnavailable": spare, "selector": {"matchLabels": dict(labels)}},
    }


def inner_policy(values: Values, name: str, labels: Mapping[str, str]) -> Object:
    """Only our own pods reach routers and nodes: they speak plaintext behind a secret."""
    ours = {"podSelector": {"matchLabels": {PART_OF: "skerry"}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": meta(values, name, labels),
        "spec": {
            "podSelector": {"matchLabels": dict(labels)},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [ours]}],
        },
    }


def pod(
    values: Values,
    labels: Mapping[str, str],
    *,
    image: str,
    command: Sequence[str],
    sizes: Sizes,
    topology: str,
    extra: Mapping[str, str] | None = None,
    probe_port: int | None = None,
    selector: Mapping[str, str] | None = None,
) -> Object:
    """A pod template of one process. `extra`: further resources; `topology`: its ConfigMap."""
    limits = {"memory": sizes.memory, **(extra or {})}
    container: Object = {
        "name": "skerry",
        "image": image,
        "args": [*command, "--topology", f"{TOPOLOGY}/topology.toml", "--state", STATE],
        "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "resources": {"requests": {"cpu": sizes.cpu, **limits}, "limits": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "state", "mountPath": STATE},
            {"name": "topology", "mountPath": TOPOLOGY, "readOnly": True},
            {"name": "secrets", "mountPath": SECRETS, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    if probe_port is not None:
        container["readinessProbe"] = _probe("/readyz", probe_port, 2)
        container["livenessProbe"] = _probe("/healthz", probe_port, 10)
    spec: Object = {
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "fsGroup": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [
            {"name": "topology", "configMap": {"name": topology}},
            {"name": "secrets", "secret": {"secretName": values.secret, "defaultMode": 0o440}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    if selector:
        spec["nodeSelector"] = dict(selector)
    return {"metadata": {"labels": {PART_OF: "skerry", **labels}}, "spec": spec}


def stateful(
    values: Values,
    name: str,
    labels: Mapping[str, str],
    template: Object,
    *,
    service_name: str,
    replicas: int = 1,
    first: int = 0,
) -> Object:
    """Pods NAME-first, NAME-(first+1), …, each with a disk of its own."""
    claim: Object = {
        "metadata": {"name": "state"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": values.storage}},
        },
    }
    if values.storage_class is not None:
        claim["spec"]["storageClassName"] = values.storage_class
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": meta(values, name, labels),
        "spec": {
            "serviceName": service_name,
            "replicas": replicas,
            "ordinals": {"start": first},
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": dict(labels)},
            "template": template,
            "volumeClaimTemplates": [claim],
        },
    }


def _probe(path: str, port: int, period_s: int) -> Object:
    return {"httpGet": {"path": path, "port": port}, "periodSeconds": period_s,
            "failureThreshold": 3}  # fmt: skip
