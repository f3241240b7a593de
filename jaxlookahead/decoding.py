"""The host loop: admit requests to rows, draft, step, tell what happened."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from jaxlookahead import accept, tree
from jaxlookahead.drafters.protocol import Draft, Drafter, SamplingDrafter, StochasticDrafter, topk_drafter
from jaxlookahead.drafters.registry import make_drafter
from jaxlookahead.engine import Admission, Engine, StepResult
from jaxlookahead.mesh import mesh_of
from jaxlookahead.models.protocol import Model, Params, check_contract
from jaxlookahead.processes import Processes
from jaxlookahead.requests import (
    Options,
    Request,
    check_count,
    check_tokens,
    chosen_plain_steps,
    chosen_width,
    make_requests,
    pack_settings,
    per_prompt,
    sampling_of_each,
)
from jaxlookahead.results import BadLogitsError, Chunk, Generation, Stats
from jaxlookahead.sampling.constraints import Constraint
from jaxlookahead.sampling.params import Sampling
from jaxlookahead.sampling.processors import Processor
from jaxlookahead.width import WidthController, buckets

# Steps without a draft after which several are taken at once.
_PATIENCE = 2


class _Taken(NamedTuple):
    """What a step did to a row, to be told later."""

    request: Request
    draft: Draft
    result: StepResult
    row: int
    accepted: list[int]
    finish: str | None
    plain: bool


class _Run:
    """One call of `generate` or `stream`: its requests, its rows, its statistics."""

    def __init__(self, model: Model, params: Params, prompts: Sequence[Sequence[int]], options: Options) -> None:
        if isinstance(prompts, (str, bytes)) or not hasattr(prompts, "__len__") or not hasattr(prompts, "__iter__"):
            raise TypeError(
                f"prompts must be a list of prompts, each a list of token ids, got {type(prompts).__name__}"
            )
        prompts = list(prompts)
        if prompts and isinstance(prompts[0], (int, np.integer)):
            raise TypeError("prompts must be a list of prompts, each a list of token ids; got one flat list, wrap it")
        check_contract(model)
        self.vocab_size = model.vocab_size
        self.plain_steps = chosen_plain_steps(params, options.plain_steps)
        rows = check_count("rows", options.rows, 1)
        self.drafter = make_drafter(options.drafter)
        self.observer = topk_drafter(self.drafter)
        self.wants_topk = 0 if self.observer is None else self.observer.wants_topk
        # Drafts that were sampled: `generate` must know from which distribution.
        by_chance = getattr(self.drafter, "stochastic", False) and options.sampling is not None
        self.stochastic = cast(StochasticDrafter, self.drafter) if by_chance else None
        if self.stochastic is not None and self.stochastic.vocab_size != self.vocab_size:
            raise ValueError(
                f"the draft model has {self.stochastic.vocab_size} token ids and the model {self.vocab_size}; drafts "
                "can be rejected by chance only where the vocabularies are the same: use mode='coupled'"
            )
        self.processes = Processes(options.processes, mesh_of(params))
        if self.stochastic and options.processes == "broadcast":
            raise ValueError("processes='broadcast' can't carry sampled drafts: use mode='coupled' of the draft model")
        self.eos_ids = list(options.eos_ids)
        if self.eos_ids:
            check_tokens("eos_ids", self.eos_ids, self.vocab_size)
        self.stop = [check_tokens(f"stop[{i}]", x, self.vocab_size) for i, x in enumerate(options.stop)]
        samplings = sampling_of_each(options, len(prompts))
        widths = [chosen_width(params, width) for width in per_prompt("width", options.width, len(prompts))]
        self.width = max(widths, default=1)
        top = check_count("top_logprobs", options.top_logprobs, 0)
        if top > self.vocab_size:
            raise ValueError(f"top_logprobs is {top}, but the model's vocabulary has {self.vocab_size} ids")
        self.requests = make_requests(prompts, options, model, samplings, widths)
        wants_scores = options.sampling is not None or options.logprobs or options.processors or options.constraint
        settings = pack_settings(self.requests, samplings, options, model.vocab_size) if wants_scores else None
        self.waiting = collections.deque(self.requests)
        self.rows: list[Request | None] = [None] * min(rows, max(len(self.requests), 1))
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
        kind = type(self.drafter).__name__
        adapt = options.adapt and self.processes.timed_alike
        self.controller = WidthController(self.width, self.engine.costs, kind) if adapt else None
        self.plain_in_turn = 0  # steps of width 1 since the last wider one
        self.untold: list[_Taken] = []

    def generation(self) -> Generation:
        return Generation(outputs=[request.output() for request in self.requests], stats=self.stats)

    def stream(self, *, at_once: bool = True) -> Iterator[Chunk]:
        """Decodes. Without `at_once` the chunks of a step are made while the device works on the next one."""
        try:
            while True:
                yield from self._admit()
                if not any(self.rows):
                    yield from self._tell()
                    return
                yield from self._step(at_once)
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
                    yield request.add_nothing(accept.FINISH_REASONS[accept.LENGTH])
                    continue
                if self.drafter is not None:
                    self.drafter.begin(request.handle, request.prompt, namespace=request.namespace)
                # From here on the request is ended, whatever happens.
                self.rows[row] = request
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
            budget = min(request.width, self.width if self.controller is None else self.controller.reach) - 1
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
        kept: Sequence[Draft] = [Draft() if draft is None else tree.cut(draft, width - 1) for draft in drafts]
        packed = tree.pack([0 if request is None else request.newest for request in self.rows], kept, width)
        packed, kept = self.processes.agree(packed, kept, self.width)
        for request, draft in zip(self.rows, kept, strict=True):
            if request is not None:
                request.draft = draft
        return packed

    def _step(self, at_once: bool) -> Iterator[Chunk]:
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
        chunks = self._tell()
        if self.drafter is not None:
            self.drafter.idle()
        waiting = time.perf_counter()
        result = self.engine.collect(out, plain=plain)
        done = time.perf_counter()
        self.stats.wait_seconds += done - waiting
        self.stats.draft_seconds += drafted - start
        self.stats.step_seconds += done - drafted
        broke = result.finish == accept.BAD_LOGITS
        self.stats.steps += max(int((result.counts + broke).max()), 1) if plain else 1
        if not plain:
            self.engine.costs.measured(len(self.rows), width, self.engine.slots, done - drafted)
        self.untold = [self._take(row, x, result, plain) for row, x in enumerate(self.rows) if x is not None]
        if at_once or broke.any():
            chunks += self._tell()
        yield from chunks
        if broke.any():
            raise BadLogitsError.of("prompts", self.generation())

    def _is_plain(self) -> bool:
        """Whether to take several steps without drafts at once: there is no drafter, or it had nothing for a while."""
        if self.plain_steps == 1 or self.stochastic is not None:
            return False
        return self.drafter is None or self.plain_in_turn > _PATIENCE

    def _take(self, row: int, request: Request, result: StepResult, plain: bool) -> _Taken:
        """Takes in what a row emitted, as far as the next step depends on it, and frees the row if it ended."""
        count = int(result.counts[row])
        finish = accept.FINISH_REASONS.get(int(result.finish[row]))
        tokens = result.tokens[row, :count].tolist()
        accepted = [node - 1 for node in result.nodes[row, :count].tolist() if node != tree.ROOT]
        taken = _Taken(request, request.draft, result, row, accepted, finish, plain)
        if self.observer is not None:
            verified = [request.newest, *(tokens[:-1] if plain else request.draft.tokens)]
            likeliest = result.topk[row, : len(verified), : self.wants_topk]
            self.observer.observe_topk(request.handle, verified, likeliest.tolist())
        request.emitted += count
        if count:
            request.newest = tokens[-1]
        if self.drafter is not None:
            self.drafter.verified(request.handle, request.draft, accepted)
            self.drafter.extend(request.handle, tokens)
        if finish is not None:
            self.rows[row] = None
            self.engine.release(row)
            if self.drafter is not None:
                self.drafter.end(request.handle, remember=finish != accept.FINISH_REASONS[accept.BAD_LOGITS])
        return taken

    def _tell(self) -> list[Chunk]:
        """Chunks and statistics of what was taken."""
        chunks = []
        for request, draft, result, row, accepted, finish, plain in self.untold:
            chunks.append(request.add(result, row, draft, accepted, finish))
            count = int(result.counts[row])
            # The step that found nothing to emit was one too.
            broke = [0] * (finish == accept.FINISH_REASONS[accept.BAD_LOGITS])
            calls = [1] * count + broke if plain else [count]
            for stats in (request.stats, self.stats):
                for emitted in calls:
                    stats.count(emitted=emitted, drafted=len(draft), accepted=len(accepted))
            request.stats.steps += len(calls)
            if self.controller is not None:
                self.controller.verified(draft, accepted)
        self.untold = []
        return chunks


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
    processes: str | None = None,
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
        prefix of its structure. By default the heads are divided over the mesh's last axis where that is possible.
      processes: for parameters on a mesh of several processes, each of which makes this call. None relies on equal
        calls giving equal drafts, without traffic, and leaves `adapt` out, as clocks differ. `"check"` compares a
        digest of the drafts before each step; `"broadcast"` takes the drafts, and the widths, of process 0.
      progress: whether to show a progress bar in the terminal.

    Returns:
      A `Generation`: a sequence of `Output`, in the order of the prompts (and samples), with `stats`.

    Raises:
      TypeError, ValueError: an argument is wrong; nothing was computed yet.
      UnsupportedCacheError: the model's cache can't drop rejected tokens.
      BadLogitsError: the model gave NaN; holds what was decoded so far.
      RuntimeError: `processes="check"` found drafts that differ.
    """
    options = Options(
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
        processes=processes,
    )
    run = _Run(model, params, prompts, options)
    chunks = run.stream(at_once=False)
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
    widest = chosen_width(params, width)
    steps = chosen_plain_steps(params, plain_steps)
    engine = Engine(model, params, rows=rows, eos_size=eos_size, stop_shape=(1, 1), cache_spec=cache_spec)
    engine.warm_up(tokens + max(widest, steps), buckets(widest), steps)


def stream(model: Model, params: Params, prompts: Sequence[Sequence[int]], **options: Any) -> Iterator[Chunk]:
    """Like `generate`, with the same options, but yields a `Chunk` for each request and step as it happens.

    Arguments are checked at the call, not at the first chunk. Closing the iterator ends the requests.
    """
    unknown = options.keys() - {field.name for field in dataclasses.fields(Options)}
    if unknown:
        raise TypeError(f"stream() has no option {', '.join(sorted(unknown))}; its options are those of generate()")
    return _Run(model, params, prompts, Options(**options)).stream()
