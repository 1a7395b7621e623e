"""`deploy/regions/NAME.sh`: a script for each region of the default topology."""

import os
import subprocess
from pathlib import Path

import deploy
from core.config import parse, read

HERE = Path(deploy.__file__).parent


def test_each_region_has_its_script_and_options_are_passed_on(tmp_path: Path) -> None:
    default = parse(read(HERE / "topologies" / "two-regions.toml"))
    scripts = {path.stem: path for path in (HERE / "regions").glob("*.sh")}
    assert scripts.keys() == {region.name for region in default.regions}
    copy = tmp_path / "deploy" / "regions"
    copy.mkdir(parents=True)
    program = tmp_path / ".venv" / "bin" / "skerry"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\nprintf "%s|" "$@"\n', encoding="utf-8")
    program.chmod(0o700)
    for name, script in scripts.items():
        assert os.access(script, os.X_OK)
        moved = copy / script.name
        moved.write_bytes(script.read_bytes())
        moved.chmod(0o700)
        done = subprocess.run(
            [moved, "--dry-run", "--state", "a b"], capture_output=True, text=True, check=True
        )
        assert done.stdout == f"deploy|{name}|--dry-run|--state|a b|"
