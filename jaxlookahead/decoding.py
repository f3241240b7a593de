"""The host loop: admit requests to rows, draft, step, tell what happened."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from jaxlookahead import accept, tree
from jaxlookahead.drafters.protocol import Draft, Drafter, SamplingDrafter, StochasticDrafter, TopkDrafter
from jaxlookahead.drafters.registry import make_drafter
from jaxlookahead.engine import Admission, Engine, StepResult, platform_of
from jaxlookahead.models.protocol import Model, Params
from jaxlookahead.results import BadLogitsError, Chunk, Generation, Output, Stats
from jaxlookahead.sampling.arrays import SamplingArrays, Sizes, pack
from jaxlookahead.sampling.constraints import Constraint
from jaxlookahead.sampling.params import Sampling
from jaxlookahead.sampling.processors import Processor
from jaxlookahead.width import WidthController, buckets, default_width

_handles = itertools.count()

# Steps without a draft after which several are taken at once.
_PATIENCE = 2


@dataclasses.dataclass
class _Request:
    index: int
    prompt: list[int]
    max_new_tokens: int
    namespace: Hashable | None
    place: int  # among all requests of the call
    sample: int = 0
    sampling: Sampling | None = None
    noise_id: int = -1  # the `r` of its noise
    handle: int = dataclasses.field(default_factory=lambda: next(_handles))
    stats: Stats = dataclasses.field(default_factory=Stats)
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    draft: Draft = dataclasses.field(default_factory=Draft)
    width: int = 1
    top_logprobs: int = 0
    newest: int = 0  # the token that the next step starts from
    emitted: int = 0

    def add(self, result: StepResult | None, row: int, count: int, accepted: list[int], finish: str | None) -> Chunk:
        """Records what a step emitted; without a result, nothing."""
        sources: list[str | None] = [None] * count
        if self.draft.sources is not None:
            sources[: len(accepted)] = [self.draft.sources[node] for node in accepted]
        if result is None:
            tokens, nodes, margins = np.zeros((3, 0))
            scores = {}
        else:
            tokens, nodes, margins = (x[row, :count] for x in (result.tokens, result.nodes, result.margins))
            scores = {name: x[row, :count].copy() for name, x in result.scores.items()}
            if self.top_logprobs:
                at = result.path[row, :count]
                scores["top_tokens"] = result.topk[row, at, : self.top_logprobs]
                scores["top_logprobs"] = result.topk_logprobs[row, at, : self.top_logprobs]
        chunk = Chunk(
            request=self.index,
            sample=self.sample,
            tokens=tokens.astype(np.int32),
            from_draft=nodes != tree.ROOT,
            sources=sources,
            margins=margins.astype(np.float32),
            scores=scores,
            finish_reason=finish,
        )
        self.chunks.append(chunk)
        return chunk

    def output(self) -> Output:
        """The response so far."""
        parts = self.chunks or [self.add(None, 0, 0, [], None)]
        return Output(
            request=self.index,
            sample=self.sample,
            tokens=np.concatenate([part.tokens for part in parts]),
            from_draft=np.concatenate([part.from_draft for part in parts]),
            sources=[source for part in parts for source in part.sources],
            margins=np.concatenate([part.margins for part in parts]),
            scores={name: np.concatenate([part.scores[name] for part in parts]) for name in parts[0].scores},
            finish_reason=parts[-1].finish_reason,
            stats=self.stats,
        )


def _check_tokens(name: str, tokens: Sequence[int], vocab_size: int) -> list[int]:
    if isinstance(tokens, str):
        raise TypeError(f"{name} must hold integer token ids, got text; encode it with the tokenizer first")
    array = np.asarray(tokens)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} must be a non-empty sequence of token ids, got shape {array.shape}")
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must hold integer token ids, got {array.dtype}; encode text with the tokenizer first")
    wrong = array[(array < 0) | (array >= vocab_size)]
    if wrong.size:
        raise ValueError(f"{name} holds token id {wrong[0]}, but the model's vocabulary has {vocab_size} ids, from 0")
    return array.tolist()


def _check_count(name: str, value: int, least: int) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def _per_prompt(name: str, value: Any, count: int) -> list[Any]:
    if isinstance(value, (list, tuple)):
        if len(value) != count:
            raise ValueError(f"{name} has {len(value)} entries for {count} prompts; give one for each, or one for all")
        return list(value)
    return [value] * count


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    """The options of `generate`, which documents them."""

    max_new_tokens: int | Sequence[int] = 128
    drafter: Drafter | str | None = "trie"
    width: int | Sequence[int] | None = None
    adapt: bool = True
    plain_steps: int | None = None
    eos_ids: Sequence[int] = ()
    stop: Sequence[Sequence[int]] = ()
    rows: int = 8
    namespaces: Any = None
    sampling: Sampling | Sequence[Sampling] | None = None
    request_ids: Sequence[int] | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    processors: Sequence[Processor] = ()
    constraint: Constraint | None = None
    cache_spec: Any = None


class _Run:
    """One call of `generate` or `stream`: its requests, its rows, its statistics."""

    def __init__(self, model: Model, params: Params, prompts: Sequence[Sequence[int]], options: _Options) -> None:
        if isinstance(prompts, (str, bytes)) or not hasattr(prompts, "__len__") or not hasattr(prompts, "__iter__"):
            raise TypeError(
                f"prompts must be a list of prompts, each a list of token ids, got {type(prompts).__name__}"
            )
        prompts = list(prompts)
        if prompts and isinstance(prompts[0], (int, np.integer)):
            raise TypeError("prompts must be a list of prompts, each a list of token ids; got one flat list, wrap it")
        self.vocab_size = model.vocab_size
        self.plain_steps = _plain_steps(params, options.plain_steps)
        rows = _check_count("rows", options.rows, 1)
        self.drafter = make_drafter(options.drafter)
        # Asked for by name, not by protocol: a drafter may pass on to another one what it lacks.
        self.wants_topk: int = getattr(self.drafter, "wants_topk", 0)
        self.observer = cast(TopkDrafter, self.drafter) if self.wants_topk else None
        # Drafts that were sampled: `generate` must know from which distribution.
        by_chance = getattr(self.drafter, "stochastic", False) and options.sampling is not None
        self.stochastic = cast(StochasticDrafter, self.drafter) if by_chance else None
        if self.stochastic is not None and self.stochastic.vocab_size != self.vocab_size:
            raise ValueError(
                f"the draft model has {self.stochastic.vocab_size} token ids and the model {self.vocab_size}; drafts "
                "can be rejected by chance only where the vocabularies are the same: use mode='coupled'"
            )
        self.eos_ids = list(options.eos_ids)
        if self.eos_ids:
            _check_tokens("eos_ids", self.eos_ids, self.vocab_size)
        self.stop = [_check_tokens(f"stop[{i}]", x, self.vocab_size) for i, x in enumerate(options.stop)]
        samplings = _samplings(options, len(prompts))
        widths = [_max_width(params, width) for width in _per_prompt("width", options.width, len(prompts))]
        self.width = max(widths, default=1)
        top = _check_count("top_logprobs", options.top_logprobs, 0)
        if top > self.vocab_size:
            raise ValueError(f"top_logprobs is {top}, but the model's vocabulary has {self.vocab_size} ids")
        self.requests = _make_requests(prompts, options, model, samplings, widths)
        wants_scores = options.sampling is not None or options.logprobs or options.processors or options.constraint
        settings = _settings(self.requests, samplings, options, model.vocab_size) if wants_scores else None
        self.waiting = collections.deque(self.requests)
        self.rows: list[_Request | None] = [None] * min(rows, max(len(self.requests), 1))
        self.stats = Stats()
        self.engine = Engine(
            model,
            params,
            rows=len(self.rows),
            eos_size=len(self.eos_ids),
            stop_shape=(len(self.stop), max(map(len, self.stop), default=1)),
            settings=settings,
            processors=tuple(options.processors),
            constraint=options.constraint,
            topk=max(self.wants_topk, top),
            cache_spec=options.cache_spec,
        )
        self.controller = WidthController(self.width, self.engine.costs) if options.adapt else None
        self.plain_in_turn = 0  # steps of width 1 since the last wider one

    def generation(self) -> Generation:
        return Generation(outputs=[request.output() for request in self.requests], stats=self.stats)

    def stream(self) -> Iterator[Chunk]:
        try:
            while True:
                yield from self._admit()
                if not any(self.rows):
                    return
                yield from self._step()
        finally:
            for request in self.rows:
                if request is not None and self.drafter is not None:
                    self.drafter.end(request.handle, remember=False)

    def _admit(self) -> Iterator[Chunk]:
        admissions = []
        for row in range(len(self.rows)):
            while self.rows[row] is None and self.waiting:
                request = self.waiting.popleft()
                if request.max_new_tokens == 0:
                    yield request.add(None, 0, 0, [], accept.FINISH_REASONS[accept.LENGTH])
                    continue
                self.rows[row] = request
                if self.drafter is not None:
                    self.drafter.begin(request.handle, request.prompt, namespace=request.namespace)
                    if request.sampling is not None and hasattr(self.drafter, "begin_sampling"):
                        informed = cast(SamplingDrafter, self.drafter)
                        informed.begin_sampling(request.handle, request.sampling, request.noise_id)
                limit = request.max_new_tokens
                admissions.append(Admission(row, request.prompt, limit, self.eos_ids, self.stop, request.place))
        if admissions:
            start = time.perf_counter()
            # Samples of one prompt wait together.
            again = {tuple(request.prompt[:-1]) for request in self.waiting if request.sample > 0}
            self.engine.admit(admissions, again)
            self.engine.wait()
            self.stats.prefill_seconds += time.perf_counter() - start

    def _draft(self) -> np.ndarray:
        """Asks for a draft for each row, and lays them out in the bucket that is expected to pay most."""
        drafts: list[Draft | None] = []
        for request in self.rows:
            if request is None:
                drafts.append(None)
                continue
            draft = Draft()
            # The step adds one token of the model's own to what it accepts.
            depth = request.max_new_tokens - request.emitted - 1
            budget = request.width - 1
            if self.drafter is not None and budget > 0 and depth > 0:
                draft = tree.normalize(
                    self.drafter.draft(request.handle, budget, depth),
                    budget=budget,
                    max_depth=depth,
                    vocab_size=self.vocab_size,
                )
            drafts.append(draft)
        if self.controller is not None:
            width = self.controller.choose(drafts, self.engine.slots)
        else:
            widest = 1 + max(len(draft) for draft in drafts if draft is not None)
            width = next(x for x in buckets(self.width) if x >= widest)
        kept = [Draft() if draft is None else tree.cut(draft, width - 1) for draft in drafts]
        for request, draft in zip(self.rows, kept, strict=True):
            if request is not None:
                request.draft = draft
        return tree.pack([0 if request is None else request.newest for request in self.rows], kept, width)

    def _step(self) -> Iterator[Chunk]:
        start = time.perf_counter()
        packed = self._draft()
        drafted = time.perf_counter()
        width = packed.shape[-1]
        proposal = None
        if self.stochastic is not None:
            proposal = self.stochastic.proposal([None if x is None else x.handle for x in self.rows])
        self.plain_in_turn = self.plain_in_turn + 1 if width == 1 else 0
        plain = self._is_plain()
        if plain:
            out = self.engine.dispatch_plain(packed[0, :, 0], self.plain_steps)
        else:
            out = self.engine.dispatch(packed, proposal)
        if self.drafter is not None:
            self.drafter.idle()
        result = self.engine.collect(out, plain=plain)
        done = time.perf_counter()
        self.stats.draft_seconds += drafted - start
        self.stats.step_seconds += done - drafted
        self.stats.steps += max(int(result.counts.max()), 1) if plain else 1
        if not plain:
            self.engine.costs.measured(len(self.rows), width, self.engine.slots, done - drafted)
        chunks = [self._tell(row, x, result, plain) for row, x in enumerate(self.rows) if x is not None]
        yield from chunks
        bad = [chunk for chunk in chunks if chunk.finish_reason == accept.FINISH_REASONS[accept.BAD_LOGITS]]
        if bad:
            raise BadLogitsError(
                f"the model's logits for prompts[{bad[0].request}], token "
                f"{self.requests[bad[0].request].emitted} of the response, are NaN or leave no token to choose; "
                "check the parameters and the dtype",
                self.generation(),
            )

    def _is_plain(self) -> bool:
        """Whether to take several steps without drafts at once: there is no drafter, or it had nothing for a while."""
        if self.plain_steps == 1 or self.stochastic is not None:
            return False
        return self.drafter is None or self.plain_in_turn > _PATIENCE

    def _tell(self, row: int, request: _Request, result: StepResult, plain: bool) -> Chunk:
        """Passes on what a row emitted, and frees the row if it ended."""
        count = int(result.counts[row])
        finish = accept.FINISH_REASONS.get(int(result.finish[row]))
        tokens = result.tokens[row, :count].tolist()
        accepted = [int(node) - 1 for node in result.nodes[row, :count] if node != tree.ROOT]
        chunk = request.add(result, row, count, accepted, finish)
        calls = [1] * count if plain else [count]
        for stats in (request.stats, self.stats):
            for emitted in calls:
                stats.count(emitted=emitted, drafted=len(request.draft), accepted=len(accepted))
        request.stats.steps += len(calls)
        if self.observer is not None:
            verified = [request.newest, *(tokens[:-1] if plain else request.draft.tokens)]
            likeliest = result.topk[row, : len(verified), : self.wants_topk]
            self.observer.observe_topk(request.handle, verified, likeliest.tolist())
        request.emitted += count
        if count:
            request.newest = tokens[-1]
        if self.controller is not None:
            self.controller.verified(request.draft, accepted)
        if self.drafter is not None:
            self.drafter.verified(request.handle, request.draft, accepted)
            self.drafter.extend(request.handle, tokens)
        if finish is not None:
            self.rows[row] = None
            self.engine.release(row)
            if self.drafter is not None:
                self.drafter.end(request.handle, remember=finish != accept.FINISH_REASONS[accept.BAD_LOGITS])
        return chunk


def _max_width(params: Params, width: int | None) -> int:
    if width is None:
        return default_width(platform_of(params))
    return _check_count("width", width, 1)


def _plain_steps(params: Params, steps: int | None) -> int:
    if steps is None:
        # On CPU a step takes so long that what lies between steps is not worth another shape to compile.
        return 1 if platform_of(params) == "cpu" else 8
    return _check_count("plain_steps", steps, 1)


def _samplings(options: _Options, count: int) -> list[Sampling]:
    given = Sampling() if options.sampling is None else options.sampling
    samplings = _per_prompt("sampling", given, count)
    for sampling in samplings:
        if not isinstance(sampling, Sampling):
            raise TypeError(f"sampling must be a Sampling, or a list with one for each prompt, got {sampling!r}")
    return samplings


def _settings(
    requests: Sequence[_Request], samplings: Sequence[Sampling], options: _Options, vocab_size: int
) -> SamplingArrays:
    """The settings of all requests, and at the end those of an empty row."""
    ids = list(range(len(samplings)) if options.request_ids is None else options.request_ids)
    if len(ids) != len(samplings):
        raise ValueError(f"request_ids has {len(ids)} entries for {len(samplings)} prompts; give one for each")
    if max((_check_count("request_ids", x, 0) for x in ids), default=0) >= 2**31:
        raise ValueError(f"request_ids must be below 2^31, got {max(ids)}")
    chosen = []
    for request in requests:
        sampling = samplings[request.index]
        # Each sample draws from a seed of its own.
        request.sampling = dataclasses.replace(sampling, seed=(sampling.seed + (request.sample << 32)) % 2**64)
        request.noise_id = ids[request.index]
        chosen.append(request.sampling)
    return pack(
        [*chosen, Sampling()],
        requests=[*(request.noise_id for request in requests), -1],
        vocab_size=vocab_size,
        eos_ids=options.eos_ids,
        sizes=Sizes.of(chosen, options.eos_ids),
    )


def _make_requests(
    prompts: Sequence[Sequence[int]],
    options: _Options,
    model: Model,
    samplings: Sequence[Sampling],
    widths: Sequence[int],
) -> list[_Request]:
    limits = _per_prompt("max_new_tokens", options.max_new_tokens, len(prompts))
    namespaces = _per_prompt("namespaces", options.namespaces, len(prompts))
    requests: list[_Request] = []
    for i, (prompt, limit, namespace) in enumerate(zip(prompts, limits, namespaces, strict=True)):
        tokens = _check_tokens(f"prompts[{i}]", prompt, model.vocab_size)
        limit = _check_count("max_new_tokens", limit, 0)
        if model.max_length is not None:
            room = model.max_length - len(tokens)
            if room < 0:
                raise ValueError(
                    f"prompts[{i}] has {len(tokens)} tokens, but the model holds at most {model.max_length} "
                    "positions; shorten the prompt"
                )
            limit = min(limit, room)
        for sample in range(samplings[i].num_samples):
            request = _Request(i, tokens, limit, namespace, len(requests), sample, newest=tokens[-1])
            request.width, request.top_logprobs = widths[i], options.top_logprobs
            requests.append(request)
    return requests


def generate(
    model: Model,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int] = 128,
    drafter: Drafter | str | None = "trie",
    width: int | Sequence[int] | None = None,
    adapt: bool = True,
    plain_steps: int | None = None,
    eos_ids: Sequence[int] = (),
    stop: Sequence[Sequence[int]] = (),
    rows: int = 8,
    namespaces: Any = None,
    sampling: Sampling | Sequence[Sampling] | None = None,
    request_ids: Sequence[int] | None = None,
    logprobs: bool = False,
    top_logprobs: int = 0,
    processors: Sequence[Processor] = (),
    constraint: Constraint | None = None,
    cache_spec: Any = None,
    progress: bool = False,
) -> Generation:
    """Decodes prompts, greedily or sampled. The tokens are those of plain decoding (`drafter=None`) with any drafter.

    The one exception is a floating-point near-tie: a step that scores several tokens sums in another order than a
    step that scores one. `Output.margins` tells how close each decision was.

    Args:
      model: see `jaxlookahead.models.protocol.Model`.
      params: its parameters, any pytree.
      prompts: token ids of each prompt, at least one.
      max_new_tokens: the most tokens to emit for each prompt; one number, or one for each.

    Other Args:
      drafter: where drafts come from: `"trie"` (the request's own text and the responses before it in this call),
        `"prompt_lookup"`, an object with the `Drafter` protocol (it remembers responses across calls), or None.
      width: the most tokens scored in a step for each row, the newest one included; 1 drafts nothing. One number, or
        one for each prompt; 16 by default on CPU, 64 elsewhere.
      adapt: whether to verify, at each step, only as much of the draft as pays by the measured time of steps; the
        widths are powers of two up to `width`. Without it the whole draft is verified, up to `width`.
      plain_steps: how many steps run in one call where the drafter has had nothing to verify for a while, or there is
        none. 1 by default on CPU, 8 elsewhere; drafts and new requests wait for the end of the call.
      eos_ids: token ids that end a response. The id stays in the output, as its last token.
      stop: token sequences that end a response. They stay in the output too.
      rows: the most requests decoded together; the others wait for a free row.
      namespaces: which memory of the drafter each request uses and feeds; one for all, or a list with one for each.
      sampling: how tokens are chosen: one `Sampling` for all, or a list with one for each prompt; greedy by default.
        `num_samples` of them may be drawn for a prompt.
      request_ids: the `r` of each prompt in the noise's key `(seed, r, t)`; by default its place in `prompts`. Give
        ids of your own to have a prompt sampled alike whatever stands before it. Sample `j` of a prompt uses the
        seed `seed + j * 2^32`.
      logprobs: whether to return log-probabilities where no `sampling` is given; with it they always are.
      top_logprobs: how many of the likeliest tokens to return for each place of a response, by the model's own logits:
        `Output.scores["top_tokens"]` `[n, k]` int32 and `["top_logprobs"]` `[n, k]` float32.
      processors: functions `(history [B, L], length [B], logits [B, V]) -> logits [B, V]` of jax arrays, run at every
        node of the accepted path. Compiled once for each such tuple of functions.
      constraint: says which tokens may come next, on the host; see `sampling.Constraint`.
      cache_spec: how the cache lies on the mesh of the parameters: a `PartitionSpec` for all of its leaves, or a
        prefix of its structure; replicated by default. `P(None, "model")` splits the heads of built-in models.
      progress: whether to show a progress bar in the terminal.

    Returns:
      A `Generation`: a sequence of `Output`, in the order of the prompts (and samples), with `stats`.

    Raises:
      TypeError, ValueError: an argument is wrong; nothing was computed yet.
      UnsupportedCacheError: the model's cache can't drop rejected tokens.
      BadLogitsError: the model gave NaN; holds what was decoded so far.
    """
    options = _Options(
        max_new_tokens=max_new_tokens,
        drafter=drafter,
        width=width,
        adapt=adapt,
        plain_steps=plain_steps,
        eos_ids=eos_ids,
        stop=stop,
        rows=rows,
        namespaces=namespaces,
        sampling=sampling,
        request_ids=request_ids,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        processors=processors,
        constraint=constraint,
        cache_spec=cache_spec,
    )
    run = _Run(model, params, prompts, options)
    chunks = run.stream()
    if progress:
        from jaxlookahead.show.progress import track

        chunks = track(chunks, requests=len(run.requests))
    for _ in chunks:
        pass
    return run.generation()


def warm_up(
    model: Model,
    params: Params,
    *,
    tokens: int,
    width: int | None = None,
    plain_steps: int | None = None,
    rows: int = 1,
    eos_size: int = 1,
    cache_spec: Any = None,
) -> None:
    """Compiles everything that `generate` needs for requests of up to `tokens` tokens, prompt and response together.

    Without it, each shape compiles when it first occurs.

    Args:
      model: the model.
      params: its parameters.
      tokens: longest prompt and response.
      width: as for `generate`; the widest, where prompts have several.
      plain_steps: as for `generate`.
      rows: number of rows that decode together, the smaller of `rows` and the number of prompts.
      eos_size: number of EOS ids.
      cache_spec: as for `generate`.
    """
    widest = _max_width(params, width)
    steps = _plain_steps(params, plain_steps)
    engine = Engine(model, params, rows=rows, eos_size=eos_size, stop_shape=(1, 1), cache_spec=cache_spec)
    engine.warm_up(tokens + max(widest, steps), buckets(widest), steps)


def stream(model: Model, params: Params, prompts: Sequence[Sequence[int]], **options: Any) -> Iterator[Chunk]:
    """Like `generate`, with the same options, but yields a `Chunk` for each request and step as it happens.

    Arguments are checked at the call, not at the first chunk. Closing the iterator ends the requests.
    """
    unknown = options.keys() - {field.name for field in dataclasses.fields(_Options)}
    if unknown:
        raise TypeError(f"stream() has no option {', '.join(sorted(unknown))}; its options are those of generate()")
    return _Run(model, params, prompts, _Options(**options)).stream()
