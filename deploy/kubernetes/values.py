"""What a cluster decides and a topology does not: images, sizes, how many. As TOML."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from core.config_locate import explain
from core.errors import ConfigError

_Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
_Quantity = Annotated[str, msgspec.Meta(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
_Image = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-zA-Z0-9./:@_-]*$")]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Images(_Section, frozen=True):
    edge: _Image = "skerry-edge:latest"
    router: _Image = "skerry-router:latest"
    node: _Image = "skerry-node:latest"


class Sizes(_Section, frozen=True):
    """Requests of a container; memory is its limit as well."""

    cpu: _Quantity = "500m"
    memory: _Quantity = "512Mi"


class EdgeScale(_Section, frozen=True):
    """Replicas of an edge, by its CPU. More than one need Redis for limits that hold over all."""

    least: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    most: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 4
    cpu_percent: Annotated[int, msgspec.Meta(ge=10, le=100)] = 70


class Values(_Section, frozen=True):
    namespace: _Name = "skerry"
    images: Images = Images()
    edge: Sizes = Sizes(memory="512Mi")
    router: Sizes = Sizes(cpu="1", memory="512Mi")
    node: Sizes = Sizes(cpu="4", memory="16Gi")
    edges: EdgeScale = EdgeScale()
    gpu: str = "nvidia.com/gpu"
    """The resource that a node with device = "cuda" asks for, one for each of its ranks."""
    gpu_selector: dict[str, str] = {}
    """Labels of the machines that have them."""
    storage: _Quantity = "10Gi"
    """Of each process's state: keys, ledger, disk tier."""
    storage_class: str | None = None
    service: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """How an edge is reached from outside of the cluster."""
    secret: _Name = "skerry-secrets"
    """A Secret with the keys `region` and `fleet`, and more where the topology refers to more."""
    port: _Port = 8787


def read_values(path: Path | None) -> Values:
    """Raises ConfigError with file and line."""
    if path is None:
        return Values()
    try:
        text = path.read_text(encoding="utf-8")
        raw: dict[str, Any] = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    try:
        values = msgspec.convert(raw, Values)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}:{explain(str(error), text, raw, Values)}") from error
    if values.edges.least > values.edges.most:
        raise ConfigError(
            f"{path}: edges.least is {values.edges.least}, which is more than edges.most,"
            f" {values.edges.most}"
        )
    return values
