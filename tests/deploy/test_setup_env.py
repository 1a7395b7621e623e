"""The set-up's decisions: is .venv complete, which torch, what a failure says."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import setup_env
from deploy.progress import Progress
from deploy.setup_env import (
    STAMP,
    VENV,
    Installer,
    SetupFailed,
    TorchOffer,
    choose_torch,
    fingerprint,
    is_complete,
    read_offer,
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project folder with a space in its path and a finished .venv."""
    root = tmp_path / "a project"
    (root / VENV / "bin").mkdir(parents=True)
    (root / VENV / "bin" / "python").symlink_to(sys.executable)
    (root / "pyproject.toml").write_text("[project]\n")
    (root / "constraints.txt").write_text("torch==2.13.0\n")
    (root / "kernels" / "cpu").mkdir(parents=True)
    (root / "kernels" / "cpu" / "sum.cpp").write_text("int sum;\n")
    stamp(root, "node", "test")
    return root


def stamp(root: Path, *extras: str) -> None:
    text = json.dumps({"fingerprint": fingerprint(root), "extras": extras})
    (root / VENV / STAMP).write_text(text)


def test_complete_env_is_recognised(project: Path) -> None:
    assert is_complete(project, ["node"])
    assert is_complete(project, ["node", "test"])


def test_env_without_the_asked_extra_is_not_complete(project: Path) -> None:
    stamp(project, "node")
    assert is_complete(project, ["node"])
    assert not is_complete(project, ["node", "test"])


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", "kernels/cpu/sum.cpp"])
def test_changed_project_file_makes_env_incomplete(project: Path, name: str) -> None:
    (project / name).write_text("# another\n")
    assert not is_complete(project, ["node"])


def test_moved_project_makes_env_incomplete(project: Path, tmp_path: Path) -> None:
    """Scripts and the editable install hold absolute paths."""
    moved = project.rename(tmp_path / "elsewhere")
    assert not is_complete(moved, ["node"])


def test_env_of_a_vanished_python_is_not_complete(project: Path) -> None:
    python = project / VENV / "bin" / "python"
    python.unlink()
    python.symlink_to(project / "gone")
    assert not is_complete(project, ["node"])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"fingerprint": 1}'])
def test_broken_stamp_makes_env_incomplete(project: Path, text: str) -> None:
    (project / VENV / STAMP).write_text(text)
    assert not is_complete(project, ["node"])


CPU = TorchOffer("file:///wheels/torch-2.13.0%2Bcpu.whl", cuda=False, size_mb=191)
CUDA = TorchOffer("https://index/torch-2.13.0.whl", cuda=True, size_mb=None)


@pytest.mark.parametrize(
    ("offer", "gpu", "uv", "tool", "size", "words"),
    [
        (CPU, False, False, "pip", 191, "a CPU build"),
        (CPU, False, True, "pip", 191, "a CPU build"),
        (CPU, True, True, "pip", 191, "a CPU build"),
        (CUDA, True, True, "pip", 2740, "for the GPU"),
        (CUDA, False, True, "uv", 200, "through uv"),
        (CUDA, False, False, "pip", 2740, "install uv"),
    ],
)
def test_choose_torch(
    offer: TorchOffer, gpu: bool, uv: bool, tool: str, size: int, words: str
) -> None:
    choice = choose_torch(offer, gpu=gpu, uv=uv)
    assert (choice.tool, choice.size_mb) == (tool, size)
    assert words in choice.note


def report(url: str, *requires: str) -> str:
    item = {"download_info": {"url": url}, "metadata": {"requires_dist": list(requires)}}
    return json.dumps({"install": [item]})


def test_read_offer_of_a_local_wheel_knows_its_size(tmp_path: Path) -> None:
    wheel = tmp_path / "torch-2.13.0+cpu.whl"
    wheel.write_bytes(bytes(3_000_000))
    offer = read_offer(report(f"file://{tmp_path}/torch-2.13.0%2Bcpu.whl", "filelock"))
    assert (offer.cuda, offer.size_mb) == (False, 3)


@pytest.mark.skipif(sys.platform != "linux", reason="CUDA builds are chosen on Linux only")
def test_read_offer_sees_a_cuda_build_by_what_it_requires() -> None:
    offer = read_offer(report("https://index/torch.whl", "nvidia-cudnn-cu13==9; x"))
    assert (offer.cuda, offer.size_mb) == (True, None)


@pytest.mark.parametrize("works", [True, False])
def test_kernels_that_do_not_compile_are_told_and_stop_nothing(
    project: Path, works: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "kernels" / "cpu" / "build.py").write_text(
        f"print('native kernels: no C++ compiler was found')\nraise SystemExit({int(not works)})\n"
    )
    for package in ("kernels", "kernels/cpu"):
        (project / package / "__init__.py").touch()
    out = io.StringIO()
    Installer(project, Progress(out)).compile_kernels()
    told = "PyTorch computes, more slowly" in capsys.readouterr().out
    assert told is not works
    assert ("failed" in out.getvalue()) is not works


def test_failed_step_shows_the_end_of_the_output_and_what_to_do(project: Path) -> None:
    (project / VENV / "bin" / "python").unlink()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", project / VENV], check=True)
    fake = next((project / VENV / "lib").glob("python*/site-packages")) / "pip"
    fake.mkdir()
    (fake / "__init__.py").write_text("")
    (fake / "__main__.py").write_text(
        "import sys\n"
        "if '--version' in sys.argv: sys.exit(0)\n"
        "print('WARNING: Location x is ignored')\n"
        "sys.exit('ERROR: No space left on device')"
    )
    out = io.StringIO()
    with pytest.raises(SetupFailed) as caught:
        Installer(project, Progress(out)).install(["node"])
    assert str(caught.value).splitlines() == [
        "pip and setuptools (3 MB) failed. The end of its output:",
        "    ERROR: No space left on device",
        "→ the disk is full: make room and run the same command again",
    ]
    assert out.getvalue() == "  pip and setuptools (3 MB) … failed\n"
    assert not is_complete(project, ["node"])


def test_complete_env_costs_nothing_and_says_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup_env, "ROOT", project)
    assert setup_env.main([]) == 0
    assert capsys.readouterr().out == ""
