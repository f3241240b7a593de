"""Runs the core tests under several versions of Python and jax, each in a new environment.

    python tests/matrix.py                     # all of them
    python tests/matrix.py oldest --keep DIR   # one of them; DIR keeps the environments for the next time
    python tests/matrix.py -- tests/test_mesh.py

Interpreters are looked for on the path (`python3.12`) and among pyenv's. What isn't found is reported as missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = (
    *("tests/test_tree.py", "tests/test_accept.py", "tests/test_cache.py", "tests/test_step.py"),
    *("tests/test_decoding.py", "tests/test_sampled_decoding.py", "tests/test_on_device.py", "tests/test_rollout.py"),
    *("tests/test_mesh.py", "tests/test_processes.py", "tests/test_testing.py", "tests/test_stochastic.py"),
    *("tests/sampling", "tests/models/test_t5.py", "tests/models/test_families.py", "tests/adapters/test_linen.py"),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """An environment: which Python, and what is pinned in it."""

    python: str
    pins: tuple[str, ...] = ()


CASES = {
    "oldest": Case("3.11", ("jax==0.7.2", "jaxlib==0.7.2")),
    "newest-3.11": Case("3.11"),
    "newest-3.12": Case("3.12"),
    "newest-3.13": Case("3.13"),
}


@dataclasses.dataclass
class Result:
    """What became of a case."""

    python: str = ""
    jax: str = ""
    outcome: str = ""
    good: bool = False
    seconds: float = 0.0


def find_python(version: str) -> str | None:
    """An interpreter of this version that can make environments."""
    home = os.environ.get("PYENV_ROOT", str(Path.home() / ".pyenv"))
    found = [shutil.which(f"python{version}"), *sorted(glob.glob(f"{home}/versions/{version}.*/bin/python"))[::-1]]
    for path in filter(None, found):
        # A shim of pyenv for a version that isn't chosen is there, but fails.
        if subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True, check=False).returncode == 0:
            return path
    return None


def run_case(case: Case, directory: Path, tests: Sequence[str], workers: int) -> Result:
    """Makes the environment unless it is there, installs the project, runs the tests."""
    begun, result = time.monotonic(), Result()
    interpreter = find_python(case.python)
    if interpreter is None:
        result.outcome = f"no python{case.python} found"
        return result
    python = str(directory / "bin" / "python")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if not os.path.exists(python):
        subprocess.run([interpreter, "-m", "venv", str(directory)], check=True)
    install = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--upgrade", *case.pins, f"{ROOT}[test]"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if install.returncode:
        result.outcome = "install failed: " + install.stderr.strip().splitlines()[-1]
        return result
    versions = "import platform, jax; print(platform.python_version(), jax.__version__)"
    said = subprocess.run([python, "-c", versions], capture_output=True, text=True, env=environment, check=True)
    result.python, result.jax = said.stdout.split()
    ran = subprocess.run(
        [python, "-m", "pytest", "-n", str(workers), "--tb=short", *tests],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        check=False,
    )
    result.good, result.seconds = ran.returncode == 0, time.monotonic() - begun
    counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped)", (ran.stdout.strip().splitlines() or [""])[-1])
    result.outcome = ", ".join(counts) or f"pytest ended with {ran.returncode}"
    if not result.good:
        print(ran.stdout[-6000:], file=sys.stderr)
    return result


def main() -> int:
    """Runs the chosen cases and prints a table; 1 if any did not pass."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where the environments are kept")
    parser.add_argument("--workers", type=int, default=0, help="processes of pytest (%(default)s: none besides)")
    arguments, tests = sys.argv[1:], list(CORE)
    if "--" in arguments:
        at = arguments.index("--")
        arguments, tests = arguments[:at], arguments[at + 1 :]
    options = parser.parse_args(arguments)
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; cases: {', '.join(CASES)}")
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.cases or CASES:
            results[name] = run_case(CASES[name], (options.keep or Path(scratch)) / name, tests, options.workers)
            print(name, results[name].outcome, file=sys.stderr, flush=True)
    table = Table("case", "Python", "jax", "tests", "seconds")
    for name, result in results.items():
        colour = "green" if result.good else "red"
        cells = (f"[{colour}]{result.outcome}[/]", f"{result.seconds:.0f}")
        table.add_row(name, result.python, result.jax, *cells)
    Console().print(table)
    return 0 if all(result.good for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
