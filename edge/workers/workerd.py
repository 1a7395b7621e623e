"""JavaScript Workers on Cloudflare's own runtime: a bundle as a configuration of workerd.

Five services in one process: the Worker; `entry`, through which requests come; `control`, which the
host asks; `tail`, which is told of each run; and what leads outside: the edge, the store, other
Workers, the internet.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from core.config_workers import Workers
from edge.workers import tools
from edge.workers.bundle import Bundle, Language, Module, ModuleKind
from edge.workers.capnp import Embed, Value, render
from edge.workers.runtime import (
    AI_CACHE,
    CF_HEADER,
    NAMESPACE_HEADER,
    SCHEME_HEADER,
    TOKEN_HEADER,
    Launch,
    Seat,
)

_OURS = Path(__file__).parent / "js"
_DATE = "2025-10-08"
EMPTY_MB = 80.0
"""Measured: 56 to 63."""
"""Compatibility date of our own scripts."""
_V8 = ("--initial-old-space-size=1", "--max-semi-space-size=1")
"""In MB. What a request leaves behind lies mostly outside V8's heap, where V8 does not count it:
with its usual first limit some ten thousand requests come to 400 MB before it looks."""
_KINDS: dict[ModuleKind, str] = {
    "esm": "esModule",
    "text": "text",
    "data": "data",
    "wasm": "wasm",
}


class Workerd:
    language: Final[Language] = "javascript"

    async def prepare(self, seat: Seat, bundle: Bundle) -> Launch:
        """See `Runtime`."""
        program = tools.workerd()
        (seat.folder / "ours").mkdir()
        for script in _OURS.glob("*.js"):
            shutil.copy(script, seat.folder / "ours" / script.name)
        modules = [_module(seat.folder, number, one) for number, one in enumerate(bundle.modules)]
        if bundle.assets is not None:
            _unpack(seat.folder / "assets", bundle.assets.files)
        config: Value = {
            "services": _services(seat, bundle, modules),
            "sockets": [
                {
                    "name": "main",
                    "http": {
                        "cfBlobHeader": CF_HEADER,
                        "forwardedProtoHeader": SCHEME_HEADER,
                    },
                    "service": "entry",
                },
                {
                    "name": "control",
                    "address": f"unix:{seat.control}",
                    "http": {},
                    "service": "control",
                },
            ],
            "extensions": [
                {
                    "modules": [
                        {
                            "name": "skerry:ai",
                            "internal": True,
                            "esModule": Embed("ours/ai.js"),
                        }
                    ]
                }
            ],
            "logging": {"structuredLogging": True},
            "v8Flags": list(_V8),
        }
        text = (
            'using Workerd = import "/workerd/workerd.capnp";\n'
            f"const config :Workerd.Config = {render(config)};\n"
        )
        (seat.folder / "config.capnp").write_text(text, encoding="ascii")
        argv = (
            str(program),
            *("serve", str(seat.folder / "config.capnp"), "config", "--experimental"),
            *("--import-path", str(tools.workerd_schema())),
            *("--socket-fd", f"main={seat.listener}"),
        )
        return Launch(argv, empty_mb=EMPTY_MB)

    async def release(self, seat: Seat) -> None:
        """See `Runtime`: all that it has is in its folder."""


def _services(seat: Seat, bundle: Bundle, modules: Sequence[Value]) -> list[Value]:
    settings, front = bundle.settings, "assets" if bundle.assets else "worker"
    worker: dict[str, Value] = {
        "modules": modules,
        "compatibilityDate": settings.compatibility_date,
        "compatibilityFlags": list(settings.compatibility_flags),
        "bindings": _bindings(seat, bundle),
        "globalOutbound": "internet",
        "tails": ["tail"],
    }
    services: list[Value] = [
        {"name": "worker", "worker": worker},
        _own("entry", {"USER": front}, {"MARK": seat.mark}),
        _own("control", {"USER": "worker"}, {}),
        _own("tail", {}, {"MARK": seat.mark}),
        _outside("edge", seat.edge, {TOKEN_HEADER: seat.token}),
        _store(seat, AI_CACHE),
        *(_store(seat, one.binding) for one in settings.kv),
        *(_outside(f"worker:{one.binding}", f"unix:{seat.services[one.binding]}", {})
          for one in settings.services),
        _internet(seat.limits),
    ]  # fmt: skip
    if bundle.assets is not None:
        services.append(
            {
                "name": "assets",
                "assets": {
                    "path": str(seat.folder / "assets"),
                    "config": bundle.assets.settings,
                    "userWorker": "worker",
                },
            }
        )
    return services


def _bindings(seat: Seat, bundle: Bundle) -> list[Value]:
    settings = bundle.settings
    found: list[Value] = [
        *({"name": name, "json": text} for name, text in settings.vars),
        *({"name": name, "text": text} for name, text in seat.secrets.items()),
        *({"name": kv.binding, "kvNamespace": f"store:{kv.binding}"} for kv in settings.kv),
        *({"name": one.binding, "service": f"worker:{one.binding}"} for one in settings.services),
    ]
    if bundle.assets is not None and bundle.assets.binding is not None:
        files: Value = {"name": "assets", "entrypoint": "AssetWorker"}
        found.append({"name": bundle.assets.binding, "service": files})
    if settings.ai is not None:
        inner: list[Value] = [
            {"name": "edge", "service": "edge"},
            {"name": "cache", "service": f"store:{AI_CACHE}"},
        ]
        wrapped: Value = {"moduleName": "skerry:ai", "innerBindings": inner}
        found.append({"name": settings.ai, "wrapped": wrapped})
    return found


def _own(name: str, services: dict[str, str], texts: dict[str, str]) -> Value:
    """One of our own scripts."""
    bindings: list[Value] = [
        *({"name": binding, "service": service} for binding, service in services.items()),
        *({"name": binding, "text": text} for binding, text in texts.items()),
    ]
    worker: dict[str, Value] = {
        "modules": [{"name": f"{name}.js", "esModule": Embed(f"ours/{name}.js")}],
        "compatibilityDate": _DATE,
        "compatibilityFlags": ["service_binding_extra_handlers"],
        "bindings": bindings,
    }
    return {"name": name, "worker": worker}


def _outside(name: str, address: str, headers: dict[str, str]) -> Value:
    injected: list[Value] = [{"name": one, "value": value} for one, value in headers.items()]
    return {
        "name": name,
        "external": {"address": address, "http": {"injectRequestHeaders": injected}},
    }


def _store(seat: Seat, binding: str) -> Value:
    headers = {TOKEN_HEADER: seat.token, NAMESPACE_HEADER: binding}
    return _outside(f"store:{binding}", f"unix:{seat.store}", headers)


def _internet(limits: Workers) -> Value:
    allowed: dict[str, list[Value]] = {
        "public": ["public"],
        "any": ["public", "private", "local"],
        "none": [],
    }
    network: dict[str, Value] = {
        "allow": allowed[limits.fetch],
        "tlsOptions": {"trustBrowserCas": True},
    }
    return {"name": "internet", "network": network}


def _module(folder: Path, number: int, module: Module) -> Value:
    """Its file gets a name of ours: what a Worker calls its modules need not be a path."""
    path = folder / f"module-{number}"
    path.write_bytes(module.body)
    return {"name": module.name, _KINDS[module.kind]: Embed(path.name)}


def _unpack(folder: Path, files: Sequence[tuple[str, bytes]]) -> None:
    folder.mkdir()
    for name, body in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
