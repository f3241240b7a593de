"""Distils a small draft model from a larger one, then measures how often its drafts are accepted.

    python examples/distill_draft.py                              # learns from text that the model writes itself
    python examples/distill_draft.py --traces traces.jsonl        # or from prompts and responses, as token ids

The student has two layers of width 128 and knows the most frequent tokens only; it shows that a draft model may be any
`Model`: `Frequent` translates between the two vocabularies. Its loss is the cross-entropy with the teacher's most
probable tokens at every position (Hinton et al. 2015).

Acceptance with SmolLM2-135M-Instruct, `--traces` with its own greedy responses, `--tokens 32768 --steps 400`, depth 3,
16 test prompts of mixed tasks, 48 tokens each:

| target | drafts | first token accepted | accepted of 3 | tokens per call |
|---|---|---|---|---|
| greedy | greedy | 0.22 | 0.32 | 1.32 |
| temperature 0.7 | greedy | 0.15 | 0.22 | 1.22 |
| temperature 0.7 | coupled | 0.16 | 0.24 | 1.24 |
| temperature 0.7 | rejection | 0.20 | 0.28 | 1.28 |
| temperature 1 | greedy | 0.17 | 0.22 | 1.22 |
| temperature 1 | coupled | 0.19 | 0.24 | 1.25 |
| temperature 1 | rejection | 0.24 | 0.33 | 1.33 |
| temperature 1, top-p 0.9 | greedy | 0.17 | 0.24 | 1.24 |
| temperature 1, top-p 0.9 | coupled | 0.16 | 0.21 | 1.21 |
| temperature 1, top-p 0.9 | rejection | 0.20 | 0.24 | 1.24 |
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxlookahead import generate, load
from jaxlookahead.checkpoints.tokenizer import chat_ids
from jaxlookahead.drafters.draft_model import DraftModel
from jaxlookahead.models.config import DecoderConfig
from jaxlookahead.models.decoder import Decoder
from jaxlookahead.models.flax_nnx import from_nnx
from jaxlookahead.models.protocol import Cache, Model, Params
from jaxlookahead.sampling import Sampling

BATCH, WINDOW, TOP = 8, 64, 32
TOPICS = ["the sea", "a bicycle", "bread", "prime numbers", "a letter", "winter", "Python lists", "rivers"]
TASKS = ["Explain {}.", "Write a short story about {}.", "List five facts about {}.", "Ask me something about {}."]


@dataclasses.dataclass(frozen=True)
class Frequent:
    """A model over the frequent tokens of a larger vocabulary; it gives the others no probability.

    Its parameters are `inner`, those of the inner model, whose last token id stands for all others, and `ids`
    `[V]` int32, the inner id of each token.
    """

    inner: Model
    vocab_size: int
    max_length: int | None

    def init_cache(self, batch: int, slots: int) -> Cache:
        return self.inner.init_cache(batch, slots)

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        cache: Cache,
        start: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        ids = params["ids"]
        logits, cache = self.inner.forward(params["inner"], ids[tokens], positions, mask, cache, start)
        return logits.at[..., -1].set(-jnp.inf)[..., ids], cache


def score(model: Model, params: Params, tokens: jax.Array) -> jax.Array:
    """Logits `[B, T, V]` of texts `[B, T]` read from their first token on."""
    rows, size = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), tokens.shape)
    mask = jnp.broadcast_to(jnp.tri(size, dtype=bool), (rows, size, size))
    return model.forward(params, tokens, positions, mask, model.init_cache(rows, size), jnp.int32(0))[0]


def question(loaded: Any, text: str) -> list[int]:
    return chat_ids(loaded.tokenizer, [{"role": "user", "content": text}])


def own_text(loaded: Any, count: int) -> list[list[int]]:
    """Prompts and sampled responses of the model itself, `count` tokens or more."""
    prompts = [question(loaded, task.format(topic)) for topic in TOPICS for task in TASKS]
    texts, seed = [], 0
    while sum(map(len, texts)) < count:
        sampling = Sampling(temperature=1.0, seed=seed)
        written = generate(loaded.model, loaded.params, prompts, max_new_tokens=128, sampling=sampling, rows=16)
        texts += [prompt + tokens for prompt, tokens in zip(prompts, written.tokens, strict=True)]
        seed += 1
    return texts


def windows(texts: list[list[int]], count: int, seed: int = 0) -> np.ndarray:
    """`[n, BATCH, WINDOW]` int32 pieces of text, `count` tokens or fewer, in random order."""
    pieces = [text[i : i + WINDOW] for text in texts for i in range(0, len(text) - WINDOW + 1, WINDOW)]
    chosen = np.random.default_rng(seed).permutation(len(pieces))[: count // WINDOW // BATCH * BATCH]
    return np.array([pieces[i] for i in chosen], np.int32).reshape(-1, BATCH, WINDOW)


def teach(model: Model, params: Params, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The teacher's `TOP` most probable next tokens, `[n, BATCH, WINDOW, TOP]` int32, and their probabilities."""

    @jax.jit
    def best(params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, tokens = jax.lax.top_k(score(model, params, tokens), TOP)
        return tokens, jax.nn.softmax(values)

    found = [jax.tree.map(np.asarray, best(params, tokens)) for tokens in data]
    return np.stack([x[0] for x in found]), np.stack([x[1] for x in found])


def distil(
    vocab_size: int, data: np.ndarray, targets: np.ndarray, probs: np.ndarray, *, size: int, steps: int
) -> tuple[Model, Params]:
    """Trains a student.

    Args:
      vocab_size: `V` of the teacher.
      data: from `windows`.
      targets: from `teach`.
      probs: from `teach`.
      size: how many tokens the student knows.
      steps: of training, one batch each.
    """
    mass = np.bincount(targets.ravel(), weights=probs.ravel(), minlength=vocab_size)
    known = np.argsort(-mass, kind="stable")[:size]
    ids = np.full(vocab_size, size, np.int32)
    ids[known] = np.arange(size)
    config = DecoderConfig(
        vocab_size=size + 1,
        hidden_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=32,
        intermediate_size=384,
        block=0,
    )
    inner, params = from_nnx(Decoder(config, rngs=nnx.Rngs(0)))
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 4e-3, steps // 10, steps))

    @jax.jit
    def update(params: Params, state: Any, tokens: jax.Array, targets: jax.Array, probs: jax.Array) -> Any:
        def loss(params: Params) -> jax.Array:
            logprobs = jax.nn.log_softmax(score(inner, params, tokens))
            return -jnp.mean(jnp.sum(probs * jnp.take_along_axis(logprobs, targets, axis=-1), axis=-1))

        value, slope = jax.value_and_grad(loss)(params)
        change, state = optimizer.update(slope, state, params)
        return optax.apply_updates(params, change), state, value

    def batches() -> Iterator[int]:
        rng = np.random.default_rng(0)
        while True:
            yield from rng.permutation(len(data))

    state = optimizer.init(params)
    for step, i in zip(range(steps), batches(), strict=False):
        params, state, loss = update(params, state, ids[data[i]], ids[targets[i]], probs[i])
        if step % 50 == 0 or step == steps - 1:
            print(f"  step {step}: loss {float(loss):.3f}", flush=True)
    return Frequent(inner, vocab_size, None), {"inner": params, "ids": jnp.asarray(ids)}


def measure(loaded: Any, student: tuple[Model, Params], prompts: list[list[int]], *, tokens: int, depth: int) -> None:
    """Prints how often the drafts are accepted, for every way to draft."""
    settings = {
        "greedy": Sampling(),
        "temperature 0.7": Sampling(temperature=0.7, seed=1),
        "temperature 1": Sampling(temperature=1.0, seed=1),
        "temperature 1, top-p 0.9": Sampling(temperature=1.0, top_p=0.9, seed=1),
    }
    print(f"| target | drafts | first token accepted | accepted of {depth} | tokens per call |\n|---|---|---|---|---|")
    for name, sampling in settings.items():
        for mode in ("greedy",) if name == "greedy" else ("greedy", "coupled", "rejection"):
            stats = generate(
                loaded.model,
                loaded.params,
                prompts,
                max_new_tokens=tokens,
                eos_ids=loaded.eos_ids,
                sampling=sampling,
                drafter=DraftModel(*student, depth=depth, mode=mode),
                width=depth + 1,
                adapt=False,
            ).stats
            first = 1 - stats.histogram[0] / stats.row_steps
            accepted = stats.accepted / stats.row_steps
            print(f"| {name} | {mode} | {first:.2f} | {accepted:.2f} | {stats.tokens_per_call:.2f} |", flush=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, help="JSONL file with `prompt` and `response`, and maybe `split`")
    parser.add_argument("--tokens", type=int, default=65536, help="of text to learn from")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens that the student knows")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    options = parser.parse_args()

    loaded = load()
    if options.traces:
        with options.traces.open() as file:
            rows = [json.loads(line) for line in file]
        learn = [row["prompt"] + row["response"] for row in rows if row.get("split") != "test"]
        tests = [row["prompt"] for row in rows if row.get("split") == "test" and len(row["prompt"]) <= 128]
        tests = tests[:: max(len(tests) // options.prompts, 1)][: options.prompts]
    else:
        learn = own_text(loaded, options.tokens)
        tests = [question(loaded, f"Tell me about {topic}.") for topic in TOPICS]
    data = windows(learn, options.tokens)
    start = time.perf_counter()
    targets, probs = teach(loaded.model, loaded.params, data)
    print(f"{data.size} tokens scored by the teacher in {time.perf_counter() - start:.0f} s", flush=True)
    start = time.perf_counter()
    student = distil(loaded.model.vocab_size, data, targets, probs, size=options.vocabulary, steps=options.steps)
    print(f"distilled in {time.perf_counter() - start:.0f} s", flush=True)
    measure(loaded, student, tests, tokens=options.max_new_tokens, depth=options.depth)


if __name__ == "__main__":
    main()
