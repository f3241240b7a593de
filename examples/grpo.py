"""GRPO on a verifiable task, with rollouts drafted from what earlier epochs said.

A small decoder, random at first, learns to count: the prompt is a digit, the right response the nine digits that follow
it (modulo ten) and an end token. The reward is the share of right tokens. Each epoch draws samples for every prompt,
ranks them within their prompt (group relative advantages, Shao et al. 2024, https://arxiv.org/abs/2402.03300) and takes
a few clipped policy-gradient steps with optax. Rollouts are drawn twice with the same seed, drafted and plain: the
tokens are the same, the model calls are fewer and fewer as the policy settles.

    python examples/grpo.py [--epochs 40] [--plot grpo.png]
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxlookahead import Sampling, TrieDrafter
from jaxlookahead.models.dummy import tiny_decoder
from jaxlookahead.rollout import Rollout, rollout
from jaxlookahead.step import prefill

END = 10
PROMPTS = [[digit] for digit in range(10)]
ANSWERS = [[(digit + i) % 10 for i in range(1, 10)] + [END] for digit in range(10)]
LENGTH = len(ANSWERS[0])


def rewards(samples: Rollout, n: int) -> np.ndarray:
    """The share of right tokens in each of the `[R]` samples."""
    right = np.zeros(len(samples.tokens))
    for i, (tokens, mask) in enumerate(zip(samples.tokens, samples.mask, strict=True)):
        answer = np.array(ANSWERS[i // n])
        response = tokens[mask]
        right[i] = np.mean(np.pad(response, (0, LENGTH - len(response)), constant_values=-1) == answer)
    return right


def loss(model: Any, params: Any, batch: dict[str, jax.Array], *, clip: float, entropy_bonus: float) -> jax.Array:
    """The clipped surrogate of PPO with group relative advantages and an entropy bonus, averaged over tokens."""
    tokens = batch["sequences"]
    logits, _ = prefill(model, params, model.init_cache(*tokens.shape), tokens, jnp.int32(0))
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=2)[..., 0]
    logprobs = logprobs[:, -batch["mask"].shape[1] :]
    ratio = jnp.exp(logprobs - batch["logprobs"])
    gain = batch["advantages"][:, None]
    surrogate = jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - clip, 1 + clip) * gain)
    distribution = jax.nn.log_softmax(logits[:, -1 - batch["mask"].shape[1] : -1])
    entropy = -jnp.sum(jnp.exp(distribution) * distribution, axis=-1)
    # Without the bonus a policy this small settles on the first digits that it gets right.
    return -jnp.sum((surrogate + entropy_bonus * entropy) * batch["mask"]) / jnp.sum(batch["mask"])


def padded(samples: Rollout, scores: np.ndarray, n: int) -> dict[str, np.ndarray]:
    """A batch of fixed shape for the loss."""
    grouped = scores.reshape(-1, n)
    centred = grouped - grouped.mean(axis=1, keepdims=True)
    room = ((0, 0), (0, LENGTH - samples.tokens.shape[1]))
    return {
        "sequences": np.concatenate([samples.prompts, np.pad(samples.tokens, room)], axis=1),
        "mask": np.pad(samples.mask, room),
        "logprobs": np.pad(samples.logprobs, room),
        "advantages": (centred / (grouped.std(axis=1, keepdims=True) + 1e-4)).reshape(-1).astype(np.float32),
    }


def train(epochs: int, n: int, seed: int = 0) -> list[dict[str, float]]:
    """Trains, and returns for each epoch its reward and what its rollouts took."""
    model, params = tiny_decoder(seed=seed, vocab_size=11, max_length=32)
    # A policy that is sure of itself before it has learnt anything explores nothing.
    params = {**params, "norm": jax.tree.map(lambda x: x / 4, params["norm"])}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
    state = optimizer.init(params)

    @jax.jit
    def update(params: Any, state: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any]:
        gradients = jax.grad(functools.partial(loss, model, clip=0.2, entropy_bonus=0.03))(params, batch)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state

    drafter, history = TrieDrafter(), []
    for epoch in range(epochs):
        options: dict[str, Any] = {
            "max_new_tokens": LENGTH,
            "sampling": Sampling(temperature=1.0, seed=epoch),
            "eos_ids": [END],
            "rows": 10,
            "width": 8,
            "adapt": False,
        }
        drafted = rollout(model, params, PROMPTS, n, drafter=drafter, **options)
        plain = rollout(model, params, PROMPTS, n, drafter=None, **options)
        if not np.array_equal(drafted.tokens, plain.tokens):
            raise AssertionError(f"epoch {epoch}: drafted and plain rollouts differ")
        scores = rewards(drafted, n)
        stats = drafted.generation.stats
        history.append(
            {
                "epoch": epoch,
                "reward": float(scores.mean()),
                "calls_per_token": stats.row_steps / stats.tokens,
                "plain_calls_per_token": plain.generation.stats.row_steps / plain.generation.stats.tokens,
            }
        )
        batch = padded(drafted, scores, n)
        for _ in range(4):
            params, state = update(params, state, batch)
    return history


def main() -> None:
    """Trains, prints a table, draws a plot."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--samples", type=int, default=16, help="for each prompt (%(default)s)")
    parser.add_argument("--plot", metavar="FILE")
    arguments = parser.parse_args()
    history = train(arguments.epochs, arguments.samples)
    table = Table("epoch", "reward", "calls per token, drafted", "plain")
    for row in history[:: max(len(history) // 10, 1)] + history[-1:]:
        cells = (row["reward"], row["calls_per_token"], row["plain_calls_per_token"])
        table.add_row(str(int(row["epoch"])), *(f"{cell:.2f}" for cell in cells))
    Console().print(table)
    if arguments.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for key in ("reward", "calls_per_token"):
            axes.plot([row["epoch"] for row in history], [row[key] for row in history], label=key.replace("_", " "))
        axes.set_xlabel("epoch")
        axes.legend()
        figure.savefig(arguments.plot)


if __name__ == "__main__":
    main()
