"""Wheels of a release: Skerry's own, made of the sources, and what pip finds it needs."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from core.errors import ConfigError
from deploy.ssh.wheels import House, Target, Wheelhouse, release_digest

HERE = Target("3.11", "x86_64", ("glibc", "2.36"))


def wheel(
    folder: Path, name: str, version: str, *requires: str, tag: str = "py3-none-any", more: str = ""
) -> Path:
    """A wheel without code."""
    folder.mkdir(parents=True, exist_ok=True)
    base = f"{name}-{version}"
    path = folder / f"{base}-{tag}.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}"
    metadata += "".join(f"Requires-Dist: {one}\n" for one in requires)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{base}.dist-info/METADATA", metadata)
        archive.writestr(
            f"{base}.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n"
        )
        archive.writestr(f"{base}.dist-info/RECORD", "")
    return path


def files(house: House) -> set[str]:
    return {one.file for one in house.wheels}


def test_a_given_wheelhouse_is_enough_and_only_what_is_needed_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, root = tmp_path / "given", tmp_path / "root"
    root.mkdir()
    (root / "constraints.txt").write_text("lamp==1.0\n", encoding="ascii")
    wheel(
        given, "skerry", "0.1.0", "lamp>=1", 'oil>=1; extra == "region"',
        more="Provides-Extra: region\n",
    )  # fmt: skip
    for version in ("1.0", "2.0"):
        wheel(given, "lamp", version)
    wheel(given, "oil", "1.0", tag="cp311-cp311-manylinux_2_17_x86_64")
    wheel(given, "oil", "1.0", tag="cp311-cp311-manylinux_2_17_aarch64")
    wheel(given, "stranger", "1.0")
    wheel(given, "keeper_model", "1.0", "what-nobody-has")
    house = Wheelhouse(tmp_path / "cache", given, root)
    edge = house.collected(HERE, (), ())
    assert files(edge) == {"skerry-0.1.0-py3-none-any.whl", "lamp-1.0-py3-none-any.whl"}
    region = house.collected(HERE, ("region",), ("keeper-model",))
    assert files(region) == {
        "skerry-0.1.0-py3-none-any.whl",
        "lamp-1.0-py3-none-any.whl",
        "oil-1.0-cp311-cp311-manylinux_2_17_x86_64.whl",
        "keeper_model-1.0-py3-none-any.whl",
    }
    assert all(region.path(one).stat().st_size == one.size for one in region.wheels)
    monkeypatch.setattr("deploy.ssh.wheels._pip", None)
    assert house.collected(HERE, (), ()) == edge  # it stays, and is not asked for again
    digests = {release_digest(one, HERE, "own") for one in (edge, region)}
    assert len(digests) == 2
    assert release_digest(edge, HERE, "own") in digests
    assert release_digest(edge, Target("3.12", "x86_64", HERE.libc), "own") not in digests


def test_what_is_missing_is_said_by_pip(tmp_path: Path) -> None:
    given = tmp_path / "given"
    wheel(given, "skerry", "0.1.0", "lamp>=1")
    house = Wheelhouse(tmp_path / "cache", given, tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)Python 3\.11 on x86_64 cannot be had:.*lamp"):
        house.collected(HERE, (), ())
    with pytest.raises(ConfigError, match="no wheel"):
        Wheelhouse(tmp_path / "cache", tmp_path)
    wheel(given, "skerry", "0.2.0")
    with pytest.raises(ConfigError, match="more than one wheel of Skerry"):
        house.own()


@pytest.mark.soak
def test_the_same_sources_give_the_same_wheel(own: House, tmp_path: Path) -> None:
    again = Wheelhouse(own.folder.parents[1], None).own()
    other = Wheelhouse(tmp_path, None).own()
    assert again == own
    assert other.wheels == own.wheels
    with zipfile.ZipFile(own.path(own.wheels[0])) as archive:
        names = set(archive.namelist())
    assert {"deploy/ssh/holder.py", "kernels/cpu/build.py", "edge/page/static/index.html"} <= names
    assert not any(name.startswith("tests/") for name in names)


def test_platforms_are_those_of_the_hosts_library() -> None:
    words = list(HERE.platforms())
    assert words[0] == "manylinux_2_36_x86_64"
    assert {"manylinux_2_17_x86_64", "manylinux2014_x86_64", "linux_x86_64"} <= set(words)
    assert not any("2_37" in word for word in words)
    musl = list(Target("3.12", "aarch64", ("", "")).platforms())
    assert musl[0] == "musllinux_1_2_aarch64"
