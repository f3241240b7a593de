"""Cost of a forward pass by number of tokens: `python -m jaxlookahead.bench.step [checkpoint | --random]`.

The yardstick is one jitted sum over all the parameters, which reads every weight once. All jobs take turns within a
round, so a busy machine disturbs them alike; the table shows medians over rounds, and the least.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxlookahead.models.protocol import Model, Params


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Milliseconds a call, one entry a round.

    Attributes:
      weights: of a sum over all the parameters.
      forward: of a forward pass, by number of tokens.
    """

    weights: np.ndarray
    forward: dict[int, np.ndarray]


def measure(
    model: Model, params: Params, *, widths: Sequence[int] = (1, 4, 8, 16, 32, 64), slots: int = 256, rounds: int = 31
) -> StepTimes:
    """Times forward passes of one row: jitted, the cache donated, logits of all tokens.

    Args:
      model: the model.
      params: its parameters.
      widths: numbers of tokens, `T`.
      slots: cache slots, `S`; the tokens take the last ones, and half of the others count as committed.
      rounds: times that each job runs, after two runs that don't count.
    """
    weight_sum = jax.jit(lambda tree: sum(jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(tree)))
    jobs: dict[int, Callable[[], None]] = {0: lambda: jax.block_until_ready(weight_sum(params))}
    for width in widths:
        jobs[width] = _forward_job(model, params, width, slots)
    for job in jobs.values():
        job()
        job()
    times: dict[int, list[float]] = {width: [] for width in jobs}
    for _ in range(rounds):
        for width, job in jobs.items():
            before = time.perf_counter()
            job()
            times[width].append((time.perf_counter() - before) * 1e3)
    arrays = {width: np.array(taken) for width, taken in times.items()}
    return StepTimes(arrays.pop(0), arrays)


def _forward_job(model: Model, params: Params, width: int, slots: int) -> Callable[[], None]:
    start, committed = slots - width, (slots - width) // 2
    tokens = jnp.arange(width, dtype=jnp.int32)[None] % model.vocab_size
    positions = committed + jnp.arange(width, dtype=jnp.int32)[None]
    slot = jnp.arange(slots)[None]
    among_new = (slot >= start) & (slot - start <= jnp.arange(width)[:, None])
    mask = ((slot < committed) | among_new)[None]
    forward = jax.jit(model.forward, donate_argnums=4)
    cache = model.init_cache(1, slots)

    def job() -> None:
        nonlocal cache
        logits, cache = forward(params, tokens, positions, mask, cache, jnp.int32(start))
        logits.block_until_ready()

    return job


def random_smollm2(vocab_size: int = 49152) -> tuple[Model, Params]:
    """A model of SmolLM2-135M's shape with random float32 weights, laid out as a checkpoint would be here."""
    from jaxlookahead.models.config import DecoderConfig
    from jaxlookahead.models.targets import targets
    from jaxlookahead.models.weights import ParamsBuilder

    config = DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
        intermediate_size=1536,
        max_length=8192,
        tied=True,
    )
    builder, rng = ParamsBuilder(config), np.random.default_rng(0)
    for name, where in targets(config).items():
        builder.add(name, rng.standard_normal(where.shape, np.float32) * where.shape[-1] ** -0.5)
    return builder.finish()


def show(times: StepTimes) -> None:
    """Prints the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", "median ms", "least ms", "to the weights' sum", "to the narrowest")
    weights, narrowest = np.median(times.weights), np.median(times.forward[min(times.forward)])
    table.add_row("sum of all weights", f"{weights:.1f}", f"{times.weights.min():.1f}", "1", "")
    for width, taken in times.forward.items():
        median = np.median(taken)
        ratios = f"{median / weights:.2f}", f"{median / narrowest:.2f}"
        table.add_row(f"{width} token{'s' if width > 1 else ''}", f"{median:.1f}", f"{taken.min():.1f}", *ratios)
    Console().print(table)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m jaxlookahead.bench.step", description=__doc__.splitlines()[0])
    parser.add_argument(
        "checkpoint", nargs="?", help="GGUF file, Hugging Face directory or hub id; else the demo's model"
    )
    parser.add_argument("--random", action="store_true", help="random weights of the demo model's shape")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--slots", type=int, default=256)
    options = parser.parse_args()
    if options.random:
        model, params = random_smollm2()
    else:
        from jaxlookahead.checkpoints.load import load

        loaded = load(options.checkpoint, tokenizer=None) if options.checkpoint else load(tokenizer=None)
        model, params = loaded.model, loaded.params
    show(measure(model, params, slots=options.slots, rounds=options.rounds))


if __name__ == "__main__":
    main()
