"""Checks for your own model, and drafters that try to break decoding."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxlookahead import cache as caches
from jaxlookahead.drafters.protocol import Draft, DrafterBase
from jaxlookahead.models.protocol import Cache, Model, Params, check_contract
from jaxlookahead.step import prefill, tree_mask
from jaxlookahead.tree import ancestor_mask, depths

# A tree with branches, a chain and leaves at every depth.
_PARENTS = np.array([-1, 0, 0, 1, 1, 2, 3, 6], np.int32)


class ModelCheckError(AssertionError):
    """A model breaks the contract; the message says how."""


@dataclasses.dataclass(frozen=True)
class ModelReport:
    """Largest differences of logits that `check_model` found, all within its tolerance.

    Attributes:
      tree: every node of a tree against its own path run alone.
      commit: the step after a commit against a fresh prefill.
      tolerance: what was allowed.
    """

    tree: float
    commit: float
    tolerance: float


def check_model(
    model: Model,
    params: Params,
    *,
    seed: int = 0,
    slots: int = 256,
    prefix_lengths: Sequence[int] = (5, 12),
    tolerance: float | None = None,
) -> ModelReport:
    """Checks that a model scores draft trees as it scores text.

    A random tree behind prefixes of different lengths is scored in one call, and every node is compared with its own
    path run alone. Then one path is committed and the next token is compared with a fresh prefill.

    Args:
      model: see `jaxlookahead.models.protocol.Model`.
      params: its parameters.

    Other Args:
      seed: of the random tokens.
      slots: cache slots; take more than a sliding window is long to have windows checked.
      prefix_lengths: committed tokens of each row.
      tolerance: largest difference of logits allowed, relative to their largest absolute value; by default 1e-4 for
        float32 logits and parameters, and 0.05 for shorter types.

    Returns:
      A `ModelReport`.

    Raises:
      ModelCheckError: names what is wrong: mask ignored, positions ignored, window by slot, cache not movable.
      TypeError: `model` is a class, or lacks a part of the contract.
      UnsupportedCacheError: the cache can't drop tokens.
    """
    check_contract(model)
    axes = caches.find_axes(model)
    batch, width, longest = len(prefix_lengths), len(_PARENTS), max(prefix_lengths)
    limit = model.max_length
    if longest + width > min(slots - width, limit if limit is not None else slots):
        raise ValueError(f"prefix_lengths={tuple(prefix_lengths)} need more than {slots} slots or {limit} positions")
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(0, model.vocab_size, (batch, longest)).astype(np.int32)
    tokens = rng.integers(0, model.vocab_size, (batch, width)).astype(np.int32)
    parents = np.broadcast_to(_PARENTS, (batch, width))
    lengths = np.array(prefix_lengths, np.int32)
    ancestors = np.asarray(ancestor_mask(jnp.asarray(parents)))
    paths = [np.flatnonzero(ancestors[0, node]) for node in range(width)]

    forward = jax.jit(model.forward)
    empty = jax.eval_shape(lambda: model.init_cache(batch, slots))
    every = np.ones((batch, width, slots), bool)
    returned = jax.eval_shape(forward, params, tokens, tokens, every, empty, np.int32(0))
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ModelCheckError(
            f"{type(model).__name__}: forward returned a {type(returned).__name__}; it must return logits and the cache"
        )
    fill = jax.jit(lambda params, cache, tokens: prefill(model, params, cache, tokens, jnp.int32(0)))

    def alone(sequences: list[np.ndarray]) -> np.ndarray:
        """Logits after each sequence, from a fresh cache."""
        padded = np.zeros((len(sequences), longest + width + 1), np.int32)
        for row, sequence in zip(padded, sequences, strict=True):
            row[: len(sequence)] = sequence
        logits, _ = fill(params, model.init_cache(*padded.shape), padded)
        ends = [len(sequence) - 1 for sequence in sequences]
        return np.asarray(logits, np.float32)[np.arange(len(ends)), ends]

    def score(tokens: np.ndarray, positions: np.ndarray, slots: int) -> tuple[np.ndarray, Cache]:
        """Logits of the tree behind the prefixes, written at the last slots."""
        _, cache = fill(params, model.init_cache(batch, slots), prefixes)
        mask = tree_mask(jnp.asarray(lengths), jnp.asarray(ancestors), slots)
        logits, cache = forward(params, tokens, positions, mask, cache, jnp.int32(slots - width))
        return np.asarray(logits, np.float32), cache

    positions = lengths[:, None] + np.asarray(depths(jnp.asarray(ancestors)))
    logits, cache = score(tokens, positions, slots)
    if logits.shape != (batch, width, model.vocab_size):
        raise ModelCheckError(
            f"forward returned logits of shape {logits.shape}; [B, T, V] is {(batch, width, model.vocab_size)}"
        )
    wanted = alone(
        [np.concatenate([prefixes[b, :n], tokens[b, path]]) for b, n in enumerate(prefix_lengths) for path in paths]
    ).reshape(logits.shape)
    if tolerance is None:
        floats = [x.dtype for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
        tolerance = 1e-4 if all(jnp.finfo(dtype).bits >= 32 for dtype in floats) else 0.05
    scale = float(np.max(np.abs(wanted)))

    def gap(a: np.ndarray, b: np.ndarray) -> float:
        difference = float(np.max(np.abs(a - b))) / scale
        return difference if np.isfinite(difference) else np.inf

    tree_gap = gap(logits, wanted)
    if tree_gap > tolerance:
        # One early node, which a causal mask by slot would show to later ones, and the last, for a mask of all.
        changed = [1, width - 1]
        other = tokens.copy()
        other[:, changed] = (other[:, changed] + 1) % model.vocab_size
        apart = ~ancestors[0][:, changed].any(axis=1)
        moved = positions.copy()
        moved[:, 1:] += 3
        if gap(score(other, positions, slots)[0][:, apart], logits[:, apart]) > tolerance:
            why = "mask ignored: a node's logits depend on nodes that are not its ancestors"
        elif gap(score(tokens, moved, slots)[0][:, 1:], logits[:, 1:]) <= tolerance:
            why = "positions ignored: logits do not depend on `positions`; take them from there, not from the slot"
        elif gap(score(tokens, positions, longest + width)[0], wanted) <= tolerance:
            why = (
                "window by slot: right only where the tree lies close behind the prefix; "
                "a sliding window must go by position (slot i below `start` holds position i)"
            )
        else:
            why = "a tree node's logits differ from those of its own path run alone"
        raise ModelCheckError(
            f"{type(model).__name__}: {why}; relative difference {tree_gap:.2g}, {tolerance:.2g} allowed"
        )

    path = np.zeros((batch, width), np.int32)
    kept = paths[-1]
    path[:, : len(kept)] = kept
    cache = jax.jit(lambda cache, lengths, path: caches.commit(cache, axes, jnp.int32(slots - width), lengths, path))(
        cache, lengths, path
    )
    lengths = lengths + len(kept)
    newest = rng.integers(0, model.vocab_size, (batch, 1)).astype(np.int32)
    mask = tree_mask(jnp.asarray(lengths), jnp.ones((batch, 1, 1), bool), slots)
    after, _ = forward(params, newest, lengths[:, None], mask, cache, jnp.int32(slots - 1))
    sequences = [np.concatenate([prefixes[b, :n], tokens[b, kept], newest[b]]) for b, n in enumerate(prefix_lengths)]
    commit_gap = gap(np.asarray(after, np.float32)[:, 0], alone(sequences))
    if commit_gap > tolerance:
        raise ModelCheckError(
            f"{type(model).__name__}: cache not movable: after moving accepted entries to the slots behind the prefix, "
            f"the next token's logits are off by {commit_gap:.2g} relative, {tolerance:.2g} allowed; an entry must not "
            "depend on the slot where it lies"
        )
    return ModelReport(tree=tree_gap, commit=commit_gap, tolerance=tolerance)


Attack = Literal["random", "constant", "repeated", "out_of_order", "over_long", "zero", "foreign", "cycle"]
ATTACKS: tuple[str, ...] = get_args(Attack)


class AdversarialDrafter(DrafterBase):
    """Drafts nonsense. Decoding with it must give the tokens of plain decoding."""

    def __init__(self, attack: Attack, vocab_size: int, seed: int = 0) -> None:
        """
        Args:
          attack: `random` trees; a `constant` token in a chain; siblings `repeated` with one token; children before
            parents (`out_of_order`); an `over_long` chain that ignores budget and depth; token id `zero`; token ids
            outside the vocabulary (`foreign`); parents that form a `cycle` or do not exist.
          vocab_size: `V`.
          seed: of the random choices.
        """
        if attack not in ATTACKS:
            raise ValueError(f"attack={attack!r} must be one of {', '.join(ATTACKS)}")
        self.attack = attack
        self.vocab_size = vocab_size
        self._random = random.Random(seed)
        self._newest: dict[Hashable, int] = {}

    def begin(self, request: Hashable, prompt: Sequence[int], *, namespace: Hashable | None = None) -> None:
        del namespace
        self._newest[request] = prompt[-1]

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        if tokens:
            self._newest[request] = tokens[-1]

    def end(self, request: Hashable, *, remember: bool = True) -> None:
        del self._newest[request]

    def draft(self, request: Hashable, budget: int, max_depth: int) -> Draft:
        random, size = self._random, budget
        tokens = [random.randrange(self.vocab_size) for _ in range(size)]
        parents = [random.randrange(-1, i) for i in range(size)]
        if self.attack == "constant":
            tokens, parents = [self._newest[request]] * size, list(range(-1, size - 1))
        elif self.attack == "repeated":
            tokens = [random.randrange(2) for _ in range(size)]
        elif self.attack == "out_of_order":
            order = list(range(size))
            random.shuffle(order)
            place = {old: new for new, old in enumerate(order)} | {-1: -1}
            tokens, parents = [tokens[i] for i in order], [place[parents[i]] for i in order]
        elif self.attack == "over_long":
            size = 3 * budget + max_depth + 5
            tokens, parents = [random.randrange(self.vocab_size) for _ in range(size)], list(range(-1, size - 1))
        elif self.attack == "zero":
            tokens, parents = [0] * size, list(range(-1, size - 1))
        elif self.attack == "foreign":
            tokens = [random.choice([-1, self.vocab_size, 2**31 - 1, -(2**31), 3]) for _ in range(size)]
        elif self.attack == "cycle":
            parents = [random.randrange(-3, size + 3) for _ in range(size)]
        return Draft(tokens=tokens, parents=parents)


class OracleDrafter(DrafterBase):
    """Drafts known responses, with wrong branches around them: for tests that need deep acceptance."""

    def __init__(
        self,
        responses: dict[tuple[int, ...], Sequence[int]],
        vocab_size: int,
        *,
        error_rate: float = 0.1,
        seed: int = 0,
    ) -> None:
        """
        Args:
          responses: the response to each prompt.
          vocab_size: `V`.
          error_rate: how often the right token is left out of the tree.
          seed: of the random choices.
        """
        self.responses = responses
        self.vocab_size = vocab_size
        self.error_rate = error_rate
        self._random = random.Random(seed)
        self._live: dict[Hashable, tuple[Sequence[int], int]] = {}

    def begin(self, request: Hashable, prompt: Sequence[int], *, namespace: Hashable | None = None) -> None:
        del namespace
        self._live[request] = (self.responses[tuple(prompt)], 0)

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        response, done = self._live[request]
        self._live[request] = (response, done + len(tokens))

    def end(self, request: Hashable, *, remember: bool = True) -> None:
        del self._live[request]

    def draft(self, request: Hashable, budget: int, max_depth: int) -> Draft:
        response, done = self._live[request]
        random, draft, node = self._random, Draft(), -1
        for right in response[done : done + max_depth]:
            level = [random.randrange(self.vocab_size) for _ in range(random.randrange(3))]
            known = random.random() >= self.error_rate
            if known:
                level.insert(random.randrange(len(level) + 1), int(right))
            below = node
            for token in level:
                if len(draft) < budget:
                    draft.tokens.append(token)
                    draft.parents.append(node)
                    if token == right:
                        below = len(draft) - 1
            if not known or below == node:
                break
            node = below
        return draft
