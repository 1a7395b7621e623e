"""The keys of wrangler's configuration: those that mean something here, those that change nothing
here, and those of services that are not here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

_Binding = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_$][A-Za-z0-9_$]*$")]
_Date = Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d{2}-\d{2}$")]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Ai(_Section, frozen=True):
    binding: _Binding
    remote: bool = True
    """Without a meaning here: the models are the world's."""


class KvNamespace(_Section, frozen=True):
    binding: _Binding
    id: str | None = None
    """The Worker's name and the binding, when absent."""
    preview_id: str | None = None
    """What `dev` takes instead of `id`."""
    remote: bool = False


class ServiceBinding(_Section, frozen=True):
    binding: _Binding
    service: str
    environment: str | None = None
    entrypoint: str | None = None
    remote: bool = False


class Triggers(_Section, frozen=True):
    crons: tuple[str, ...] = ()


class RoutePattern(_Section, frozen=True):
    pattern: str
    zone_name: str | None = None
    zone_id: str | None = None
    custom_domain: bool = False
    """The pattern is a bare host: all of its paths."""


class Assets(_Section, frozen=True):
    directory: str
    binding: _Binding | None = None
    html_handling: Literal[
        "auto-trailing-slash", "force-trailing-slash", "drop-trailing-slash", "none"
    ] = "auto-trailing-slash"
    not_found_handling: Literal["none", "404-page", "single-page-application"] = "none"
    run_worker_first: bool | tuple[str, ...] = False


class Limits(_Section, frozen=True):
    cpu_ms: Annotated[int, msgspec.Meta(ge=1)] | None = None
    subrequests: int | None = None
    """Without a meaning here: they are not counted."""


class Config(_Section, frozen=True):
    """What is left once keys without a meaning here are taken out."""

    name: str
    main: str
    compatibility_date: _Date
    compatibility_flags: tuple[str, ...] = ()
    route: str | RoutePattern | None = None
    routes: tuple[str | RoutePattern, ...] = ()
    vars: dict[_Binding, Any] = {}
    ai: Ai | None = None
    kv_namespaces: tuple[KvNamespace, ...] = ()
    services: tuple[ServiceBinding, ...] = ()
    triggers: Triggers = Triggers()
    assets: Assets | None = None
    limits: Limits = Limits()
    define: dict[str, str] = {}
    alias: dict[str, str] = {}
    minify: bool = False
    keep_names: bool = True
    tsconfig: str | None = None
    workers_dev: bool = True


NOT_INHERITED = ("vars", "ai", "kv_namespaces", "services", "define")
"""An environment has its own of these, or none."""
HARMLESS = frozenset({
    "$schema", "account_id", "dev", "env", "keep_vars", "legacy_env", "observability",
    "placement", "preview_urls", "send_metrics", "upload_source_maps",
})  # fmt: skip
"""Of wrangler, and nothing that a Worker could see here."""
UNSUPPORTED = {
    "analytics_engine_datasets": "Analytics Engine", "browser": "Browser Rendering",
    "build": "a build command of one's own", "cloudchamber": "Containers",
    "containers": "Containers", "d1_databases": "D1", "data_blobs": "data blobs",
    "dispatch_namespaces": "Workers for Platforms", "durable_objects": "Durable Objects",
    "find_additional_modules": "modules without a bundle", "hyperdrive": "Hyperdrive",
    "images": "Images", "logpush": "Logpush", "media": "Media", "migrations": "Durable Objects",
    "mtls_certificates": "client certificates", "no_bundle": "modules without a bundle",
    "pipelines": "Pipelines", "queues": "Queues", "r2_buckets": "R2",
    "ratelimits": "rate limits of Workers", "rules": "module rules",
    "secrets_store_secrets": "the Secrets Store", "send_email": "Email",
    "site": "Workers Sites (say `assets`)", "tail_consumers": "tail Workers",
    "text_blobs": "text blobs", "unsafe": "unsafe bindings", "vectorize": "Vectorize",
    "version_metadata": "version metadata", "vpc_services": "VPC services",
    "wasm_modules": "wasm_modules (import the module)", "worker_loaders": "Worker loaders",
    "workflows": "Workflows",
}  # fmt: skip
