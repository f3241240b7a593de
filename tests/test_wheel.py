"""The wheel that users install."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import jaxlookahead

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.iterdir()
    assert path.name == f"jaxlookahead-{jaxlookahead.__version__}-py3-none-any.whl"
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel) -> Message:
    return Parser().parsestr(wheel.read(f"jaxlookahead-{jaxlookahead.__version__}.dist-info/METADATA").decode())


def test_holds_the_package_and_nothing_else(wheel):
    info = f"jaxlookahead-{jaxlookahead.__version__}.dist-info/"
    names = {name for name in wheel.namelist() if not name.startswith(info)}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "jaxlookahead").rglob("*.py")}
    assert names == modules | {"jaxlookahead/py.typed"}
    licence = wheel.read(f"{info}licenses/LICENSE")
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert b"jaxlookahead = jaxlookahead.cli.main:main" in wheel.read(f"{info}entry_points.txt")


def test_metadata(metadata):
    assert metadata["Name"] == "jaxlookahead" and metadata["Version"] == jaxlookahead.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(metadata.get_all("Provides-Extra")) == {"plots", "test", "dev"}


def test_requirements_have_lower_bounds_alone(metadata):
    required = metadata.get_all("Requires-Dist")
    needed = [line for line in required if "extra ==" not in line]
    assert any(line.startswith("jax>=") for line in needed)
    for line in required:
        requirement = line.partition(";")[0].strip()
        name, _, version = requirement.partition(">=")
        assert name.replace("_", "").replace("-", "").isalnum(), requirement
        assert version.replace(".", "").isdigit(), requirement
        assert not name.startswith(("torch", "tensorflow")), requirement
