"""A small T5, trained to split sentences, then decoded with drafts from its input.

Split-and-rephrase turns one complex sentence into two simple ones, most of whose words are the input's. So the input
is the best place to draft from. The data is a sample of WikiSplit (`examples/data`), or the file you name. Half of each
batch is random text to copy, from which a model this small learns to copy much sooner.

    python examples/train_t5.py [--steps 1200] [--data wiki_split.tsv] [--plot t5.png]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxlookahead import Sampling, TrieDrafter
from jaxlookahead.encoder_decoder import generate
from jaxlookahead.models.t5 import T5, T5Config, T5Model

SAMPLE = Path(__file__).parent / "data" / "wiki_split_sample.tsv"
START, END, BREAK = 0, 1, "<::::>"
LENGTH = 72  # tokens, of inputs and of responses


def read(path: Path) -> list[tuple[str, str]]:
    """The complex sentence and the two simple ones of each row."""
    with path.open(encoding="utf-8") as file:
        return [tuple(line.rstrip("\n").split("\t")) for line in file]


def make_tokenizer(texts: Sequence[str], size: int) -> Any:
    """Byte pairs of words between spaces."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "</s>", BREAK]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, special_tokens=special))
    return tokenizer


def make_model(vocab_size: int, hidden: int = 96, layers: int = 2, seed: int = 0) -> tuple[T5Model, Any]:
    """A T5 and random weights of the scales of Raffel et al. 2020."""
    config = T5Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        encoder_layers=layers,
        decoder_layers=layers,
        num_heads=4,
        head_size=hidden // 4,
        intermediate_size=2 * hidden,
        activation="gelu_tanh",
        gated=True,
        start_token=START,
    )
    weights = nnx.to_pure_dict(nnx.state(T5(config, rngs=nnx.Rngs(seed))))

    def scale(path: Any, leaf: jax.Array) -> jax.Array:
        names = [key.key for key in path]
        if "embed" in names:
            return leaf * hidden**0.5
        # Scores have no scale of their own.
        return leaf / config.head_size**0.5 if "q" in names else leaf

    return T5Model(config), jax.tree_util.tree_map_with_path(scale, weights)


def rows(lists: Sequence[Sequence[int]]) -> np.ndarray:
    """`[len(lists), LENGTH]` int32, zeros behind."""
    array = np.zeros((len(lists), LENGTH), np.int32)
    for row, tokens in zip(array, lists, strict=True):
        row[: len(tokens)] = tokens
    return array


def loss(model: T5Model, weights: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Cross entropy of `targets` `[B, T]` given `inputs` `[B, S]`, both padded with zeros, a mean over tokens."""
    module = model.module(weights)
    encoded = module.encode(inputs, jnp.sum(inputs != 0, axis=1))
    batch, length = targets.shape
    before = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=START)
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length))
    logits, _ = module(before, positions, mask, model.init_cache(batch, length), jnp.int32(0), encoded)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(each * (targets != 0)) / jnp.sum(targets != 0)


def train(
    model: T5Model, weights: Any, pairs: Sequence[tuple[list[int], list[int]]], steps: int, batch: int = 32
) -> tuple[Any, list[float]]:
    """Adam over random batches; returns the weights and the loss of each step."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.warmup_cosine_decay_schedule(0.0, 3e-3, 100, steps + 100))
    )
    state, rng, losses = optimizer.init(weights), np.random.default_rng(0), []

    @jax.jit
    def update(weights: Any, state: Any, inputs: jax.Array, targets: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(lambda w: loss(model, w, inputs, targets))(weights)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(weights, updates), state, value

    for _ in range(steps):
        chosen = [pairs[i] for i in rng.integers(0, len(pairs), batch // 2)]
        noise = [[*rng.integers(3, model.vocab_size, rng.integers(8, 48)).tolist(), END] for _ in range(batch // 2)]
        inputs = rows([source for source, _ in chosen] + noise)
        targets = rows([target for _, target in chosen] + noise)
        weights, state, value = update(weights, state, inputs, targets)
        losses.append(value)
    return weights, [float(value) for value in losses]


def compare(model: T5Model, weights: Any, inputs: Sequence[Sequence[int]]) -> dict[str, dict[str, Any]]:
    """Decodes greedily and sampled, plain and drafted; raises where the tokens differ."""
    found = {}
    for name, sampling in (("greedy", Sampling()), ("temperature 0.7", Sampling(temperature=0.7, seed=1))):
        options: dict[str, Any] = {
            "max_new_tokens": LENGTH,
            "eos_ids": [END],
            "sampling": sampling,
            "width": 8,
            "adapt": False,
        }
        plain = generate(model, weights, inputs, drafter=None, **options)
        drafted = generate(model, weights, inputs, drafter=TrieDrafter(), **options)
        for one, other in zip(plain, drafted, strict=True):
            if not np.array_equal(one.tokens, other.tokens):
                raise AssertionError(f"{name}: drafted and plain tokens differ")
        stats = drafted.stats
        found[name] = {
            "tokens": stats.tokens,
            "plain calls per token": plain.stats.row_steps / plain.stats.tokens,
            "drafted calls per token": stats.row_steps / stats.tokens,
            "outputs": [output.tokens.tolist() for output in drafted],
        }
    return found


def run(path: Path, *, steps: int, tests: int, hidden: int = 96, vocab_size: int = 512) -> dict[str, Any]:
    """Trains on all rows of the file but the last `tests`, and decodes those."""
    texts = read(path)
    tokenizer = make_tokenizer([text for pair in texts[:-tests] for text in pair], vocab_size)
    coded = [tuple([*tokenizer.encode(text).ids, END] for text in pair) for pair in texts]
    fitting = [pair for pair in coded[:-tests] if max(map(len, pair)) <= LENGTH]
    model, weights = make_model(tokenizer.get_vocab_size(), hidden)
    weights, losses = train(model, weights, fitting, steps)
    inputs = [source[-LENGTH:] for source, _ in coded[-tests:]]
    results = compare(model, weights, inputs)
    shown = [
        (texts[-tests + i][0], tokenizer.decode(results["greedy"]["outputs"][i], skip_special_tokens=False))
        for i in range(min(tests, 3))
    ]
    return {"losses": losses, "results": results, "shown": shown}


def main() -> None:
    """Trains, prints some outputs and a table, draws the loss."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=SAMPLE, metavar="FILE", help="rows of WikiSplit (%(default)s)")
    parser.add_argument("--steps", type=int, default=1200, help="of training (%(default)s)")
    parser.add_argument("--tests", type=int, default=32, help="rows to decode (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="hardly any training")
    parser.add_argument("--plot", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.quick:
        found = run(arguments.data, steps=20, tests=4, hidden=32)
    else:
        found = run(arguments.data, steps=arguments.steps, tests=arguments.tests)
    console = Console()
    for source, output in found["shown"]:
        console.print(source, style="dim", highlight=False, markup=False)
        console.print(output + "\n", highlight=False, markup=False)
    table = Table("", "tokens", "calls per token, plain", "drafted")
    for name, row in found["results"].items():
        cells = (row["plain calls per token"], row["drafted calls per token"])
        table.add_row(name, str(row["tokens"]), *(f"{cell:.2f}" for cell in cells))
    console.print(f"loss {found['losses'][0]:.2f} at first, {np.mean(found['losses'][-20:]):.2f} at last")
    console.print(table)
    if arguments.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(found["losses"])
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        figure.savefig(arguments.plot)


if __name__ == "__main__":
    main()
