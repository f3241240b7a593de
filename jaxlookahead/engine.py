"""The device side of decoding: a batch of slots, their cache, and the compiled calls that work on them.

Everything that differs from call to call is traced. What compiles anew is a bucket: tree width, cache slots, number
of rows, and for prefill the chunk size and the group size, each a power of two.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxlookahead import cache as caches
from jaxlookahead.accept import NO_TOKEN, RUNNING, Progress, StopRules
from jaxlookahead.drafters.protocol import Draft
from jaxlookahead.layout import on_one_device
from jaxlookahead.mesh import (
    REPLICATED,
    cache_specs,
    checked_specs,
    commit_on_mesh,
    jit_on_mesh,
    mesh_of,
    with_whole_rows,
)
from jaxlookahead.models.protocol import Cache, Model, Params
from jaxlookahead.sampling.arrays import SamplingArrays
from jaxlookahead.sampling.constraints import Constraint
from jaxlookahead.sampling.decide import LOGPROBS, top_logprobs
from jaxlookahead.sampling.processors import Processor
from jaxlookahead.sampling.rule import sampling_rule
from jaxlookahead.step import Rule, greedy_rule, prefill, verify
from jaxlookahead.stochastic_rule import Proposal, stochastic_rule
from jaxlookahead.struct import struct
from jaxlookahead.tree import NO_PARENT, ROOT, DraftTree, pack
from jaxlookahead.width import Costs, free_tokens

CHUNKS = (16, 64, 256)

# How often each bucket was traced; a bucket traced twice is a fault.
TRACES: collections.Counter[tuple[Any, ...]] = collections.Counter()


@struct
class State:
    """What the device knows of `B` rows besides their cache."""

    lengths: jax.Array  # [B] int32 tokens in the cache
    progress: Progress
    stops: StopRules
    # Only where requests have sampling settings:
    prompt_lengths: jax.Array | None = None  # [B] int32
    history: jax.Array | None = None  # [B, S + 1] int32, all tokens of a row, the newest included


class StepResult(NamedTuple):
    """`Walk` on the host. After `dispatch_plain`, `N` is the number of steps, and what is said of a node of a step."""

    tokens: np.ndarray  # [B, N] int32
    nodes: np.ndarray  # [B, N] int32
    path: np.ndarray  # [B, N] int32 the nodes at which the tokens were decided
    margins: np.ndarray  # [B, N] float32
    counts: np.ndarray  # [B] int32
    finish: np.ndarray  # [B] int32
    scores: dict[str, np.ndarray]  # [B, N] float32 each, `sampling.decide.LOGPROBS`; empty without sampling settings
    topk: np.ndarray  # [B, N, k] int32 the likeliest next tokens of every node; k is 0 unless asked for
    topk_logprobs: np.ndarray  # [B, N, k] float32 their log-probabilities under the model's own logits


class Compiled(NamedTuple):
    """The compiled calls of one model."""

    allocate: Callable[..., Cache]
    allocate_prefill: Callable[..., Cache]
    start: Callable[..., State]
    prefill: Callable[..., Cache]
    insert: Callable[..., Cache]
    set_row: Callable[..., State]
    step: Callable[..., tuple[Cache, State, jax.Array]]
    plain: Callable[..., tuple[Cache, State, jax.Array]]
    grow: Callable[..., Cache]
    costs: Costs


def _pack(told: dict[str, jax.Array]) -> jax.Array:
    """One int32 array `[B, 2 + (3 + ...) * N]` for the way to the host; `Engine.collect` takes it apart."""

    def bits(x: jax.Array) -> jax.Array:
        x = x if x.dtype == jnp.int32 else lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
        return x.reshape(len(x), -1)

    names = ("counts", "finish", "tokens", "nodes", "margins", *LOGPROBS, "topk", "topk_logprobs")
    return jnp.concatenate([bits(told[name]) for name in names if name in told], axis=1)


def _one_at_a_time(cached: Callable[..., Any]) -> Callable[..., Any]:
    """A cached function that two threads never run at once: both would find nothing, and compile everything twice."""
    lock = threading.Lock()

    @functools.wraps(cached)
    def call(*arguments: Any) -> Any:
        with lock:
            return cached(*arguments)

    return call


@_one_at_a_time
@functools.lru_cache(maxsize=16)
def compiled(
    model: Model,
    platform: str,
    mesh: Mesh | None,
    chosen: tuple[PartitionSpec, ...] | None = None,
    processors: tuple[Processor, ...] = (),
    constraint: Constraint | None = None,
    topk: int = 0,
) -> Compiled:
    """Builds the compiled calls once for each model, so that a call does not hash the model again.

    Args:
      model: the model.
      platform: see `platform_of`.
      mesh: see `mesh_of`.
      chosen: how the leaves of the cache lie on the mesh, in the order of `jax.tree.leaves`; without, as
        `mesh.cache_specs` has it.
      processors: the user's own logits processors.
      constraint: a host callback that says which tokens are allowed.
      topk: how many of the likeliest next tokens of every node a step returns.
    """
    axes = caches.find_axes(model)
    shapes = jax.eval_shape(lambda: model.init_cache(1, caches.MIN_SLOTS))
    specs = (
        cache_specs(shapes, axes, mesh) if chosen is None else jax.tree.unflatten(jax.tree.structure(shapes), chosen)
    )
    commit = commit_on_mesh(mesh, specs, axes)

    def trace(name: str, *bucket: Any) -> None:
        TRACES[(model, name, *bucket)] += 1

    def allocate(batch: int, slots: int, what: str = "allocate") -> Cache:
        trace(what, batch, slots)
        return model.init_cache(batch, slots)

    def start(rows: int, slots: int, rules: tuple[int, int, int], with_history: bool) -> State:
        trace("start", rows, slots, rules, with_history)
        eos_size, stops, longest = rules
        return State(
            lengths=jnp.zeros(rows, jnp.int32),
            progress=Progress(
                remaining=jnp.zeros(rows, jnp.int32), tail=jnp.full((rows, longest), NO_TOKEN, jnp.int32)
            ),
            stops=StopRules(
                eos=jnp.full((rows, eos_size), NO_TOKEN, jnp.int32),
                sequences=jnp.full((rows, stops, longest), NO_TOKEN, jnp.int32),
            ),
            prompt_lengths=jnp.zeros(rows, jnp.int32) if with_history else None,
            history=jnp.zeros((rows, slots + 1), jnp.int32) if with_history else None,
        )

    def prefill_chunk(params: Params, cache: Cache, tokens: jax.Array, start: jax.Array) -> Cache:
        trace("prefill", *tokens.shape, caches.num_slots(cache, axes))
        return prefill(model, params, cache, tokens, start)[1]

    def insert(cache: Cache, other: Cache, where: jax.Array) -> Cache:
        slots, rows = (jax.tree.leaves(other)[0].shape[axis] for axis in (axes[0].slot, axes[0].batch))
        trace("insert", *jax.tree.leaves(cache)[0].shape, rows, slots)
        return caches.insert_row(cache, axes, other, where[0], where[1])

    def set_row(
        state: State, row: jax.Array, limits: jax.Array, eos: jax.Array, sequences: jax.Array, history: jax.Array | None
    ) -> State:
        trace("set_row", len(state.lengths), len(eos), *sequences.shape, None if history is None else len(history))
        progress, stops = state.progress, state.stops
        state = dataclasses.replace(
            state,
            lengths=state.lengths.at[row].set(limits[0]),
            progress=Progress(
                remaining=progress.remaining.at[row].set(limits[1]),
                tail=progress.tail.at[row].set(NO_TOKEN),
            ),
            stops=StopRules(
                eos=stops.eos.at[row].set(eos),
                sequences=stops.sequences.at[row].set(sequences),
            ),
        )
        if history is None:
            return state
        assert state.history is not None and state.prompt_lengths is not None
        return dataclasses.replace(
            state,
            history=state.history.at[row].set(history),
            prompt_lengths=state.prompt_lengths.at[row].set(limits[0] + 1),
        )

    def advance(
        params: Params,
        cache: Cache,
        state: State,
        tree: DraftTree,
        settings: SamplingArrays | None,
        proposal: Proposal | None,
    ) -> tuple[Cache, State, dict[str, Any]]:
        """One step, and what the host wants to know of it, by name; `[B, N, ...]` but for `counts` and `finish`."""
        lengths = state.lengths
        rule: Rule = greedy_rule
        if settings is not None:
            assert state.history is not None and state.prompt_lengths is not None
            make = sampling_rule if proposal is None else functools.partial(stochastic_rule, tree, proposal)
            rule = make(
                settings,
                state.history,
                state.prompt_lengths,
                lengths + 1,
                processors=processors,
                constraint=constraint,
            )
        with on_one_device(mesh is None):
            done = verify(
                model,
                params,
                cache,
                lengths,
                tree,
                progress=state.progress,
                stops=state.stops,
                rule=rule,
                commit=commit,
            )
        walk = done.walk
        state = dataclasses.replace(state, lengths=done.lengths, progress=walk.progress)
        if state.history is not None:
            # Tokens past the emitted ones are overwritten by the next step before anything reads them.
            put: Callable[..., jax.Array] = jax.vmap(lambda row, new, at: lax.dynamic_update_slice(row, new, (at,)))
            state = dataclasses.replace(state, history=put(state.history, walk.tokens, lengths + 1))
        told = {name: getattr(walk, name) for name in ("counts", "finish", "tokens", "nodes", "margins")}
        told |= walk.scores or {}
        if topk:
            told["topk"], told["topk_logprobs"] = top_logprobs(done.logits, topk)
        return done.cache, state, told

    def step(
        params: Params,
        cache: Cache,
        state: State,
        packed: jax.Array,
        settings: SamplingArrays | None,
        proposal: Proposal | None = None,
    ) -> tuple[Cache, State, jax.Array]:
        shapes = [leaf.shape for leaf in jax.tree.leaves((state.stops, settings, proposal))]
        trace("step", *packed.shape[1:], caches.num_slots(cache, axes), *shapes)
        tree = DraftTree(tokens=packed[0], parents=packed[1])
        cache, state, told = advance(params, cache, state, tree, settings, proposal)
        return cache, state, _pack(told)

    def plain(
        params: Params,
        cache: Cache,
        state: State,
        newest: jax.Array,
        settings: SamplingArrays | None,
        steps: int,
    ) -> tuple[Cache, State, jax.Array]:
        """`steps` steps of one token each, or fewer if all rows end."""
        shapes = [leaf.shape for leaf in jax.tree.leaves((state.stops, settings))]
        trace("plain", *newest.shape, steps, caches.num_slots(cache, axes), *shapes)

        def one(cache: Cache, state: State, newest: jax.Array) -> tuple[Cache, State, dict[str, Any]]:
            root = DraftTree(tokens=newest[:, None], parents=jnp.full((len(newest), 1), NO_PARENT, jnp.int32))
            return advance(params, cache, state, root, settings, None)

        def going(carry: tuple[Any, ...]) -> jax.Array:
            done, _, state, *_ = carry
            return (done < steps) & jnp.any(state.progress.remaining > 0)

        def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            done, cache, state, newest, told = carry
            cache, state, new = one(cache, state, newest)
            newest = jnp.where(new["counts"] > 0, new["tokens"][:, 0], newest)

            def put(name: str, old: jax.Array) -> jax.Array:
                if name == "counts":
                    return old + new[name]
                if name == "finish":
                    return jnp.where(new[name] == RUNNING, old, new[name])
                return lax.dynamic_update_slice_in_dim(old, new[name], done, axis=1)

            return done + 1, cache, state, newest, {name: put(name, old) for name, old in told.items()}

        shapes = jax.eval_shape(one, cache, state, newest)[2]
        told = {
            name: jnp.zeros(x.shape if x.ndim == 1 else (x.shape[0], steps, *x.shape[2:]), x.dtype)
            for name, x in shapes.items()
        }
        _, cache, state, _, told = lax.while_loop(going, body, (jnp.int32(0), cache, state, newest, told))
        return cache, state, _pack(told)

    def grow(cache: Cache, slots: int) -> Cache:
        trace("grow", *jax.tree.leaves(cache)[0].shape, slots)
        return caches.grow(cache, axes, slots)

    jit = functools.partial(jit_on_mesh, mesh=mesh)
    jit_cache = functools.partial(jit, specs=specs)
    jit_prefill = functools.partial(jit, specs=with_whole_rows(specs, axes))
    jit_step = functools.partial(jit, specs=(specs, REPLICATED, REPLICATED), donate_argnums=(1, 2))

    def once(make: Callable[..., Any]) -> Callable[..., Any]:
        return _one_at_a_time(functools.cache(make))

    allocator = once(lambda *sizes: jit_cache(lambda: allocate(*sizes)))
    prefill_allocator = once(lambda *sizes: jit_prefill(lambda: allocate(sizes[0], sizes[1], "allocate_prefill")))
    starter = once(lambda *sizes: jit(lambda: start(*sizes)))
    grower = once(lambda slots: jit_cache(lambda cache: grow(cache, slots)))
    repeat = once(lambda steps: jit_step(functools.partial(plain, steps=steps)))
    return Compiled(
        allocate=lambda *sizes: allocator(*sizes)(),
        allocate_prefill=lambda *sizes: prefill_allocator(*sizes)(),
        start=lambda *sizes: starter(*sizes)(),
        prefill=jit_prefill(prefill_chunk, donate_argnums=1),
        insert=jit_cache(insert, donate_argnums=0),
        set_row=jit(set_row, donate_argnums=0),
        step=jit_step(step),
        plain=lambda *arguments, steps: repeat(steps)(*arguments),
        grow=lambda cache, slots: grower(slots)(cache),
        costs=Costs(free_tokens(platform)),
    )


def platform_of(params: Params) -> str:
    """Where the parameters are: `cpu`, `gpu`, `tpu`."""
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array):
            return next(iter(leaf.devices())).platform
    return jax.default_backend()


def chunk_sizes(tokens: int) -> list[int]:
    """Splits a prefill of `tokens` tokens into chunks of the sizes that are compiled; the last may be padded."""
    sizes = []
    while tokens > 0:
        fitting = min((size for size in CHUNKS if size >= tokens), default=CHUNKS[-1])
        if fitting > 2 * tokens and fitting > CHUNKS[0]:
            fitting = max(size for size in CHUNKS if size < fitting)
        sizes.append(fitting)
        tokens -= fitting
    return sizes


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


class Admission(NamedTuple):
    """A request that enters a row."""

    row: int
    prompt: Sequence[int]
    max_new_tokens: int
    eos: Sequence[int]
    stop: Sequence[Sequence[int]]
    settings: int = -1  # which of the engine's sampling settings the request has


class Engine:
    """`B` rows that decode together."""

    def __init__(
        self,
        model: Model,
        params: Params,
        *,
        rows: int,
        eos_size: int,
        stop_shape: tuple[int, int],
        settings: SamplingArrays | None = None,
        processors: tuple[Processor, ...] = (),
        constraint: Constraint | None = None,
        topk: int = 0,
        cache_spec: Any = None,
    ) -> None:
        """Allocates nothing yet.

        Args:
          model: the model.
          params: its parameters.
          rows: `B`.
          eos_size: the most EOS ids that a request will have.
          stop_shape: the most stop sequences that a request will have, and the longest of them.
          settings: sampling settings of all requests, on the host; the last ones are those of an empty row.
          processors: the user's own logits processors.
          constraint: a host callback that says which tokens are allowed.
          topk: how many of the likeliest next tokens of every node to return.
          cache_spec: how the cache lies on the mesh of the parameters; see `generate`.
        """
        mesh = mesh_of(params)
        chosen = None
        if cache_spec is not None:
            shapes = jax.eval_shape(lambda: model.init_cache(rows, caches.MIN_SLOTS))
            chosen = tuple(checked_specs(shapes, mesh, cache_spec))
        self._compiled = compiled(model, platform_of(params), mesh, chosen, processors, constraint, topk)
        self._topk = topk
        self._settings = settings
        self._settings_of_rows = np.full(rows, -1)
        self._row_settings: SamplingArrays | None = None
        self._axes = caches.find_axes(model)
        self._params = params
        self._rows = rows
        self._eos_size = _power_of_two(max(eos_size, 1))
        self._stop_shape = (_power_of_two(max(stop_shape[0], 1)), _power_of_two(max(stop_shape[1], 1)))
        self._cache: Cache | None = None
        self._state: State | None = None
        self._lengths = np.zeros(rows, np.int64)
        self._prefilled: dict[tuple[int, ...], tuple[Cache | None, int]] = {}
        self.slots = 0

    @property
    def costs(self) -> Costs:
        """Measured step times, shared with other engines of the model."""
        return self._compiled.costs

    def reserve(self, tokens: int) -> None:
        """Makes room for rows of `tokens` committed and scratch slots."""
        slots = caches.slots_for(tokens)
        if self._state is None:
            rules = (self._eos_size, *self._stop_shape)
            self._cache = self._compiled.allocate(self._rows, slots)
            self._state = self._compiled.start(self._rows, slots, rules, self._settings is not None)
            self.slots = slots
        # By doubling, so that few pairs of sizes compile.
        while slots > self.slots:
            self.slots *= 2
            self._cache = self._compiled.grow(self._cache, self.slots)
            history = self._state.history
            if history is not None:
                history = jnp.pad(history, ((0, 0), (0, self.slots + 1 - history.shape[1])))
                self._state = dataclasses.replace(self._state, history=history)

    def admit(self, admissions: Sequence[Admission], again: Collection[tuple[int, ...]] = ()) -> None:
        """Prefills prompts, all but their last token, and puts them into their rows.

        Prompts of similar length go through the model together, equal ones once.

        Args:
          admissions: the requests and their rows.
          again: prompts, less their last token, that later admissions will have too: their prefill is kept for them.
        """
        groups: dict[tuple[int, ...], dict[tuple[int, ...], list[Admission]]] = {}
        for admission in admissions:
            held = tuple(admission.prompt[:-1])
            self.reserve(len(held) + 1)
            if held in self._prefilled:
                self._enter(admission, *self._prefilled[held])
                continue
            group = groups.setdefault(tuple(chunk_sizes(len(held))), {})
            group.setdefault(held, []).append(admission)
        self._prefilled = {held: entry for held, entry in self._prefilled.items() if held in again}
        for sizes, group in groups.items():
            cache = self._prefill(sizes, list(group)) if sizes else None
            for source, (held, entering) in enumerate(group.items()):
                for admission in entering:
                    self._enter(admission, cache, source)
                if held in again:
                    self._prefilled[held] = (cache, source)
        if self._settings is not None:
            chosen = self._settings_of_rows
            self._row_settings = jax.device_put(jax.tree.map(lambda x: np.asarray(x)[chosen], self._settings))

    def _prefill(self, sizes: Sequence[int], prompts: Sequence[tuple[int, ...]]) -> Cache:
        tokens = np.zeros((_power_of_two(len(prompts)), sum(sizes)), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        slots = caches.slots_for(sum(sizes))
        # The prefill cache may not be larger than the one it is copied into.
        self.reserve(slots)
        cache = self._compiled.allocate_prefill(len(tokens), slots)
        start = 0
        for size in sizes:
            chunk = tokens[:, start : start + size]
            cache = self._compiled.prefill(self._params, cache, chunk, np.int32(start))
            start += size
        return cache

    def _enter(self, admission: Admission, cache: Cache | None, source: int) -> None:
        assert self._state is not None
        row, held = admission.row, len(admission.prompt) - 1
        if cache is not None:
            where = np.array([source, row], np.int32)
            self._cache = self._compiled.insert(self._cache, cache, where)
        eos = np.full(self._eos_size, NO_TOKEN, np.int32)
        eos[: len(admission.eos)] = admission.eos
        sequences = np.full(self._stop_shape, NO_TOKEN, np.int32)
        for i, sequence in enumerate(admission.stop):
            sequences[i, -len(sequence) :] = sequence
        limits = np.array([held, admission.max_new_tokens], np.int32)
        history = None
        if self._settings is not None:
            self._settings_of_rows[row] = admission.settings
            history = np.zeros(self.slots + 1, np.int32)
            history[: held + 1] = admission.prompt
        self._state = self._compiled.set_row(self._state, np.int32(row), limits, eos, sequences, history)
        self._lengths[row] = held

    def dispatch(self, packed: np.ndarray, proposal: Proposal | None = None) -> jax.Array:
        """Starts a step on trees packed by `tree.pack`; returns at once. Give the result to `collect`.

        With a `proposal`, which needs sampling settings, the trees hold sampled drafts that are accepted by chance.
        """
        self.reserve(int(self._lengths.max()) + packed.shape[-1])
        self._cache, self._state, out = self._compiled.step(
            self._params, self._cache, self._state, packed, self._row_settings, proposal
        )
        out.copy_to_host_async()
        return out

    def dispatch_plain(self, newest: np.ndarray, steps: int) -> jax.Array:
        """Starts `steps` steps without drafts from the tokens `newest` `[B]`, otherwise like `dispatch`."""
        self.reserve(int(self._lengths.max()) + steps)
        self._cache, self._state, out = self._compiled.plain(
            self._params, self._cache, self._state, newest.astype(np.int32), self._row_settings, steps=steps
        )
        out.copy_to_host_async()
        return out

    def collect(self, out: jax.Array, *, plain: bool = False) -> StepResult:
        """Waits for what `dispatch` started, or `dispatch_plain` with `plain`."""
        array = np.asarray(out)
        counts, finish = array[:, 0], array[:, 1]
        names = () if self._settings is None else LOGPROBS
        fields = 3 + len(names)
        width = (array.shape[1] - 2) // (fields + 2 * self._topk)
        tokens, nodes, margins, *scores = np.split(array[:, 2 : 2 + fields * width], fields, axis=1)
        topk = array[:, 2 + fields * width :].reshape(len(array), 2, width, self._topk)
        path = np.concatenate([np.full_like(nodes[:, :1], ROOT), nodes[:, :-1]], axis=1)
        if plain:
            path = np.broadcast_to(np.arange(width, dtype=np.int32), nodes.shape)
        self._lengths += counts
        return StepResult(
            tokens=tokens,
            nodes=nodes,
            path=path,
            margins=margins.view(np.float32),
            counts=counts,
            finish=finish,
            scores={name: x.view(np.float32) for name, x in zip(names, scores, strict=True)},
            topk=topk[:, 0],
            topk_logprobs=topk[:, 1].view(np.float32),
        )

    def warm_up(self, tokens: int, widths: Sequence[int], plain_steps: int = 1) -> None:
        """Compiles what decoding rows of up to `tokens` tokens, drafts included, will need. Use a new engine."""
        prefills: set[tuple[int, int, int]] = set()
        sizes = [caches.slots_for(tokens)]
        while sizes[-1] > caches.MIN_SLOTS:
            sizes.append(sizes[-1] // 2)
        for slots in reversed(sizes):
            self.reserve(slots)
            for held in range(0, min(tokens, slots), CHUNKS[0]):
                chunks = chunk_sizes(held)
                needs = {(size, caches.slots_for(sum(chunks)), self.slots) for size in chunks} or {(0, 0, self.slots)}
                if caches.slots_for(sum(chunks) or 1) <= slots and not needs <= prefills:
                    prefills |= needs
                    # A row with no tokens left to emit stays empty.
                    self.admit([Admission(0, [0] * (held + 1), 0, [], [])])
                    self.release(0)
            for width in widths:
                self.collect(self.dispatch(pack([0] * self._rows, [Draft()] * self._rows, width)))
            if plain_steps > 1:
                self.collect(self.dispatch_plain(np.zeros(self._rows, np.int32), plain_steps), plain=True)

    def wait(self) -> None:
        """Waits for what was dispatched so far."""
        jax.block_until_ready((self._cache, self._state))

    def release(self, row: int) -> None:
        """Forgets a row, so that its length no longer asks for room."""
        self._lengths[row] = 0
        self._settings_of_rows[row] = -1
