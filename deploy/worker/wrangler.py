"""Reads `wrangler.toml`, `wrangler.json` and `wrangler.jsonc` as wrangler does.

A key that we do not know is refused with the nearest that we do, one that stands for a service
which is not here with its name: nothing is left out without a word.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from core.config_locate import explain, line_of
from core.errors import ConfigError, WorkerRefused
from core.nearest import did_you_mean
from deploy.worker.wrangler_keys import (
    HARMLESS,
    NOT_INHERITED,
    UNSUPPORTED,
    Config,
    RoutePattern,
)
from edge.workers.bundle import Kv, Language, Service, Settings, check_name

NAMES = ("wrangler.json", "wrangler.jsonc", "wrangler.toml")
"""In the order in which wrangler looks for them."""
SECRETS_FILE = ".dev.vars"
_KNOWN = sorted({field.encode_name for field in msgspec.structs.fields(Config)} | HARMLESS)
_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING = re.compile(r'"(?:\\.|[^"\\])*"|,(?=\s*[}\]])', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Project:
    """A folder with a Worker. `notes` are for its developer: what may surprise."""

    folder: Path
    file: Path
    config: Config
    environment: str | None
    notes: tuple[str, ...] = ()

    @property
    def main(self) -> Path:
        return self.folder / self.config.main

    @property
    def language(self) -> Language:
        return "python" if self.main.suffix == ".py" else "javascript"


def find(folder: Path) -> Path:
    """The configuration in `folder`. Raises ConfigError."""
    for name in NAMES:
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(
        f"{folder} has no {', '.join(NAMES[:-1])} or {NAMES[-1]}; `skerry worker new NAME` makes a"
        " folder that has one"
    )


def read(file: Path, environment: str | None = None) -> Project:
    """Raises ConfigError."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    raw = _parse(file, text)
    _check_keys(file, text, raw, ())
    environments = raw.get("env", {})
    if not isinstance(environments, dict):
        raise ConfigError(f"{file}: env: a table of environments is expected")
    for name, table in environments.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{file}: env.{name}: a table is expected")
        _check_keys(file, text, table, ("env", name))
    notes: list[str] = []
    chosen = dict(raw)
    if environment is not None:
        chosen = _environment(file, raw, environments, environment, notes)
    wanted = {key: value for key, value in chosen.items() if key not in HARMLESS}
    try:
        config = msgspec.convert(wanted, Config)
    except msgspec.ValidationError as error:
        told = explain(str(error), text, wanted, Config)
        if file.suffix != ".toml":
            told = told.partition(": ")[2]  # lines are only known of TOML
        raise ConfigError(f"{file}:{'' if file.suffix == '.toml' else ' '}{told}") from error
    project = Project(file.parent, file, config, environment, tuple(notes))
    _check(project)
    return project


def settings_of(project: Project, *, name: str | None = None, dev: bool = False) -> Settings:
    """`dev`: without routes and timers, with the namespaces of previews."""
    config = project.config
    routes = config.routes if config.route is None else (config.route, *config.routes)
    return Settings(
        name=name or config.name,
        language=project.language,
        compatibility_date=config.compatibility_date,
        compatibility_flags=config.compatibility_flags,
        routes=() if dev else tuple(_pattern(one) for one in routes),
        vars=tuple(sorted((key, json.dumps(value)) for key, value in config.vars.items())),
        ai=config.ai.binding if config.ai else None,
        kv=tuple(
            Kv(
                one.binding,
                (dev and one.preview_id) or one.id or f"{config.name}-{one.binding}".lower(),
            )
            for one in config.kv_namespaces
        ),
        services=tuple(Service(one.binding, one.service) for one in config.services),
        crons=() if dev else config.triggers.crons,
        turn_ms=config.limits.cpu_ms,
        workers_dev=dev or config.workers_dev,
    )


def read_secrets(folder: Path) -> dict[str, str]:
    """`KEY=value` lines of `.dev.vars`: secrets while a Worker is being written. Raises
    ConfigError."""
    path = folder / SECRETS_FILE
    if not path.is_file():
        return {}
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        key, equals, value = text.partition("=")
        if not equals or not key.strip().isidentifier():
            raise ConfigError(f"{path}:{number}: a line is KEY=value")
        found[key.strip()] = value.strip().strip("\"'")
    return found


def without_comments(text: str) -> str:
    """JSON of JSONC: comments are blanks, and no comma stands before an end."""

    def blank(found: re.Match[str]) -> str:
        return found[0] if found[0].startswith('"') else re.sub(r"[^\n]", " ", found[0])

    return _TRAILING.sub(blank, _COMMENT.sub(blank, text))


def _parse(file: Path, text: str) -> dict[str, Any]:
    try:
        raw = tomllib.loads(text) if file.suffix == ".toml" else json.loads(without_comments(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not TOML: {error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}:{error.lineno}: not JSON: {error.msg}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: an object is expected")
    return raw


def _check_keys(file: Path, text: str, table: Mapping[str, Any], path: tuple[str, ...]) -> None:
    for key in table:
        line = f"{line_of(text, (*path, key))}" if file.suffix == ".toml" else ""
        where = f"{file}:{line}{':' if line else ''}"
        dotted = ".".join((*path, key))
        if key in UNSUPPORTED:
            raise ConfigError(
                f"{where} {dotted}: {UNSUPPORTED[key]} is not supported here; take it out, or keep"
                " this Worker on Cloudflare"
            )
        if key not in _KNOWN or (key == "env" and path):
            every = f"known here: {', '.join(_KNOWN)}"
            hint = did_you_mean(key, [*_KNOWN, *UNSUPPORTED], every, cutoff=0.5)
            raise ConfigError(f"{where} unknown key {dotted!r}; {hint}")


def _environment(
    file: Path,
    raw: dict[str, Any],
    environments: dict[str, dict[str, Any]],
    name: str,
    notes: list[str],
) -> dict[str, Any]:
    if name not in environments:
        known = ", ".join(environments) or "none"
        raise ConfigError(f"{file}: there is no environment {name!r}; there are: {known}")
    own = environments[name]
    inherited = {key: value for key, value in raw.items() if key not in NOT_INHERITED}
    notes.extend(
        f"{key} is not inherited: env.{name} has none"
        for key in NOT_INHERITED
        if key in raw and key not in own
    )
    chosen = {**inherited, **own}
    if "name" not in own and isinstance(raw.get("name"), str):
        chosen["name"] = f"{raw['name']}-{name}"
    return chosen


def _check(project: Project) -> None:
    config, file = project.config, project.file
    try:
        check_name(config.name)
    except WorkerRefused as error:
        raise ConfigError(f"{file}: name: {error}") from error
    if not project.main.is_file():
        raise ConfigError(f"{file}: main: {project.main} does not exist")
    names = list(_bindings(config))
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{file}: the binding {twice[0]!r} is given more than once")
    for one in config.services:
        if one.entrypoint is not None:
            raise ConfigError(
                f"{file}: services: {one.binding!r} names the entrypoint {one.entrypoint!r};"
                " service bindings here lead to the default one, by fetch"
            )


def _bindings(config: Config) -> Iterator[str]:
    yield from config.vars
    if config.ai is not None:
        yield config.ai.binding
    if config.assets is not None and config.assets.binding is not None:
        yield config.assets.binding
    yield from (one.binding for one in config.kv_namespaces)
    yield from (one.binding for one in config.services)


def _pattern(route: str | RoutePattern) -> str:
    if isinstance(route, str):
        return route
    return f"{route.pattern}/*" if route.custom_domain else route.pattern
