"""A secret that others can read is spoken of when it is read for the first time."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from core.config import World, parse
from core.errors import ConfigError
from core.public_tls import public_of
from core.tls import credentials_of
from deploy.certs import init, public, rotate
from tests.core.test_public_tls import TEXT

NAMES = ("region", "fleet", "admin", "tiers")


def world_in(folder: Path, more: str = "") -> World:
    return World(parse(TEXT + more), folder / "world.toml", folder)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.mark.parametrize("which", NAMES)
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o622])
def test_what_others_can_read_or_change_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, which: str, mode: int
) -> None:
    file = tmp_path / f"{which}.secret"
    file.write_text("long-enough-for-a-secret")
    file.chmod(mode)
    for _ in range(3):
        assert world_in(tmp_path).secret(which) == b"long-enough-for-a-secret"
    (line,) = lines(caplog)
    assert line == f"others than its owner can read or change {file}: chmod 600 {file}"


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_what_is_its_owners_alone_is_not_spoken_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    (tmp_path / "region.secret").write_text("long-enough-for-a-secret")
    (tmp_path / "region.secret").chmod(mode)
    for which in NAMES:  # the others are made
        world_in(tmp_path).secret(which)
    assert lines(caplog) == []


def test_a_command_that_can_be_pasted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "two words"
    folder.mkdir()
    (folder / "region.secret").write_text("long-enough-for-a-secret")
    (folder / "region.secret").chmod(0o644)
    world_in(folder).secret("region")
    (line,) = lines(caplog)
    assert line.endswith(f": chmod 600 '{folder}/region.secret'")


@pytest.mark.parametrize(("mode", "words"), [(0o440, None), (0o444, "and give it to")])
def test_one_that_is_somebody_elses_may_be_our_groups(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    mode: int,
    words: str | None,
) -> None:
    """As Kubernetes mounts it. Its owner's alone it would be of no use to us."""
    file = tmp_path / "region.secret"
    file.write_text("long-enough-for-a-secret")
    file.chmod(mode)
    monkeypatch.setattr("core.private_files.os.geteuid", lambda: os.getuid() + 1)
    world_in(tmp_path).secret("region")
    assert len(lines(caplog)) == (words is not None)
    assert words is None or words in lines(caplog)[0]


def test_keys_of_certificates_are_secrets_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    described = world_in(tmp_path, "[tls]\ninside = true\n")
    init(described, 30, lambda _: None)
    public(described, "ams", ["api.example.org"], 30, lambda _: None)
    credentials_of(described, "ams")
    public_of(described, "ams")
    assert lines(caplog) == [], "we make them our own"
    loose = [tmp_path / name for name in ("certs/eu.key", "public/ams.key", "certs/ca.key")]
    for file in loose:
        file.chmod(0o644)
    for _ in range(2):
        credentials_of(described, "eu")
        public_of(described, "ams")
        rotate(described, 30, lambda _: None, authority=False)
    assert lines(caplog) == [
        f"others than its owner can read or change {file}: chmod 600 {file}" for file in loose
    ]


def test_one_that_cannot_be_read_has_a_name(tmp_path: Path) -> None:
    (tmp_path / "region.secret").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match=r"region\.secret: cannot be read: Is a directory"):
        world_in(tmp_path).secret("region")
