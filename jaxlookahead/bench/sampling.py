"""Cost of deciding a token, by vocabulary, batch and settings: `python -m jaxlookahead.bench.sampling`.

Each line times a loop of 64 dependent decisions in one compiled call, as the walk over a tree makes them, and
prints the time per decision. The settings take turns within a round, so a busy machine disturbs all of them
alike.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlookahead.sampling import (
    Context,
    Decision,
    Sampling,
    SamplingArrays,
    advance,
    decide,
    decide_greedy,
    init_context,
    pack,
)
from jaxlookahead.sampling.decide import LOGPROBS

SETTINGS = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=0.7),
    "temperature, top-p": Sampling(temperature=0.7, top_p=0.9),
    "temperature, top-k": Sampling(temperature=0.7, top_k=50),
    "temperature, min-p": Sampling(temperature=0.7, min_p=0.05),
    "greedy, penalties": Sampling(repetition_penalty=1.3, presence_penalty=0.1),
    "greedy, no-repeat 3-gram": Sampling(no_repeat_ngram=3),
    "all of them": Sampling(
        temperature=0.7, top_k=50, top_p=0.9, min_p=0.05, repetition_penalty=1.3, no_repeat_ngram=3
    ),
}


def _walk(decisions: int, length: int) -> tuple[Callable[..., Decision], Callable[..., Decision]]:
    """Returns compiled loops over `decisions` tokens: with settings, and a plain argmax.

    Both return all that a decision holds, or the compiler would drop the log-probabilities.
    """

    def disturb(logits: jax.Array, last: Decision) -> jax.Array:
        return logits + (last.token % 2).astype(jnp.float32)[:, None]

    def start(rows: int) -> Decision:
        zeros = jnp.zeros(rows, jnp.float32)
        scores = dict.fromkeys(LOGPROBS, zeros)
        return Decision(token=zeros.astype(jnp.int32), margin=zeros, bad=zeros > 0, scores=scores)

    def with_settings(arrays: SamplingArrays, history: jax.Array, logits: jax.Array) -> Decision:
        def body(_: int, carry: tuple[Context, Decision]) -> tuple[Context, Decision]:
            context, last = carry
            decision = decide(arrays, context, disturb(logits, last))
            return advance(context, decision.token, jnp.ones(logits.shape[0], bool)), decision

        lengths = jnp.full(history.shape[:1], length, jnp.int32)
        context = init_context(arrays, history, lengths, lengths)
        return lax.fori_loop(0, decisions, body, (context, start(logits.shape[0])))[1]

    def plain(logits: jax.Array) -> Decision:
        def body(_: int, last: Decision) -> Decision:
            return decide_greedy(disturb(logits, last))

        return lax.fori_loop(0, decisions, body, start(logits.shape[0]))

    return jax.jit(with_settings), jax.jit(plain)


def measure(
    vocab_size: int, batch: int, *, decisions: int = 64, slots: int = 1024, rounds: int = 7
) -> dict[str, float]:
    """Times one decision for every setting.

    Args:
      vocab_size: `V`.
      batch: `B`, all rows with the same setting.
      decisions: tokens per call.
      slots: tokens of history.
      rounds: repetitions, of which the fastest counts.

    Returns:
      Milliseconds per decision of the batch, by setting; "argmax" is `decide_greedy` alone.
    """
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(batch, vocab_size)) * 3, jnp.float32)
    history = jnp.asarray(rng.integers(0, vocab_size, (batch, slots)), jnp.int32)
    with_settings, plain = _walk(decisions, slots - decisions)
    calls = {"argmax": functools.partial(plain, logits)}
    for name, sampling in SETTINGS.items():
        arrays = jax.device_put(pack([sampling] * batch, requests=range(batch), vocab_size=vocab_size))
        calls[name] = functools.partial(with_settings, arrays, history, logits)
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        jax.block_until_ready(call())
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            best[name] = min(best[name], time.perf_counter() - start)
    return {name: seconds / decisions * 1e3 for name, seconds in best.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    columns = [(vocab, batch) for vocab in options.vocab for batch in options.batch]
    results = [measure(vocab, batch, rounds=options.rounds) for vocab, batch in columns]
    print("ms per decision | " + " | ".join(f"V {vocab:,}, B {batch}" for vocab, batch in columns))
    for name in results[0]:
        print(f"{name} | " + " | ".join(f"{result[name]:.3f}" for result in results))


if __name__ == "__main__":
    main()
