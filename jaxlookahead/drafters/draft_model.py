"""Drafts from a second, smaller model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxlookahead import cache as caches
from jaxlookahead.drafters.protocol import Draft, DrafterBase
from jaxlookahead.mesh import jit_on_mesh, mesh_of
from jaxlookahead.models.protocol import Cache, Model, Params
from jaxlookahead.sampling.arrays import SamplingArrays, pack
from jaxlookahead.sampling.decide import process
from jaxlookahead.sampling.noise import Stream, gumbel, stream_key, token_noise
from jaxlookahead.sampling.params import Sampling
from jaxlookahead.sampling.processors import Context, advance, init_context
from jaxlookahead.step import tree_mask
from jaxlookahead.stochastic import largest
from jaxlookahead.stochastic_rule import Proposal

Mode = Literal["greedy", "coupled", "rejection"]
# New tokens that one call reads, at most, for each row.
CHUNKS = (8, 32, 128)


class _Compiled(NamedTuple):
    allocate: Callable[..., tuple[Cache, jax.Array]]
    grow: Callable[..., tuple[Cache, jax.Array]]
    read: Callable[..., tuple[Cache, jax.Array]]
    draft: Callable[..., tuple[Cache, jax.Array, jax.Array, jax.Array | None]]


@functools.lru_cache(maxsize=16)
def _compiled(model: Model, mesh: Mesh | None, depth: int, children: int, mode: Mode) -> _Compiled:
    axes = caches.find_axes(model)

    def allocate(rows: int, slots: int) -> tuple[Cache, jax.Array]:
        return model.init_cache(rows, slots), jnp.zeros((rows, slots), jnp.int32)

    def grow(cache: Cache, history: jax.Array, slots: int) -> tuple[Cache, jax.Array]:
        return caches.grow(cache, axes, slots), jnp.pad(history, ((0, 0), (0, slots - history.shape[1])))

    def score(params: Params, cache: Cache, lengths: jax.Array, tokens: jax.Array) -> tuple[jax.Array, Cache]:
        """Reads a chain of tokens behind the committed ones, and commits it."""
        (rows, size), slots = tokens.shape, caches.num_slots(cache, axes)
        positions = lengths[:, None] + jnp.arange(size, dtype=jnp.int32)
        if model.max_length is not None:
            positions = jnp.minimum(positions, model.max_length - 1)
        chain = jnp.broadcast_to(jnp.tri(size, dtype=bool), (rows, size, size))
        start = jnp.int32(slots - size)
        logits, cache = model.forward(params, tokens, positions, tree_mask(lengths, chain, slots), cache, start)
        path = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (rows, size))
        return logits, caches.commit(cache, axes, start, lengths, path)

    def read(params: Params, cache: Cache, history: jax.Array, packed: jax.Array) -> tuple[Cache, jax.Array, jax.Array]:
        counts, lengths, tokens = packed[:, 0], packed[:, 1], packed[:, 3:]
        logits, cache = score(params, cache, lengths, tokens)
        # Entries past `counts` are overwritten before anything reads them.
        put: Callable[..., jax.Array] = jax.vmap(lambda row, new, at: lax.dynamic_update_slice(row, new, (at,)))
        last = jnp.maximum(counts - 1, 0)[:, None, None]
        return cache, put(history, tokens, lengths), jnp.take_along_axis(logits, last, axis=1)[:, 0]

    def choose(arrays: SamplingArrays, context: Context, logits: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Children `[B, C]` of one node of each row, and the distribution `[B, V]` that they were drawn from."""
        scores = processed = process(arrays, context, logits)
        sampled = (arrays.temperature > 0)[:, None]
        if mode == "coupled":
            noise = token_noise(arrays.seed, arrays.request, context.position, arrays.vocab_size)
            scores = processed + jnp.where(sampled, noise, 0)
        elif mode == "rejection":
            key = stream_key(arrays.seed, arrays.request, context.position, Stream.DRAFT)
            scores = processed + jnp.where(sampled, gumbel(key, arrays.vocab_size), 0)
        q = jax.nn.softmax(processed) if mode == "rejection" else None
        return jax.vmap(functools.partial(largest, count=children))(scores), q

    def draft(
        params: Params, cache: Cache, history: jax.Array, packed: jax.Array, arrays: SamplingArrays
    ) -> tuple[Cache, jax.Array, jax.Array, jax.Array | None]:
        cache, history, logits = read(params, cache, history, packed)
        context = init_context(arrays, history, packed[:, 2], packed[:, 0] + packed[:, 1])
        everyone = jnp.ones(len(packed), bool)

        def go_on(carry: tuple[Cache, Context, jax.Array], _: None) -> tuple[Any, Any]:
            cache, context, logits = carry
            found = choose(arrays, context, logits)
            token = jnp.maximum(found[0][:, 0], 0)
            logits, cache = score(params, cache, context.length, token[:, None])
            return (cache, advance(context, token, everyone), logits[:, 0]), found

        (cache, context, logits), found = lax.scan(go_on, (cache, context, logits), None, length=depth - 1)
        last = choose(arrays, context, logits)
        tokens, q = jax.tree.map(lambda above, x: jnp.moveaxis(jnp.append(above, x[None], 0), 0, 1), found, last)
        return cache, history, tokens, q

    def read_on(*arguments: Any) -> tuple[Cache, jax.Array]:
        return read(*arguments)[:2]

    jit = functools.partial(jit_on_mesh, mesh=mesh)
    allocator = functools.cache(lambda *sizes: jit(lambda: allocate(*sizes)))
    grower = functools.cache(lambda slots: jit(lambda cache, history: grow(cache, history, slots)))
    return _Compiled(
        allocate=lambda *sizes: allocator(*sizes)(),
        grow=lambda cache, history, slots: grower(slots)(cache, history),
        read=jit(read_on, donate_argnums=(1, 2)),
        draft=jit(draft, donate_argnums=(1, 2)),
    )


