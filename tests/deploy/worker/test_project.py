"""A project from its first command on: made from an example, built, watched."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from core.errors import ConfigError, WorkerRefused
from deploy.worker import dev
from deploy.worker.act import addresses, owner_of
from deploy.worker.build import Built, build
from deploy.worker.new import TEMPLATES, create
from deploy.worker.tail import shown
from deploy.worker.wrangler import find, read
from edge.workers import tools
from edge.workers.admin_pages import EdgePage
from edge.workers.logs import Line
from edge.workers.runtime import Run, Thrown
from edge.workers.sourcemap import SourceMap
from tests.edge.fakes import FakeRegion, world_of
from tests.edge.workers.doubles import bundle_of


@pytest.fixture
def programs() -> None:
    try:
        tools.install(lambda _: None)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("template", sorted(path.name for path in TEMPLATES.iterdir()))
def test_every_example_can_be_begun_with(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: None
) -> None:
    monkeypatch.chdir(tmp_path)
    create("mine", template)
    project = read(find(Path("mine")))
    assert project.config.name == "mine"
    assert project.config.compatibility_date != "2025-10-08"
    built = build(project)
    assert built.bundle.settings.ai == "AI"
    assert built.bundle == build(project).bundle, "equal sources are an equal bundle"
    assert project.main.resolve() in {path.resolve() for path in built.sources}
    with pytest.raises(ConfigError, match="exists already"):
        create("mine", template)


def test_what_cannot_be_begun_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"there are: .*chat-typescript"):
        create("mine", "nothing")
    with pytest.raises(WorkerRefused, match="no name of a Worker"):
        create("My_Worker", "chat-typescript")


def test_a_bundle_knows_its_sources(tmp_path: Path, programs: None) -> None:
    (tmp_path / "wrangler.toml").write_text(
        'name = "w"\nmain = "src/a.ts"\ncompatibility_date = "2025-10-08"\n'
        'compatibility_flags = ["nodejs_compat"]\n[define]\nWORD = "\'defined\'"\n'
    )
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.ts").write_text(
        'import { join } from "path";\nimport page from "./page.html";\n'
        'import { b } from "./b";\ndeclare const WORD: string;\n'
        "export default { fetch: (): Response => new Response(join(page, b(), WORD)) };\n"
    )
    (tmp_path / "src" / "b.ts").write_text("\n\nexport const b = (): never => { throw 1; };\n")
    (tmp_path / "src" / "page.html").write_text("<p>page</p>")
    built = build(read(find(tmp_path)))
    code = built.bundle.modules[0].body.decode()
    assert '"node:path"' in code
    assert "<p>page</p>" in code
    assert "defined" in code
    names = {path.name for path in built.sources}
    assert {"a.ts", "b.ts", "page.html", "wrangler.toml"} <= names
    line = next(n for n, text in enumerate(code.splitlines(), 1) if "throw 1" in text)
    place = SourceMap(built.bundle.source_map).find(
        line, code.splitlines()[line - 1].index("throw")
    )
    assert place is not None
    assert (place.source, place.line) == ("src/b.ts", 3)
    (tmp_path / "src" / "b.ts").write_text("export const b = (")
    with pytest.raises(ConfigError, match=r"(?s)does not build.*src/b\.ts:1:18"):
        build(read(find(tmp_path)))


def _script(folder: Path, code: str, *, assets: bool = False) -> None:
    lines = ['name = "w"', 'main = "src/a.js"', 'compatibility_date = "2025-10-08"']
    (folder / "wrangler.toml").write_text(
        "\n".join([*lines, *(['[assets]\ndirectory = "public"'] if assets else [])])
    )
    for name in ("src", "public"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "src" / "a.js").write_text(code)
    (folder / "src" / "esm.js").write_text("export default { fetch: () => new Response() };\n")
    (folder / "src" / "cjs.js").write_text("module.exports = { fetch: () => new Response() };\n")


@pytest.mark.parametrize(
    "code",
    [
        "const a = 1;",
        "",
        "export const fetch = () => new Response();",
        'export * from "./esm.js";',  # a star leaves the default out
        'addEventListener("fetch", () => {});',
    ],
)
def test_a_script_without_a_default_export_is_refused(
    code: str, tmp_path: Path, programs: None
) -> None:
    _script(tmp_path, code)
    with pytest.raises(
        ConfigError, match=r"(?s)a\.js cannot be served:.a\.js: it has no .*default"
    ):
        build(read(find(tmp_path)))


@pytest.mark.parametrize(
    "code",
    [
        "export default class { fetch() { return new Response(); } }",
        "const w = { scheduled() {} }; export { w as default };",
        'export { default } from "./esm.js"; export const more = 1;',
        'export { default } from "./cjs.js";',
        "module.exports = { fetch: () => new Response() };",
    ],
)
def test_every_form_of_a_default_export_is_taken(code: str, tmp_path: Path, programs: None) -> None:
    _script(tmp_path, code)
    assert build(read(find(tmp_path))).bundle.modules[0].name == "worker.js"


def test_files_are_served_without_a_handler(tmp_path: Path, programs: None) -> None:
    _script(tmp_path, "export {};", assets=True)
    (tmp_path / "public" / "index.html").write_text("page")
    assert build(read(find(tmp_path))).bundle.assets is not None


def test_a_change_of_any_source_is_seen(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("1")
    before = dev.stamp_of((one, two))
    assert dev.stamp_of((one, two)) == before
    two.write_text("2")
    with_two = dev.stamp_of((one, two))
    assert with_two != before
    os.utime(one, (1, 1))
    assert dev.stamp_of((one, two)) != with_two


def test_a_secret_of_dev_has_no_name_of_a_binding(tmp_path: Path) -> None:
    (tmp_path / ".dev.vars").write_text("COLOUR=red\nAI=mine\n")
    with pytest.raises(ConfigError, match=r"\.dev\.vars: 'AI' would name two .*binding of AI"):
        dev._secret(Built(bundle_of("one", ai="AI"), ()), tmp_path)
    made = dev._secret(Built(bundle_of("one", vars=(("COLOUR", '"blue"'),)), ()), tmp_path)
    assert dict(made.settings.vars) == {"COLOUR": '"red"', "AI": '"mine"'}


def test_for_whom_a_worker_acts(tmp_path: Path) -> None:
    world = world_of(tmp_path, FakeRegion("eu", address="127.0.0.1:1"))
    assert owner_of(world, "") == "anonymous"
    assert owner_of(world, "acme") == "acme"
    for tenants, owner in (("[tenants.a]", "a"), ("[tenants.a]\n[tenants.b]", None)):
        closed = world_of(
            tmp_path, FakeRegion("eu", address="127.0.0.1:1"),
            access=f'anonymous = "never"\n{tenants}',
        )  # fmt: skip
        if owner is not None:
            assert owner_of(closed, "") == owner
        else:
            with pytest.raises(ConfigError, match="--tenant a or b"):
                owner_of(closed, "")


def test_where_a_worker_is(tmp_path: Path) -> None:
    (tmp_path / "wrangler.json").write_bytes(
        msgspec.json.encode(
            {"name": "w", "main": "e.py", "compatibility_date": "2025-10-08",
             "routes": ["w.org/*"], "triggers": {"crons": ["* * * * *"]}}
        )
    )  # fmt: skip
    (tmp_path / "e.py").write_text("def on_fetch(request, env, ctx): ...\n")
    bundle = build(read(find(tmp_path))).bundle
    edge = EdgePage(edge="e", url="http://127.0.0.1:87", version="1", domain="d.org", languages=())
    assert list(addresses(bundle, [edge])) == [
        "http://127.0.0.1:87/w/w/   http://w.d.org:87/", "route w.org/*", "timer * * * * *",
    ]  # fmt: skip


def test_lines_of_a_tail() -> None:
    thrown = Thrown("TypeError", "no", "    at f (a.ts:1:2)")
    run = Run(outcome="exception", method="GET", url="http://w/", exceptions=(thrown,))
    lines = shown(Line(at=0.0, version="v", level="run", run=run), "ams")
    assert lines[0].endswith("ams GET http://w/ - exception")
    assert lines[1:] == ["    TypeError: no", "        at f (a.ts:1:2)"]
    assert shown(Line(at=0.0, version="v", level="warn", message="a\nb"), "")[0].endswith(
        "(warn) a"
    )
    ok = Run(method="POST", url="http://w/x", status=201)
    assert shown(Line(at=0.0, version="v", level="run", run=ok), "")[0].endswith("- 201 ok")
    timer = Run(cron="* * * * *")
    assert "timer * * * * *" in shown(Line(at=0.0, version="v", level="run", run=timer), "")[0]
