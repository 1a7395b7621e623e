"""wrangler's configuration: read as wrangler reads it, refused where we would do something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.errors import ConfigError
from deploy.worker.build import _python
from deploy.worker.wrangler import (
    find,
    read,
    read_secrets,
    settings_of,
    without_comments,
)
from deploy.worker.wrangler_keys import HARMLESS, UNSUPPORTED, Config
from edge.workers.bundle import Kv, Service

BASE = """
name = "shop"
main = "index.ts"
compatibility_date = "2025-10-08"
"""
FULL = (
    BASE
    + """
compatibility_flags = ["nodejs_compat"]
routes = ["shop.org/*", { pattern = "b.shop.org", custom_domain = true }]
workers_dev = false
kv_namespaces = [{ binding = "KV", id = "1", preview_id = "2" }, { binding = "OWN" }]
services = [{ binding = "FRIEND", service = "friend" }]
observability = { enabled = true }

[ai]
binding = "AI"

[vars]
A = "x"
TREE = { deep = [1, true] }

[triggers]
crons = ["* * * * *"]

[limits]
cpu_ms = 50

[env.staging]
routes = []
vars = { A = "staging" }

[env.production]
name = "shop-live"
"""
)


def folder_of(tmp_path: Path, text: str, name: str = "wrangler.toml") -> Path:
    (tmp_path / "index.ts").write_text("export default {}")
    (tmp_path / name).write_text(text)
    return tmp_path / name


def test_a_whole_configuration(tmp_path: Path) -> None:
    project = read(folder_of(tmp_path, FULL))
    settings = settings_of(project)
    assert project.notes == ()
    assert settings.name == "shop"
    assert settings.language == "javascript"
    assert settings.routes == ("shop.org/*", "b.shop.org/*")
    assert settings.vars == (("A", '"x"'), ("TREE", '{"deep": [1, true]}'))
    assert settings.kv == (Kv("KV", "1"), Kv("OWN", "shop-own"))
    assert settings.services == (Service("FRIEND", "friend"),)
    assert (settings.ai, settings.crons, settings.turn_ms) == ("AI", ("* * * * *",), 50)
    assert not settings.workers_dev
    dev = settings_of(project, name="shop-dev", dev=True)
    assert (dev.name, dev.routes, dev.crons, dev.workers_dev) == ("shop-dev", (), (), True)
    assert dev.kv == (Kv("KV", "2"), Kv("OWN", "shop-own"))


def test_environments_inherit_all_but_bindings(tmp_path: Path) -> None:
    file = folder_of(tmp_path, FULL)
    staging = read(file, "staging")
    settings = settings_of(staging)
    assert settings.name == "shop-staging"
    assert (settings.routes, settings.vars) == ((), (("A", '"staging"'),))
    assert (settings.ai, settings.kv, settings.services) == (None, (), ())
    assert (settings.crons, settings.workers_dev) == (("* * * * *",), False)
    assert [note.split()[0] for note in staging.notes] == ["ai", "kv_namespaces", "services"]
    live = read(file, "production")
    assert live.config.name == "shop-live"
    assert settings_of(live).vars == ()
    with pytest.raises(ConfigError, match="no environment 'stagign'; there are: staging, prod"):
        read(file, "stagign")


def test_jsonc_is_read_with_its_comments(tmp_path: Path) -> None:
    text = """{
      // a comment with "quotes" and a , before }
      "name": "shop", /* another,
      one */
      "main": "index.ts",
      "compatibility_date": "2025-10-08",
      "vars": { "URL": "https://a.org/*x*/,}", "LIST": [1, 2,], },
    }"""
    project = read(folder_of(tmp_path, text, "wrangler.jsonc"))
    assert project.config.vars == {"URL": "https://a.org/*x*/,}", "LIST": [1, 2]}
    assert without_comments(text).count("\n") == text.count("\n"), "lines stay where they are"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ('nmae = "x"', r"wrangler.toml:5: unknown key 'nmae'; did you mean 'name'\?"),
        ("[d1_databases]", "wrangler.toml:5: d1_databases: D1 is not supported here"),
        ("[[r2_buckets]]\nbinding='B'", "r2_buckets: R2 is not supported here"),
        ("[env.x]\nqueues = {}", "env.x.queues: queues|env.x.queues: Queues"),
        ("[env.x]\nroute_s = 1", r"unknown key 'env.x.route_s'; did you mean 'routes?'"),
        ("[ai]\nbindng = 'AI'", r"wrangler.toml:6: ai: unknown key 'bindng'; did you mean 'bin"),
        ("kv_namespaces = [{ id = '1' }]", "missing required field `binding`"),
        ("[ai]\nbinding = '1x'", "ai.binding"),
        ("[vars]\nAI = 'x'\n[ai]\nbinding = 'AI'", "the binding 'AI' is given more than once"),
        ("services = [{binding='S', service='x', entrypoint='E'}]", "names the entrypoint 'E'"),
        ("routes = 1", "routes"),
        ("x", "not TOML"),
    ],
)
def test_what_is_refused_is_named(tmp_path: Path, more: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read(folder_of(tmp_path, BASE + more))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"main": "no.ts"}, "no.ts does not exist"),
        ({"name": "Shop_1"}, "no name of a Worker"),
        ({"compatibility_date": "today"}, "compatibility_date"),
        ({"nam": "x"}, r"unknown key 'nam'; did you mean 'name'"),
    ],
)
def test_values_that_do_not_fit_are_refused(
    tmp_path: Path, changed: dict[str, str], why: str
) -> None:
    base = {"name": "shop", "main": "index.ts", "compatibility_date": "2025-10-08"}
    with pytest.raises(ConfigError, match=why):
        read(folder_of(tmp_path, json.dumps(base | changed), "wrangler.json"))


def test_a_folder_without_a_configuration_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="skerry worker new"):
        find(tmp_path)
    folder_of(tmp_path, BASE)
    assert find(tmp_path).name == "wrangler.toml"
    folder_of(tmp_path, "{}", "wrangler.jsonc")
    assert find(tmp_path).name == "wrangler.jsonc", "as wrangler chooses"


def test_no_key_is_of_two_kinds() -> None:
    ours = set(Config.__struct_fields__)
    assert not ours & HARMLESS
    assert not ours & set(UNSUPPORTED)
    assert not HARMLESS & set(UNSUPPORTED)


def test_secrets_of_dev_are_lines(tmp_path: Path) -> None:
    assert read_secrets(tmp_path) == {}
    (tmp_path / ".dev.vars").write_text('# mine\nA=1=2\nB = "x y"\n\n')
    assert read_secrets(tmp_path) == {"A": "1=2", "B": "x y"}
    (tmp_path / ".dev.vars").write_text("A=1\nnot a line\n")
    with pytest.raises(ConfigError, match=r"\.dev\.vars:2"):
        read_secrets(tmp_path)


def test_a_python_project_is_its_files(tmp_path: Path) -> None:
    file = folder_of(tmp_path, BASE.replace("index.ts", "src/entry.py"))
    for name in (
        "src/entry.py",
        "src/lib/util.py",
        "src/.venv/x.py",
        "src/__pycache__/y.py",
        "z.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("def on_fetch(request, env, ctx): ...\n")
    project = read(file)
    assert project.language == "python"
    modules, _, _ = _python(project)
    assert [one.name for one in modules] == ["entry.py", "lib/util.py"]
    (tmp_path / "src" / "entry.py").write_text("import torch\n")
    with pytest.raises(ConfigError, match=r"(?s)cannot be served.*torch"):
        _python(project)