@dataclasses.dataclass
class _Request:
    row: int
    text: list[int]
    prompt_length: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    request_id: int = -1
    read: int = 0  # tokens of the text that the cache holds
    readable: bool = True


class DraftModel(DrafterBase):
    """Drafts what a smaller model would say.

    The draft model has a cache of its own with a row for each live request. All rows draft together, when the first
    of them is asked. Modes differ where a request samples:

    * `coupled`: the draft model samples with the noise that the target will use for the same token, and the same
      settings. The output stays that of plain decoding, token by token.
    * `greedy`: the draft model's most probable token. The output stays that of plain decoding.
    * `rejection`: the draft model samples with noise of its own, and `generate` accepts each token with probability
      `min(1, p / q)`. The output has the distribution of plain decoding, but other tokens, which depend on the draft;
      margins are NaN. One child a node accepts more often than `coupled` does.

    A request that doesn't sample is drafted greedily in all modes. A draft model with a larger vocabulary than the
    target's is cut to it; a text with tokens it does not know, or longer than it can hold, gets no drafts.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        *,
        depth: int = 4,
        children: int = 1,
        mode: Mode = "coupled",
        lenience: float = 1.0,
    ) -> None:
        """
        Args:
          model: the draft model, with the target's tokenizer.
          params: its parameters.
          depth: tokens drafted ahead, the draft model's calls a step.
          children: nodes at each depth; the first is gone on from, the others, the runners-up, are leaves.
          mode: see above.
          lenience: with `rejection`, in (0, 1]. Below 1 more drafts are accepted and the output's distribution
            deviates from the target's, see `stochastic.verify_children`; 1 is lossless.
        """
        for name, value in (("depth", depth), ("children", children)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if mode not in get_args(Mode):
            raise ValueError(f"mode={mode!r} must be one of {', '.join(get_args(Mode))}")
        if not 0 < lenience <= 1:
            raise ValueError(f"lenience must be in (0, 1], got {lenience!r}")
        if lenience != 1 and mode != "rejection":
            raise ValueError(f"lenience={lenience!r} has no meaning with mode={mode!r}; use mode='rejection'")
        self.vocab_size = model.vocab_size
        self.stochastic = mode == "rejection"
        self._params, self._max_length = params, model.max_length
        self._depth, self._children, self._lenience = depth, children, lenience
        self._calls = _compiled(model, mesh_of(params), depth, children, mode)
        self._requests: dict[Hashable, _Request] = {}
        self._drafts: dict[Hashable, np.ndarray] = {}
        self._rows = self._slots = 0
        self._device: tuple[Cache, jax.Array] = (None, jnp.zeros((0, 0), jnp.int32))
        self._arrays: SamplingArrays | None = None
        self._q: jax.Array | None = None

    def begin(self, request: Hashable, prompt: Sequence[int], *, namespace: Hashable | None = None) -> None:
        """See `Drafter`."""
        del namespace
        taken = {other.row for other in self._requests.values()}
        row = next(row for row in range(len(taken) + 1) if row not in taken)
        self._requests[request] = _Request(row, [], len(prompt))
        self._arrays = None
        self.extend(request, prompt)

    def begin_sampling(self, request: Hashable, sampling: Sampling, request_id: int) -> None:
        """See `SamplingDrafter`."""
        self._requests[request].sampling = _known(sampling, self.vocab_size)
        self._requests[request].request_id = request_id
        self._arrays = None

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        """See `Drafter`."""
        state = self._requests[request]
        state.text.extend(tokens)
        state.readable &= max(tokens, default=0) < self.vocab_size
        self._drafts.pop(request, None)

    def end(self, request: Hashable, *, remember: bool = True) -> None:
        """See `Drafter`."""
        del remember, self._requests[request]
        self._drafts.pop(request, None)

    def draft(self, request: Hashable, budget: int, max_depth: int) -> Draft:
        """See `Drafter`."""
        state = self._requests[request]
        if self._max_length is not None:
            max_depth = min(max_depth, self._max_length - len(state.text))
        if not state.readable or max_depth < 1 or budget < 1:
            return Draft()
        if request not in self._drafts:
            self._draft_all()
        sources: list[str] = []
        draft = Draft(sources=sources)
        tokens = self._drafts[request][: min(max_depth, budget)]
        # The chain first, then the runners-up of every depth: the order in which siblings were drawn.
        for rank in range(self._children):
            for depth, token in enumerate(tokens[:, rank].tolist()):
                if len(draft) < budget:
                    draft.tokens.append(token)
                    draft.parents.append(depth - 1)
                    sources.append("draft_model")
        return draft

    def proposal(self, requests: Sequence[Hashable | None]) -> Proposal:
        """What the latest drafts of the requests, one for each row of a step, were drawn from."""
        q = self._q
        if q is None:
            q = jnp.zeros((1, self._depth, self.vocab_size), jnp.float32)
        # A row without a draft may point anywhere.
        rows = [self._requests[request].row if request in self._drafts else 0 for request in requests]
        places: Any = np.array(rows, np.int32)
        lenience: Any = np.float32(self._lenience)
        return Proposal(q=q, rows=places, lenience=lenience, children=self._children)

    def _draft_all(self) -> None:
        """Reads what is new in every row, then drafts for all of them."""
        live = {key: x for key, x in self._requests.items() if x.readable and self._fits(x)}
        self._reserve(live.values())
        for x in live.values():
            # At least the newest token: drafts start from its logits.
            x.read = min(x.read, len(x.text) - 1)
        while True:
            longest = max(len(x.text) - x.read for x in live.values())
            size = next((size for size in CHUNKS if size >= longest), CHUNKS[-1])
            packed = np.zeros((self._rows, 3 + size), np.int32)
            for x in live.values():
                new = x.text[x.read : x.read + size]
                packed[x.row, :3] = len(new), x.read, x.prompt_length
                packed[x.row, 3 : 3 + len(new)] = new
            if longest <= size:
                break
            self._device = self._calls.read(self._params, *self._device, packed)
            for x in live.values():
                x.read = min(x.read + size, len(x.text) - 1)
        cache, history, tokens, self._q = self._calls.draft(self._params, *self._device, packed, self._settings())
        self._device = (cache, history)
        for x in live.values():
            x.read = len(x.text)
        drafted = np.asarray(tokens)
        self._drafts = {key: drafted[x.row] for key, x in live.items()}

    def _fits(self, request: _Request) -> bool:
        return self._max_length is None or len(request.text) < self._max_length

    def _reserve(self, live: Any) -> None:
        slots = caches.slots_for(max(len(x.text) for x in live) + CHUNKS[-1] + self._depth)
        rows = max(x.row for x in self._requests.values()) + 1
        if rows > self._rows:
            self._rows, self._slots = 1 << (rows - 1).bit_length(), max(slots, self._slots)
            self._device = self._calls.allocate(self._rows, self._slots)
            self._arrays = None
            for x in self._requests.values():
                x.read = 0
        elif slots > self._slots:
            self._device = self._calls.grow(*self._device, slots)
            self._slots = slots

    def _settings(self) -> SamplingArrays:
        if self._arrays is None:
            samplings, ids = [Sampling()] * self._rows, [-1] * self._rows
            for x in self._requests.values():
                samplings[x.row], ids[x.row] = x.sampling, x.request_id
            self._arrays = jax.device_put(pack(samplings, requests=ids, vocab_size=self.vocab_size))
        return self._arrays


def _known(sampling: Sampling, vocab_size: int) -> Sampling:
    """The settings without the token ids that a vocabulary lacks."""

    def some(tokens: Iterable[int]) -> tuple[int, ...]:
        return tuple(token for token in tokens if token < vocab_size)

    return dataclasses.replace(
        sampling,
        logit_bias={token: sampling.logit_bias[token] for token in some(sampling.logit_bias)},
        banned_tokens=some(sampling.banned_tokens),
        banned_sequences=tuple(x for x in sampling.banned_sequences if len(some(x)) == len(x)),
        forced_tokens={i: token for i, token in sampling.forced_tokens.items() if token < vocab_size},
    )
