"""What a Python Worker cannot have here is named with file and line; and what it may import is what
there is."""

from __future__ import annotations

import pytest

from edge.workers.bundle import Module
from edge.workers.python.check import FFI, JS, WORKERS, complaints
from edge.workers.python.egress import is_public
from edge.workers.python.inside import api, ffi, js

GOOD = "class Default(WorkerEntrypoint): pass\n"


def said(code: str, *others: str) -> list[str]:
    modules = [Module("src/entry.py", "python", code.encode())]
    modules += [Module(name, "python", b"x = 1\n") for name in others]
    return complaints(modules)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import numpy\n" + GOOD, "src/entry.py:1: the package 'numpy' cannot be had here"),
        ("\nfrom fastapi import FastAPI\n" + GOOD, "src/entry.py:2: the package 'fastapi'"),
        ("from workers import DurableObject\n" + GOOD, "workers.DurableObject is not supported"),
        ("from js import WebSocketPair\n" + GOOD, "js.WebSocketPair is not supported here"),
        ("from pyodide.http import pyfetch\n" + GOOD, "pyodide.http is not supported here"),
        ("def f(:\n", "src/entry.py:1: "),
        ("x = 1\n", "neither a class Default(WorkerEntrypoint) nor a function on_fetch"),
    ],
)
def test_it_is_named_with_its_place(code: str, words: str) -> None:
    found = said(code)
    assert len(found) == 1
    assert words in found[0]


def test_the_library_and_own_files_are_fine() -> None:
    code = "import json, asyncio.queues\nimport helper\nfrom parts import one\nfrom . import two\n"
    assert said(code + GOOD, "src/helper.py", "src/parts/one.py") == []
    assert said("async def on_fetch(request): ...\n") == []
    assert said("from helper import Default\n", "src/helper.py") == []


def test_the_lists_are_those_of_the_modules() -> None:
    hidden = {"import_from_javascript"}
    assert set(api.__all__) - hidden == WORKERS
    assert set(js.__all__) == JS
    assert set(ffi.__all__) == FFI
    for module, names in ((api, WORKERS), (js, JS), (ffi, FFI)):
        assert all(hasattr(module, name) for name in names)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True), ("2606:2800:220:1::", True), ("127.0.0.1", False),
        ("10.1.2.3", False), ("169.254.169.254", False), ("::1", False), ("fe80::1%eth0", False),
        ("::ffff:127.0.0.1", False), ("100.64.0.1", False), ("0.0.0.0", False),
        ("224.0.0.1", False), ("64:ff9b::7f00:1", False), ("64:ff9b::808:808", True),
        ("2002:7f00:1::", False), ("2002:808:808::", True), ("::ffff:8.8.8.8", True),
    ],
)  # fmt: skip
def test_what_counts_as_public(address: str, public: bool) -> None:
    assert is_public(address) is public
