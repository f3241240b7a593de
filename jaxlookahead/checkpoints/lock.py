"""A lock between processes."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[bool]:
    """Holds the lock that the file `path` stands for, waiting for it where another process has it.

    It ends with its process, however that ends. Yields whether it is held: some file systems have no locks.
    """
    with path.open("a+b") as file:
        locked = _acquire(file)
        try:
            yield locked
        finally:
            if locked:
                _release(file)


def _acquire(file: IO[bytes]) -> bool:
    if sys.platform == "win32":
        import msvcrt

        while True:
            with contextlib.suppress(OSError):
                file.seek(0)
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
                return True
            time.sleep(0.2)
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _release(file: IO[bytes]) -> None:
    if sys.platform == "win32":
        import msvcrt

        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
        return
    import fcntl

    fcntl.flock(file, fcntl.LOCK_UN)
