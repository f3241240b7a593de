"""The memory of the trie drafter in files, for commands."""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

from jaxlookahead.cli.common import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `check` and `open_drafter` read."""
    parser.add_argument("--memory", metavar="FILE", help="draft from the memory that --save-memory wrote")
    parser.add_argument(
        "--save-memory", metavar="FILE", help="write the drafter's memory there at the end; may be --memory's file"
    )


def check(arguments: argparse.Namespace) -> None:
    """Finds out before any work what would keep the files from being read or written.

    Raises:
      UsageError: the drafter has no memory, or a file can't be.
    """
    memory, save = arguments.memory, arguments.save_memory
    if memory is None and save is None:
        return
    if arguments.plain or arguments.drafter != "trie":
        raise UsageError("--memory and --save-memory need the drafter `trie`")
    # The first of several runs with one file has nothing to read.
    if memory is not None and not (os.path.isfile(memory) or (memory == save and not os.path.exists(memory))):
        raise UsageError(f"--memory {memory}: {'is a directory' if os.path.isdir(memory) else 'no such file'}")
    if save is not None:
        folder = os.path.dirname(save) or "."
        if not os.path.isdir(folder):
            raise UsageError(f"--save-memory {save}: {folder} is no directory")
        if os.path.isdir(save):
            raise UsageError(f"--save-memory {save}: is a directory")
        try:
            # Permissions alone do not tell: some file systems take no new files from anybody.
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise UsageError(f"--save-memory {save}: can't be written ({error.strerror})") from None


def open_drafter(arguments: argparse.Namespace, loaded: Any) -> Any:
    """A trie drafter bound to the model's tokenizer, with the memory of `--memory`.

    Raises:
      TrieFileError: the file is damaged or of another tokenizer.
    """
    from jaxlookahead.drafters.persistence import tokenizer_fingerprint
    from jaxlookahead.drafters.trie import TrieDrafter

    fingerprint = tokenizer_fingerprint(loaded.tokenizer.get_vocab())
    drafter = TrieDrafter(vocab_size=loaded.model.vocab_size, tokenizer_fingerprint=fingerprint)
    if arguments.memory is not None and os.path.exists(arguments.memory):
        drafter.load(arguments.memory)
    return drafter
