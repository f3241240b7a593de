"""The `jaxlookahead` command."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import jaxlookahead
from jaxlookahead.cli.common import UsageError

COMMANDS = {
    "demo": "decode a few prompts with and without drafting, and compare",
    "generate": "decode your own prompts",
    "bench": "measure plain against lookahead decoding on your prompts",
    "replay": "try drafters on recorded responses, without a model",
    "aot": "compile the step for a TPU that is not there, and tell what it reads and keeps",
    "doctor": "tell what is installed, and check that drafting is lossless here",
}
# What the library raises on bad input; anything else is a fault of ours and keeps its traceback.
_EXPECTED = (ValueError, TypeError, OSError, RuntimeError, ImportError, FloatingPointError)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="jaxlookahead", description="Lookahead decoding for JAX.")
    parser.add_argument("--version", action="version", version=f"jaxlookahead {jaxlookahead.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary.capitalize() + ".")
        command.add_argument("--traceback", action="store_true", help="show where an error came from")
        module = importlib.import_module(f"jaxlookahead.cli.{name}")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 0, 1 for an error that it explains on stderr, 2 for wrong usage, 130 for Ctrl-C."""
    arguments = build_parser().parse_args(argv)
    if sys.stdout is None:
        print(f"jaxlookahead {arguments.command}: standard output is closed", file=sys.stderr)
        return 1
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        _drop_output()
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except _EXPECTED as error:
        if arguments.traceback:
            raise
        print(f"jaxlookahead {arguments.command}: {_one_line(error)}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        return 2 if isinstance(error, UsageError) else 1


def _drop_output() -> None:
    """Nobody reads standard output, or its disk is full: Python would complain once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{'output' if error.filename is None else error.filename or repr('')}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
