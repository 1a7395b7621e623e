"""The house: who may import whom (DESIGN §3 as a table), and how long a file may be."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("core", "edge", "regional", "kernels", "deploy", "loadtest")
LONGEST_FILE = 400
GENERATED = {"regional/pb/node_pb2.py"}

HEAVY = ("torch", "triton", "transformers", "safetensors")
ABOVE = ("edge", "regional", "deploy", "loadtest")
ENGINE = ("core.engine", "core.kv", "core.models", "kernels")

# Where a file lies → what nothing in it may import, itself or anything below the name.
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "kernels": ("core", *ABOVE),
    "core": ABOVE,
    "core/text": ("core.engine", "core.kv", "kernels", "grpc", *HEAVY),
    "core/models": ("core.engine", "grpc", "core.text"),
    "edge": (*HEAVY, *ENGINE, "core.text", "grpc", "tokenizers", "jinja2", "llguidance", "regional",
             "deploy", "loadtest"),
    "regional": (*HEAVY, "kernels", "edge", "deploy", "loadtest"),
    "deploy": ("loadtest", "torch", "grpc"),
    "loadtest": ("deploy", "torch", "grpc"),
}  # fmt: skip
# Programs that run in the venv of the engines we measure against, never in ours.
ALLOWED = {"loadtest/bench/transformers_worker.py": ("torch",)}
# The modules directly in core/ are every process's vocabulary: nothing below them, nothing heavy.
FORBIDDEN_IN_VOCABULARY = (*HEAVY, *ENGINE, "core.text", "grpc", "tokenizers", "jinja2", "numpy")
# What runs before anything is installed.
STANDARD_LIBRARY_ONLY = ("deploy/__init__.py", "deploy/doctor.py", "deploy/setup_env.py",
                         "deploy/progress.py", "deploy/child.py", "deploy/sizes.py",
                         "deploy/cli.py", "deploy/ssh/agent.py")  # fmt: skip

# Package → what must not be loaded when all its modules are.
NOT_LOADED: dict[str, tuple[str, ...]] = {
    "edge": FORBIDDEN["edge"],
    "regional": FORBIDDEN["regional"],
    "core": (),
}


def sources() -> list[Path]:
    found = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    return sorted(path for path in found if path.relative_to(ROOT).as_posix() not in GENERATED)


def imports(source: str, package: tuple[str, ...]) -> Iterator[str]:
    """Every name imported, `from a import b` as `a.b` since b may be a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def is_under(name: str, top: str) -> bool:
    return name == top or name.startswith(f"{top}.")


def violations(relative: str, source: str) -> list[str]:
    path = Path(relative)
    banned = [
        top for place, tops in FORBIDDEN.items() if path.is_relative_to(place) for top in tops
    ]
    if path.parent == Path("core"):
        banned += FORBIDDEN_IN_VOCABULARY
    banned = [top for top in banned if top not in ALLOWED.get(relative, ())]
    names = set(imports(source, path.parent.parts))
    found = [f"{relative} imports {n}" for n in names if any(is_under(n, top) for top in banned)]
    if relative in STANDARD_LIBRARY_ONLY:
        tops = {name.split(".")[0] for name in names} - {"deploy"} - sys.stdlib_module_names
        found += [f"{relative} imports {top}, which may not be installed yet" for top in tops]
    return sorted(found)


def test_imports_point_one_way() -> None:
    found = [
        line
        for path in sources()
        for line in violations(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("relative", "source"),
    [
        ("edge/app.py", "import torch.nn"),
        ("edge/api/openai.py", "from core import text"),
        ("edge/api/openai.py", "from core.kv.geometry import Geometry"),
        ("edge/routing/ring.py", "def f():\n    import grpc"),
        ("regional/node/app.py", "from torch import Tensor"),
        ("regional/app.py", "from edge.app import run"),
        ("core/types.py", "from . import engine"),
        ("core/types.py", "from .text import model"),
        ("core/engine/rank.py", "import deploy.launcher"),
        ("kernels/attention.py", "from core.types import Role"),
        ("deploy/doctor.py", "import httpx"),
        ("core/text/model.py", "from ..engine import rank"),
    ],
)
def test_wrong_direction_is_seen(relative: str, source: str) -> None:
    assert violations(relative, source) != []


@pytest.mark.parametrize(
    ("relative", "source"),
    [
        ("edge/app.py", "from core.types import Role"),
        ("edge/app.py", "import torchlight"),
        ("regional/app.py", "from core.text.model import load_text"),
        ("core/engine/rank.py", "import torch\nfrom kernels import attention"),
        ("deploy/launcher.py", "import httpx\nfrom edge.app import run"),
        ("deploy/doctor.py", "import socket\nfrom deploy import progress"),
    ],
)
def test_right_direction_passes(relative: str, source: str) -> None:
    assert violations(relative, source) == []


@pytest.mark.parametrize("package", NOT_LOADED)
def test_loaded_modules_bring_nothing_forbidden_in(package: str) -> None:
    """The same through the imports of imports: all modules of a package, in a fresh interpreter."""
    pattern = "*.py" if package == "core" else "**/*.py"
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / package).glob(pattern)
        if path.name != "__main__.py"
    ]
    code = f"import sys\nfor name in {modules!r}: __import__(name)\nprint(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    banned = NOT_LOADED[package] or FORBIDDEN_IN_VOCABULARY
    assert package in loaded
    assert [name for name in loaded if name in banned] == []


@pytest.mark.parametrize("module", ["edge.app", "regional.app", "regional.node.app"])
def test_entry_points_exist(module: str) -> None:
    """What `python -m edge` and `python -m regional` run, and what the test above must cover."""
    assert (ROOT / f"{module.replace('.', '/')}.py").is_file()


def test_files_are_short_enough() -> None:
    files = [*sources(), *sorted((ROOT / "tests").rglob("*.py"))]
    lengths = {path.relative_to(ROOT).as_posix(): _lines(path) for path in files}
    assert {name: n for name, n in lengths.items() if n > LONGEST_FILE} == {}


def test_each_package_tells_what_it_is() -> None:
    silent = [
        path.relative_to(ROOT).as_posix()
        for path in sources()
        if path.name == "__init__.py" and not ast.get_docstring(ast.parse(path.read_text("utf-8")))
    ]
    assert silent == []


def _lines(path: Path) -> int:
    return path.read_text("utf-8").count("\n")
