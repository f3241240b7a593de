"""A generative eval inside a training loop, on a drafter that stays warm from one eval to the next.

A small decoder, random at first, learns word problems of GSM8K's kind: it reasons in two steps and ends in `####` and
the answer, which an eval extracts and compares. The eval decodes the same questions again and again while the model
changes little in between, so its own earlier responses are good drafts: model calls per token fall, the tokens stay
those of plain decoding.

    python examples/eval.py [--steps 1200] [--every 100] [--plot eval.png]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxlookahead import TrieDrafter, generate
from jaxlookahead.models.dummy import tiny_decoder
from jaxlookahead.step import prefill

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn")
ITEMS = ("apples", "books", "coins", "stamps")
NUMBERS = 19
WORDS = (
    *("<pad>", "<end>", "has", "and", "buys", "then", "gives", "away", ".", "How", "many", "left", "?"),
    *("+", "-", "=", "####"),
    *NAMES,
    *ITEMS,
    *map(str, range(NUMBERS)),
)
IDS = {word: i for i, word in enumerate(WORDS)}
END = IDS["<end>"]
LENGTH = 34  # tokens of the longest problem and its solution


def problem(rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """A question and its solution, as token ids."""
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    has, buys = rng.integers(1, 10, 2)
    gives = rng.integers(1, has + buys)
    total = has + buys
    question = f"{name} has {has} {item} and buys {buys} . {name} then gives away {gives} . How many left ?"
    solution = f"{has} + {buys} = {total} . {total} - {gives} = {total - gives} . #### {total - gives} <end>"
    return [IDS[word] for word in question.split()], [IDS[word] for word in solution.split()]


def answer(tokens: Sequence[int]) -> str | None:
    """What follows the last `####`, as the scorers of GSM8K read it."""
    words = [WORDS[token] for token in tokens]
    if "####" not in words[:-1]:
        return None
    return words[len(words) - words[::-1].index("####")]


def evaluate(
    model: Any, params: Any, problems: Sequence[tuple[list[int], list[int]]], drafter: TrieDrafter
) -> dict[str, float]:
    """Exact match and model calls, drafted and plain; raises where their tokens differ."""
    questions = [question for question, _ in problems]
    options: dict[str, Any] = {"max_new_tokens": 16, "eos_ids": [END], "rows": 16, "width": 16, "adapt": False}
    # Each question drafts from what was said to it before, and from its own text.
    drafted = generate(model, params, questions, drafter=drafter, namespaces=list(map(tuple, questions)), **options)
    plain = generate(model, params, questions, drafter=None, **options)
    for one, other in zip(drafted, plain, strict=True):
        if not np.array_equal(one.tokens, other.tokens):
            raise AssertionError("drafted and plain tokens differ")
    right = [answer(out.tokens) == answer(wanted) for out, (_, wanted) in zip(drafted, problems, strict=True)]
    return {
        "exact match": float(np.mean(right)),
        "calls per token": drafted.stats.row_steps / drafted.stats.tokens,
        "plain calls per token": plain.stats.row_steps / plain.stats.tokens,
    }


def train(steps: int, every: int, questions: int = 64, batch: int = 64, seed: int = 0) -> list[dict[str, float]]:
    """Trains on random problems, with an eval of the same questions every so many steps; returns the evals."""
    model, params = tiny_decoder(seed, vocab_size=len(WORDS), hidden_size=64, head_size=16, intermediate_size=128)
    # Logits of an untrained model should not be sure of anything.
    params = {**params, "norm": jax.tree.map(lambda x: x / 8, params["norm"])}
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, max(steps // 10, 1), steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    state, drafter, history = optimizer.init(params), TrieDrafter(), []
    rng = np.random.default_rng(seed)
    problems = [problem(np.random.default_rng([seed, i])) for i in range(questions)]

    def loss(params: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        logits, _ = prefill(model, params, model.init_cache(*tokens.shape), tokens, jnp.int32(0))
        each = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return jnp.sum(each * mask[:, 1:]) / jnp.sum(mask[:, 1:])

    @jax.jit
    def update(params: Any, state: Any, tokens: jax.Array, mask: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, tokens, mask)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    for step in range(1, steps + 1):
        tokens, mask = np.zeros((batch, LENGTH), np.int32), np.zeros((batch, LENGTH), bool)
        for row in range(batch):
            question, solution = problem(rng)
            whole = question + solution
            tokens[row, : len(whole)] = whole
            mask[row, len(question) : len(whole)] = True
        params, state, value = update(params, state, tokens, mask)
        if step % every == 0 or step == steps:
            history.append({"step": step, "loss": float(value), **evaluate(model, params, problems, drafter)})
    return history


def main() -> None:
    """Trains, prints a table of the evals, draws them."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200, help="of training (%(default)s)")
    parser.add_argument("--every", type=int, default=100, help="steps from one eval to the next (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="few steps and questions")
    parser.add_argument("--plot", metavar="FILE")
    arguments = parser.parse_args()
    history = train(120, 30, questions=8) if arguments.quick else train(arguments.steps, arguments.every)
    table = Table("step", "loss", "exact match", "calls per token, drafted", "plain")
    for row in history:
        cells = (row["loss"], row["exact match"], row["calls per token"], row["plain calls per token"])
        table.add_row(str(int(row["step"])), *(f"{cell:.2f}" for cell in cells))
    Console().print(table)
    if arguments.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for key in ("exact match", "calls per token", "plain calls per token"):
            axes.plot([row["step"] for row in history], [row[key] for row in history], label=key)
        axes.set_xlabel("step")
        axes.set_ylim(0, 1.05)
        axes.legend()
        figure.savefig(arguments.plot)


if __name__ == "__main__":
    main()
