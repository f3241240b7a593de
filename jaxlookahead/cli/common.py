"""Options and steps that several commands share."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Any

from jaxlookahead.checkpoints.bundled import SMOLLM2
from jaxlookahead.drafters.registry import DRAFTERS

if TYPE_CHECKING:
    from jaxlookahead.checkpoints.load import Loaded
    from jaxlookahead.results import Output


class UsageError(ValueError):
    """Options that contradict each other: exit status 2, as for options that do not exist."""


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
        default=SMOLLM2.name,
        help="GGUF file, Hugging Face directory, hub id, or %(default)s (the default; downloaded once, 98 MB)",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="float32 on CPU, bfloat16 elsewhere"
    )


def positives(text: str) -> list[int]:
    """An argument that is integers of at least 1, separated by commas."""
    return [positive(part) for part in text.split(",")]


def add_draft_arguments(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Adds the options that choose the drafter, or with `several` a list of them."""
    if several:
        parser.add_argument("--drafter", choices=tuple(DRAFTERS), action="append", help="trie by default; repeatable")
    else:
        parser.add_argument("--drafter", choices=tuple(DRAFTERS), default="trie", help="source of drafts (%(default)s)")
    parser.add_argument("--width", type=positive, help="most tokens scored in a step (16 on CPU, 64 elsewhere)")
    parser.add_argument("--no-adapt", action="store_true", help="verify whole drafts, whatever steps cost")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `sampling` reads."""
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    parser.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens whose mass reaches P")
    parser.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens")
    parser.add_argument("--seed", type=int, metavar="N", help="of the noise (0)")
    parser.add_argument("--samples", type=positive, metavar="N", help="responses for each prompt (1)")


def sampling(arguments: argparse.Namespace) -> Any:
    """The `Sampling` that was asked for, None for greedy decoding.

    Raises:
      UsageError: a value has no meaning, or an option has no effect.
    """
    from jaxlookahead.sampling.params import Sampling

    names = {"top_p": "top_p", "top_k": "top_k", "seed": "seed", "samples": "num_samples"}
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if arguments.temperature == 0:
        if given:
            option = "--" + next(iter(given)).replace("_", "-")
            raise UsageError(f"{option} has no effect on greedy decoding: give a --temperature above 0")
        return None
    try:
        return Sampling(temperature=arguments.temperature, **{names[name]: value for name, value in given.items()})
    except ValueError as error:
        raise UsageError(str(error)) from None


def load(source: str, *, dtype: str | None = None) -> Loaded:
    """`jaxlookahead.load`, imported when it is needed: help and complaints about options come without jax."""
    from jaxlookahead.checkpoints import load as checkpoints

    return checkpoints.load(source, dtype=dtype)


def load_model(arguments: argparse.Namespace) -> Loaded:
    """Loads `--model`; it must have a tokenizer."""
    print(f"loading {arguments.model} ...", file=sys.stderr)
    loaded = load(arguments.model, dtype=arguments.dtype)
    if loaded.tokenizer is None:
        raise ValueError(f"--model {arguments.model} has no tokenizer")
    return loaded


def without_end(output: Output) -> Output:
    """A response without the token that ended it: an `<|im_end|>` is no part of the text."""
    if output.finish_reason != "eos":
        return output
    return dataclasses.replace(
        output, tokens=output.tokens[:-1], from_draft=output.from_draft[:-1], sources=output.sources[:-1]
    )


def check_plot(path: str) -> None:
    """Finds out before any work what stands against drawing to `path`.

    Raises:
      ValueError: matplotlib is missing, does not know the file's ending, or the file can't be written.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'jaxlookahead[plots]'") from None
    formats = FigureCanvasBase.get_supported_filetypes()
    if "." not in path or path.rpartition(".")[2].lower() not in formats:
        raise ValueError(f"--plot {path}: the file's ending must be one of {', '.join(sorted(formats))}")
    existed = os.path.exists(path)
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise ValueError(f"can't write {path}: {error.strerror or error}") from None
    if not existed:
        os.remove(path)
