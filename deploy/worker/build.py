"""From a project's sources to a bundle: esbuild for JavaScript and TypeScript; Python as it is."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from core.errors import ConfigError
from deploy.worker.wrangler import Project, settings_of
from edge.workers import tools
from edge.workers.bundle import Assets, Bundle, Module
from edge.workers.python.check import complaints

MAX_ASSET_BYTES = 25 << 20
_LOADERS = {".txt": "text", ".html": "text", ".sql": "text", ".bin": "copy", ".wasm": "copy"}
_KINDS: dict[str, str] = {".wasm": "wasm", ".bin": "data"}
_NODE = (
    "assert", "async_hooks", "buffer", "child_process", "cluster", "console", "crypto", "dns",
    "events", "fs", "http", "https", "module", "net", "os", "path", "perf_hooks", "process",
    "querystring", "readline", "stream", "string_decoder", "timers", "tls", "url", "util", "vm",
    "zlib",
)  # fmt: skip
"""Modules of Node's that code may import without `node:`, where nodejs_compat is set."""


@dataclass(frozen=True, slots=True)
class Built:
    """`sources`: the files that went into it, whose change makes it another one."""

    bundle: Bundle
    sources: tuple[Path, ...]


class _Input(msgspec.Struct):
    bytes: int = 0


class _Output(msgspec.Struct):
    exports: tuple[str, ...] = ()


class _Meta(msgspec.Struct):
    inputs: dict[str, _Input]
    outputs: dict[str, _Output]


class _SourceMap(msgspec.Struct):
    version: int
    sources: list[str]
    mappings: str
    names: list[str] = []


def build(project: Project, *, name: str | None = None, dev: bool = False) -> Built:
    """Raises ConfigError, with esbuild's own words where the code is at fault."""
    settings = settings_of(project, name=name, dev=dev)
    assets, files = _assets(project)
    if project.language == "python":
        modules, sources, source_map = _python(project)
    else:
        modules, sources, source_map = _bundled(project)
    bundle = Bundle(settings=settings, modules=modules, source_map=source_map, assets=assets)
    return Built(bundle, (project.file, *sources, *files))


def _bundled(project: Project) -> tuple[tuple[Module, ...], tuple[Path, ...], bytes]:
    with tempfile.TemporaryDirectory(prefix="skerry-build-") as scratch:
        out = Path(scratch)
        command = [str(tools.esbuild()), *_options(project, out), str(project.main.resolve())]
        done = subprocess.run(
            command, cwd=project.folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ConfigError(f"{project.main} does not build:\n{done.stderr.strip()}")
        meta = msgspec.json.decode((out / "meta.json").read_bytes(), type=_Meta)
        if not any("default" in one.exports for one in meta.outputs.values()):
            _without_handler(project)
        sources = tuple(project.folder / path for path in meta.inputs)
        raw = msgspec.json.decode((out / "worker.js.map").read_bytes(), type=_SourceMap)
        names = [_shown(one, out, project.folder) for one in raw.sources]
        source_map = msgspec.json.encode(msgspec.structs.replace(raw, sources=names, names=[]))
        others = sorted(p for p in out.iterdir() if p.suffix in _KINDS)
        modules = [
            Module("worker.js", "esm", (out / "worker.js").read_bytes()),
            *(Module(f"./{p.name}", "wasm" if p.suffix == ".wasm" else "data", p.read_bytes())
              for p in others),
        ]  # fmt: skip
        return tuple(modules), sources, source_map


def _without_handler(project: Project) -> None:
    """Raises ConfigError, unless there are files that are served without one."""
    if project.config.assets is None:
        raise ConfigError(
            f"{project.main} cannot be served:\n{project.main.name}: it has no `export default`,"
            " neither an object with fetch or scheduled nor a class"
        )


def _options(project: Project, out: Path) -> Iterator[str]:
    config = project.config
    yield from ("--bundle", "--format=esm", "--target=es2024", "--log-level=error", "--color=false")
    yield from ("--conditions=workerd,worker,browser", "--main-fields=browser,module,main")
    yield from ("--external:cloudflare:*", "--external:node:*", "--external:workerd:*")
    yield from (f"--outfile={out / 'worker.js'}", f"--metafile={out / 'meta.json'}")
    yield from ("--sourcemap=external", "--sources-content=false", "--asset-names=[name]-[hash]")
    yield from (f"--loader:{suffix}={loader}" for suffix, loader in _LOADERS.items())
    yield from (f"--define:{name}={value}" for name, value in config.define.items())
    yield from (f"--alias:{name}={value}" for name, value in config.alias.items())
    if any(flag.startswith("nodejs_compat") for flag in config.compatibility_flags):
        yield from (f"--alias:{name}=node:{name}" for name in _NODE if name not in config.alias)
    if config.minify:
        yield "--minify"
    if config.keep_names:
        yield "--keep-names"
    if config.tsconfig is not None:
        yield f"--tsconfig={project.folder / config.tsconfig}"


def _shown(source: str, out: Path, folder: Path) -> str:
    """A source as its developer calls it: relative to the project."""
    path = (out / source).resolve()
    try:
        return path.relative_to(folder.resolve()).as_posix()
    except ValueError:
        return path.name


def _python(project: Project) -> tuple[tuple[Module, ...], tuple[Path, ...], bytes]:
    """All Python files beside and below the main one; they import each other from its folder."""
    root = project.main.parent
    found = sorted(
        path
        for path in root.rglob("*.py")
        if path != project.main
        and not any(part.startswith(".") or part == "__pycache__" for part in _inner(path, root))
    )
    sources = (project.main, *found)
    modules = tuple(
        Module(path.relative_to(root).as_posix(), "python", path.read_bytes()) for path in sources
    )
    if wrong := complaints(modules):
        raise ConfigError(f"{project.main} cannot be served:\n" + "\n".join(wrong))
    return modules, sources, b""


def _inner(path: Path, root: Path) -> tuple[str, ...]:
    return path.relative_to(root).parts


def _assets(project: Project) -> tuple[Assets | None, tuple[Path, ...]]:
    config = project.config.assets
    if config is None:
        return None, ()
    folder = project.folder / config.directory
    if not folder.is_dir():
        raise ConfigError(f"{project.file}: assets.directory: {folder} is no folder")
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in paths:
        if path.stat().st_size > MAX_ASSET_BYTES:
            raise ConfigError(f"{path}: an asset has at most {MAX_ASSET_BYTES >> 20} MB")
    special = {"_headers": "headers", "_redirects": "redirects", ".assetsignore": "ignore"}
    settings: dict[str, object] = {
        "html_handling": config.html_handling,
        "not_found_handling": config.not_found_handling,
        "run_worker_first": config.run_worker_first,
    }
    for name, key in special.items():
        if (folder / name).is_file():
            settings[key] = (folder / name).read_text(encoding="utf-8")
    files = tuple((path.relative_to(folder).as_posix(), path.read_bytes()) for path in paths)
    return Assets(binding=config.binding, settings=json.dumps(settings), files=files), tuple(paths)
