"""Options and steps that several commands share."""

from __future__ import annotations

import argparse
import sys

from jaxlookahead.checkpoints.load import DEFAULT_MODEL, Loaded, load
from jaxlookahead.drafters.registry import DRAFTERS


def positive(text: str) -> int:
    """An argument that is an integer of at least 1."""
    value = int(text) if text.strip().lstrip("+-").isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return value


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `load_model` reads."""
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="GGUF file, Hugging Face directory, hub id, or %(default)s (the default; downloaded once, 98 MB)",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="float32 on CPU, bfloat16 elsewhere"
    )


def add_draft_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose the drafter."""
    parser.add_argument("--drafter", choices=tuple(DRAFTERS), default="trie", help="source of drafts (%(default)s)")
    parser.add_argument("--width", type=positive, help="most tokens scored in a step (16 on CPU, 64 elsewhere)")
    parser.add_argument("--no-adapt", action="store_true", help="verify whole drafts, whatever steps cost")


def load_model(arguments: argparse.Namespace) -> Loaded:
    """Loads `--model`; it must have a tokenizer."""
    print(f"loading {arguments.model} ...", file=sys.stderr)
    loaded = load(arguments.model, dtype=arguments.dtype)
    if loaded.tokenizer is None:
        raise ValueError(f"--model {arguments.model} has no tokenizer")
    return loaded
