"""Requests and options of `generate`: checked, and laid out for the loop."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxlookahead import tree
from jaxlookahead.drafters.protocol import Draft, Drafter
from jaxlookahead.engine import StepResult, platform_of
from jaxlookahead.models.protocol import Model, Params
from jaxlookahead.results import Chunk, Output, Stats
from jaxlookahead.sampling.arrays import SamplingArrays, Sizes, pack
from jaxlookahead.sampling.constraints import Constraint
from jaxlookahead.sampling.decide import LOGPROBS
from jaxlookahead.sampling.params import Sampling
from jaxlookahead.sampling.processors import Processor
from jaxlookahead.width import default_width

_handles = itertools.count()


@dataclasses.dataclass
class Request:
    """One response to be decoded, and what came of it so far."""

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

    def add(self, result: StepResult, row: int, draft: Draft, accepted: list[int], finish: str | None) -> Chunk:
        """Records what a step emitted."""
        count = int(result.counts[row])
        sources: list[str | None] = [None] * count
        if draft.sources is not None:
            sources[: len(accepted)] = [draft.sources[node] for node in accepted]
        scores = {name: x[row, :count].copy() for name, x in result.scores.items()}
        if self.top_logprobs:
            at = result.path[row, :count]
            scores["top_tokens"] = result.topk[row, at, : self.top_logprobs]
            scores["top_logprobs"] = result.topk_logprobs[row, at, : self.top_logprobs]
        chunk = Chunk(
            request=self.index,
            sample=self.sample,
            tokens=result.tokens[row, :count].astype(np.int32),
            from_draft=result.nodes[row, :count] != tree.ROOT,
            sources=sources,
            margins=result.margins[row, :count].astype(np.float32),
            scores=scores,
            finish_reason=finish,
        )
        self.chunks.append(chunk)
        return chunk

    def add_nothing(self, finish: str | None) -> Chunk:
        """Records that there are no tokens."""
        scores = {} if self.sampling is None else {name: np.zeros(0, np.float32) for name in LOGPROBS}
        if self.top_logprobs:
            scores["top_tokens"] = np.zeros((0, self.top_logprobs), np.int32)
            scores["top_logprobs"] = np.zeros((0, self.top_logprobs), np.float32)
        chunk = Chunk(
            request=self.index,
            sample=self.sample,
            tokens=np.zeros(0, np.int32),
            from_draft=np.zeros(0, bool),
            sources=[],
            margins=np.zeros(0, np.float32),
            scores=scores,
            finish_reason=finish,
        )
        self.chunks.append(chunk)
        return chunk

    def output(self) -> Output:
        """The response so far."""
        parts = self.chunks or [self.add_nothing(None)]
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


def check_tokens(name: str, tokens: Sequence[int], vocab_size: int) -> list[int]:
    if isinstance(tokens, str):
        raise TypeError(f"{name} must hold integer token ids, got text; encode it with the tokenizer first")
    if isinstance(tokens, Mapping):
        raise TypeError(f"{name} must hold integer token ids, got {type(tokens).__name__}; pass its 'input_ids'")
    array = np.asarray(tokens)
    if array.ndim != 1 or array.size == 0:
        remedy = "; pass one row of it" if array.ndim > 1 else ""
        raise ValueError(f"{name} must be a non-empty sequence of token ids, got shape {array.shape}{remedy}")
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must hold integer token ids, got {array.dtype}; encode text with the tokenizer first")
    wrong = array[(array < 0) | (array >= vocab_size)]
    if wrong.size:
        raise ValueError(f"{name} holds token id {wrong[0]}, but the model's vocabulary has {vocab_size} ids, from 0")
    return array.tolist()


def check_count(name: str, value: int, least: int) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def per_prompt(name: str, value: Any, count: int) -> list[Any]:
    if isinstance(value, (list, tuple)):
        if len(value) != count:
            raise ValueError(f"{name} has {len(value)} entries for {count} prompts; give one for each, or one for all")
        return list(value)
    return [value] * count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
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
    processes: str | None = None


def chosen_width(params: Params, width: int | None) -> int:
    if width is None:
        return default_width(platform_of(params))
    return check_count("width", width, 1)


def chosen_plain_steps(params: Params, steps: int | None) -> int:
    if steps is None:
        # On CPU a step takes so long that what lies between steps is not worth another shape to compile.
        return 1 if platform_of(params) == "cpu" else 8
    return check_count("plain_steps", steps, 1)


def sampling_of_each(options: Options, count: int) -> list[Sampling]:
    given = Sampling() if options.sampling is None else options.sampling
    samplings = per_prompt("sampling", given, count)
    for sampling in samplings:
        if not isinstance(sampling, Sampling):
            raise TypeError(f"sampling must be a Sampling, or a list with one for each prompt, got {sampling!r}")
    return samplings


def pack_settings(
    requests: Sequence[Request], samplings: Sequence[Sampling], options: Options, vocab_size: int
) -> SamplingArrays:
    """The settings of all requests, and at the end those of an empty row."""
    ids = list(range(len(samplings)) if options.request_ids is None else options.request_ids)
    if len(ids) != len(samplings):
        raise ValueError(f"request_ids has {len(ids)} entries for {len(samplings)} prompts; give one for each")
    if max((check_count("request_ids", x, 0) for x in ids), default=0) >= 2**31:
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


def make_requests(
    prompts: Sequence[Sequence[int]],
    options: Options,
    model: Model,
    samplings: Sequence[Sampling],
    widths: Sequence[int],
) -> list[Request]:
    limits = per_prompt("max_new_tokens", options.max_new_tokens, len(prompts))
    namespaces = per_prompt("namespaces", options.namespaces, len(prompts))
    requests: list[Request] = []
    for i, (prompt, limit, namespace) in enumerate(zip(prompts, limits, namespaces, strict=True)):
        tokens = check_tokens(f"prompts[{i}]", prompt, model.vocab_size)
        limit = check_count("max_new_tokens", limit, 0)
        if model.max_length is not None:
            room = model.max_length - len(tokens)
            if room < 0:
                raise ValueError(
                    f"prompts[{i}] has {len(tokens)} tokens, but the model holds at most {model.max_length} "
                    "positions; shorten the prompt"
                )
            limit = min(limit, room)
        for sample in range(samplings[i].num_samples):
            request = Request(i, tokens, limit, namespace, len(requests), sample, newest=tokens[-1])
            request.width, request.top_logprobs = widths[i], options.top_logprobs
            requests.append(request)
    return requests
