from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from core.errors import ConfigError
from core.models.weights import fingerprint, open_weights
from tests.core.models.tiny import random_state, tiny_config, write_folder, write_gguf


def identity(path: Path, dtype: str = "float32") -> bytes:
    source = open_weights(path)
    try:
        return fingerprint(source, dtype)
    finally:
        source.close()


def test_fingerprint_is_equal_wherever_and_however_often_it_is_taken(tmp_path: Path) -> None:
    config = tiny_config()
    state = random_state(config)
    here = write_folder(tmp_path / "a", config, state)
    there = write_folder(tmp_path / "b", config, state, shards=3)
    found = identity(here)
    assert len(found) == 16
    assert identity(there) == found
    code = (
        "import sys, pathlib; from tests.core.models.test_weights import identity;"
        "print(identity(pathlib.Path(sys.argv[1])).hex())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code, str(here)], capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == found.hex()


def test_fingerprint_differs_by_weights_config_and_kv_dtype(tmp_path: Path) -> None:
    config = tiny_config()
    state = random_state(config)
    base = write_folder(tmp_path / "base", config, state)
    touched = dict(state)
    weight = state["model.layers.2.mlp.down_proj.weight"].clone()
    weight[-1, -1] += 1
    touched["model.layers.2.mlp.down_proj.weight"] = weight
    found = {
        identity(base),
        identity(base, "bfloat16"),
        identity(write_folder(tmp_path / "touched", config, touched)),
        identity(write_folder(tmp_path / "rope", config | {"rope_theta": 1e6}, state)),
        identity(write_gguf(tmp_path / "m.gguf", config, state)),
        identity(write_gguf(tmp_path / "q.gguf", config, state, "Q8_0")),
    }
    assert len(found) == 6


def test_reading_keeps_bytes_and_closes(tmp_path: Path) -> None:
    config = tiny_config()
    state = random_state(config)
    source = open_weights(write_folder(tmp_path, config, state))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(source.read(name).numbers(torch.float32), state[name])
    assert source.names == frozenset(state)
    source.close()
    with pytest.raises(ConfigError, match="no tensor"):
        source.read(name)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what is resident")
def test_only_what_is_kept_is_read(tmp_path: Path) -> None:
    """Of a file of 64 MiB a rank that keeps 4 has little more in memory: what the system maps
    around a page that is touched, up to 2 MiB."""
    config = tiny_config()
    state = {name: torch.zeros(4096, 2048) for name in ("a.weight", "b.weight")}
    folder = write_folder(tmp_path, config, state)
    source = open_weights(folder)

    def resident() -> int:
        found, ours = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.split()[0]:
                ours = line.endswith(str(folder / "model.safetensors"))
            elif ours and line.startswith("Rss:"):
                found += int(line.split()[1]) << 10
        return found

    part = source.read("b.weight").narrow(0, 1024, 1536)
    assert resident() <= 4 << 20
    assert part.numbers(torch.float32).shape == (512, 2048)
    assert 4 << 20 <= resident() <= 12 << 20
    source.close()


def test_unsupported_encodings_are_refused_by_name(tmp_path: Path) -> None:
    config = tiny_config()
    state = random_state(config)
    source = open_weights(write_gguf(tmp_path / "m.gguf", config, state, "Q5_0"))
    with pytest.raises(ConfigError, match=r"attn_v\.weight is stored as Q5_0; supported: F32"):
        source.read("model.layers.0.self_attn.v_proj.weight")
    source.close()
    state["model.norm.weight"] = torch.ones(128, dtype=torch.int32)
    folder = open_weights(write_folder(tmp_path / "folder", config, state))
    with pytest.raises(ConfigError, match="I32"):
        folder.read("model.norm.weight")


@pytest.mark.parametrize("damage", ["cut", "length", "json", "outside", "empty", "shape"])
def test_damaged_safetensors_are_refused(damage: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tiny_config(), random_state(tiny_config()))
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    name = "model.norm.weight"
    if damage == "cut":
        raw = raw[:200]
    elif damage == "length":
        raw = struct.pack("<Q", 1 << 60) + raw[8:]
    elif damage == "json":
        raw = raw[:8] + b"!" + raw[9:]
    elif damage == "empty":
        raw = b""
    else:
        if damage == "outside":
            header[name]["data_offsets"][1] += 1 << 40
        else:
            header[name]["shape"] = [127]
        text = json.dumps(header).encode()
        raw = struct.pack("<Q", len(text)) + text + raw[8 + length :]
    file.write_bytes(raw)
    with pytest.raises(ConfigError, match=r"safetensors|tensor"):
        open_weights(folder).read(name)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tiny_config(), random_state(tiny_config()))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        open_weights(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ConfigError, match=r"gone\.safetensors"):
        open_weights(folder)
