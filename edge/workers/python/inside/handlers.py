"""The Worker's own code: found, imported, and called in the style that it is written in."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from . import api, ffi, js
from .api import Env, WorkerEntrypoint
from .context import Context
from .messages import Request, Response
from .values import JsObject


class NoHandler(Exception):
    """The Worker cannot do what it was asked."""


def make_known() -> None:
    """Under the names by which Cloudflare's Workers import them."""
    pyodide = ModuleType("pyodide")
    pyodide.__dict__["ffi"] = ffi
    pyodide.__path__ = []
    sys.modules |= {"workers": api, "js": js, "pyodide": pyodide, "pyodide.ffi": ffi}


def load(root: Path, entry: str) -> Handlers:
    """Import `entry`, a path below `root`. Raises what its code raises, and NoHandler."""
    path = PurePosixPath(entry)
    sys.path[:0] = list(dict.fromkeys((str(root / path.parent), str(root))))
    module = importlib.import_module(path.stem)
    return Handlers(module, entry)


class Handlers:
    def __init__(self, module: ModuleType, entry: str) -> None:
        self._default = getattr(module, "Default", None)
        self._module = module
        if self._default is not None:
            if not (
                isinstance(self._default, type) and issubclass(self._default, WorkerEntrypoint)
            ):
                raise NoHandler(f"{entry}: Default is no class that is made from WorkerEntrypoint")
        elif self._older("fetch") is None and self._older("scheduled") is None:
            raise NoHandler(
                f"{entry} has neither a class Default(WorkerEntrypoint) nor a function on_fetch"
            )

    async def fetch(self, request: Request, env: Env, ctx: Context) -> Response:
        """Raises NoHandler, TypeError for what is no Response, and what the code raises."""
        made = await self._called("fetch", (request,), env, ctx)
        if not isinstance(made, Response):
            hint = "; is a return missing?" if made is None else ""
            if isinstance(made, str | bytes):
                hint = "; return Response(…)"
            elif isinstance(made, dict | list):
                hint = "; return Response.from_json(…)"
            what = "None" if made is None else f"a {type(made).__name__}"
            raise TypeError(f"fetch returned {what}, not a Response{hint}")
        return made

    async def scheduled(self, cron: str, time_ms: float, env: Env, ctx: Context) -> None:
        controller = JsObject(cron=cron, scheduledTime=time_ms, type="scheduled")
        await self._called("scheduled", (controller, env, ctx), env, ctx)

    async def _called(self, name: str, given: tuple[Any, ...], env: Env, ctx: Context) -> Any:
        if self._default is not None:
            method = getattr(self._default(ctx, env), name, None)
            if method is None:
                raise NoHandler(f"class Default has no method {name}")
        else:
            method = self._older(name)
            if method is None:
                raise NoHandler(f"there is no function on_{name}")
            given = (*given[:1], env, ctx)
        made = method(*given[: _takes(method)])
        return await made if inspect.isawaitable(made) else made

    def _older(self, name: str) -> Callable[..., Any] | None:
        found: Callable[..., Any] | None = getattr(self._module, f"on_{name}", None)
        return found


def _takes(function: Callable[..., Any]) -> int:
    """How many positional arguments it has room for."""
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return 3
    return sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)
