"""What a Python Worker asks for that it cannot have here, named before it is deployed. Pure."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath

from edge.workers.bundle import Module

WORKERS = frozenset({
    "Blob", "Body", "Context", "FetchResponse", "File", "FormData", "Headers", "Request",
    "Response", "WorkerEntrypoint", "env", "fetch", "handler", "python_from_rpc", "python_to_rpc",
    "waitUntil", "wait_until",
})  # fmt: skip
JS = frozenset({
    "Array", "Blob", "Date", "File", "FormData", "Headers", "JSON", "Math", "Object",
    "ReadableStream", "Request", "Response", "TextDecoder", "TextEncoder", "TransformStream", "URL",
    "URLSearchParams", "Uint8Array", "WritableStream", "clearTimeout", "console", "crypto", "fetch",
    "setTimeout",
})  # fmt: skip
FFI = frozenset({
    "JsArray", "JsException", "JsProxy", "create_once_callable", "create_proxy", "to_js",
})  # fmt: skip
OURS = {"workers": WORKERS, "js": JS, "pyodide.ffi": FFI}
_ROOTS = frozenset({"workers", "js", "pyodide"})


def complaints(modules: Sequence[Module]) -> list[str]:
    """One line each, with file and line; nothing for a Worker that can be tried. The first of
    `modules` is the entry."""
    folder = PurePosixPath(modules[0].name).parent
    own = {name for module in modules for name in _importable(module, folder)}
    found: list[str] = []
    for number, module in enumerate(modules):
        if module.kind != "python":
            continue
        try:
            tree = ast.parse(module.body, module.name)
        except (SyntaxError, ValueError) as error:
            line = error.lineno if isinstance(error, SyntaxError) else 1
            what = error.msg if isinstance(error, SyntaxError) else str(error)
            found.append(f"{module.name}:{line}: {what}")
            continue
        found += [f"{module.name}:{line}: {what}" for line, what in _imports(tree, own)]
        if number == 0 and not _has_handler(tree):
            found.append(
                f"{module.name}: it has neither a class Default(WorkerEntrypoint) nor a function"
                " on_fetch or on_scheduled"
            )
    return found


def _imports(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _module(node.lineno, alias.name, own)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield from _module(node.lineno, node.module, own)
            if (known := OURS.get(node.module)) is None:
                continue
            for alias in node.names:
                if alias.name not in known and alias.name != "*":
                    yield node.lineno, _missing(node.module, alias.name, known)


def _module(line: int, name: str, own: set[str]) -> Iterator[tuple[int, str]]:
    root = name.partition(".")[0]
    if root in _ROOTS:
        if name not in OURS and name != "pyodide":
            yield line, f"the module {name} is not supported here"
    elif root not in sys.stdlib_module_names and root not in own:
        yield (
            line,
            (
                f"the package {root!r} cannot be had here: Python Workers have the standard library"
                " and the files beside their entry"
            ),
        )


def _missing(module: str, name: str, known: Iterable[str]) -> str:
    return f"{module}.{name} is not supported here; there are: {', '.join(sorted(known))}"


def _importable(module: Module, folder: PurePosixPath) -> Iterator[str]:
    """The first part of the names by which others import it: from the root, and from `folder`."""
    path = PurePosixPath(module.name)
    if path.suffix == ".py":
        yield path.parts[0].removesuffix(".py")
        if path.is_relative_to(folder):
            yield path.relative_to(folder).parts[0].removesuffix(".py")


def _has_handler(tree: ast.Module) -> bool:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Default":
            return True
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in (
            "on_fetch", "on_scheduled",
        ):  # fmt: skip
            return True
        if isinstance(node, ast.ImportFrom) and any(
            (alias.asname or alias.name) in ("Default", "on_fetch", "*") for alias in node.names
        ):
            return True
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id in ("Default", "on_fetch")
            for target in node.targets
        ):
            return True
    return False
