"""`jaxlookahead doctor`: what is installed here, whether drafting is lossless, and what it may gain."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxlookahead.cli import common

if TYPE_CHECKING:
    from jaxlookahead.checkpoints.load import Loaded

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers", "gguf", "rich", "matplotlib")
_DTYPES = ("float32", "bfloat16", "float16")
# Large enough for the weights to weigh, small enough for ten seconds.
_MODEL = {"vocab_size": 1024, "hidden_size": 256, "num_heads": 8, "num_kv_heads": 4, "head_size": 32}
_WIDTH = 8
_TOKENS = 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--model", help="load this model too, and check that it scores trees as it scores text")
    parser.add_argument("--dtype", choices=_DTYPES, help="of --model: float32 on CPU, bfloat16 elsewhere")
    parser.add_argument("--json", action="store_true", help="print one object")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command. Returns 1 where drafting changes the output, or the model breaks the contract."""
    if arguments.dtype is not None and arguments.model is None:
        raise common.UsageError("--dtype is the dtype of --model: give one")
    # What can't be loaded need not wait for the rest.
    loaded = None if arguments.model is None else load(arguments.model, arguments.dtype)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "versions": versions,
        "devices": devices,
        "dtypes": dtypes,
        "caches": caches,
        "lossless": lossless,
    }
    if loaded is not None:
        parts["model"] = lambda: model_check(loaded)
    report = {}
    for name, part in parts.items():
        report[name] = part()
        if not arguments.json:
            _print(name, report[name])
    if arguments.json:
        print(json.dumps(report))
    healthy = report["lossless"]["identical"] and report.get("model", {}).get("passed", True)
    if not healthy:
        print("jaxlookahead doctor: something is wrong, see above", file=sys.stderr)
    return 0 if healthy else 1


def versions() -> dict[str, Any]:
    """Of Python, this package and those it uses; None for what is not installed."""
    import jaxlookahead

    found: dict[str, Any] = {"python": platform.python_version(), "jaxlookahead": jaxlookahead.__version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def devices() -> dict[str, Any]:
    """What jax computes on."""
    import jax

    kinds = [device.device_kind for device in jax.devices()]
    return {
        "platform": jax.default_backend(),
        "devices": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "processes": jax.process_count(),
    }


def dtypes() -> dict[str, Any]:
    """Whether each dtype of parameters multiplies matrices here: `yes`, or what went wrong."""
    import jax
    import jax.numpy as jnp

    found = {}
    for name in _DTYPES:
        try:
            product = jax.jit(lambda x: x @ x)(jnp.full((8, 8), 0.5, name))
            right = bool((product.astype(jnp.float32) == 2.0).all())
            found[name] = "yes" if right else "wrong results"
        except Exception as error:  # Whatever the backend raises is what is asked for.
            found[name] = f"no ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    return found


def caches() -> dict[str, Any]:
    """Where compiled programs and the default model are kept."""
    import jax

    from jaxlookahead.checkpoints.bundled import cached_file

    model = cached_file()
    programs = getattr(jax.config, "jax_compilation_cache_dir", None)
    return {
        "compiled programs": programs or "not kept (set JAX_COMPILATION_CACHE_DIR)",
        "default model": str(model) if model.is_file() else f"not downloaded yet (98 MB, to {model.parent})",
    }


def lossless() -> dict[str, Any]:
    """Decodes with a small random model, without drafts, with drafts of known text, and with nonsense as drafts.

    The random model shows how the machine behaves, not how well text can be drafted: `known_text_speedup` is for drafts
    that are always right, `nonsense_speedup` for drafts that never are, and real text lies between.
    """
    from jaxlookahead import first_difference, generate
    from jaxlookahead.models.dummy import tiny_decoder
    from jaxlookahead.testing import AdversarialDrafter, OracleDrafter

    model, params = tiny_decoder(**_MODEL)
    prompt = [1, 2, 3, 4, 5]

    def decode(drafter: Any, adapt: bool = False) -> tuple[Any, float]:
        start = time.perf_counter()
        output = generate(model, params, [prompt], max_new_tokens=_TOKENS, drafter=drafter, width=_WIDTH, adapt=adapt)[
            0
        ]
        return output, time.perf_counter() - start

    plain, _ = decode(None)
    known = {tuple(prompt): plain.tokens.tolist()}
    makers: dict[str, Callable[[], Any]] = {
        "plain": lambda: None,
        "known_text": lambda: OracleDrafter(known, model.vocab_size, error_rate=0.0),
        "nonsense": lambda: AdversarialDrafter("random", model.vocab_size),
    }
    worst, margin = True, None
    seconds = dict.fromkeys(makers, float("inf"))
    # The first round compiles; the least of the others is what the machine can do.
    for turn in range(4):
        for name, make in makers.items():
            output, taken = decode(make(), adapt=name == "nonsense")
            difference = first_difference(plain, output)
            if difference is not None:
                worst, margin = False, difference.margin
            if turn:
                seconds[name] = min(seconds[name], taken)
    found: dict[str, Any] = {"identical": worst}
    if margin is not None:
        found["margin"] = margin
    found["plain_tokens_per_s"] = _TOKENS / seconds["plain"]
    found["known_text_speedup"] = seconds["plain"] / seconds["known_text"]
    found["nonsense_speedup"] = seconds["plain"] / seconds["nonsense"]
    return found


def load(source: str, dtype: str | None) -> Loaded:
    """Loads a model, and says so."""
    print(f"loading {source} ...", file=sys.stderr)
    return common.load(source, dtype=dtype)


def model_check(loaded: Loaded) -> dict[str, Any]:
    """Runs `check_model`."""
    from jaxlookahead.testing import ModelCheckError, check_model

    try:
        report = check_model(loaded.model, loaded.params)
    except ModelCheckError as error:
        return {"passed": False, "problem": str(error)}
    return {"passed": True, "tree": report.tree, "commit": report.commit, "tolerance": report.tolerance}


def _print(name: str, values: dict[str, Any]) -> None:
    print(name)
    for key, value in values.items():
        if isinstance(value, dict):
            value = ", ".join(f"{count} x {kind}" for kind, count in value.items())
        elif isinstance(value, bool) or value is None:
            value = {True: "yes", False: "NO", None: "not installed"}[value]
        elif isinstance(value, float):
            value = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        print(f"  {key.replace('_', ' '):<20} {value}", flush=True)
