"""Decoding with encoder-decoder models: `generate` with an input for each response, drafts from input and output."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, cast

from jaxlookahead import decoding
from jaxlookahead.drafters.protocol import Draft, Drafter, TopkDrafter
from jaxlookahead.drafters.registry import make_drafter
from jaxlookahead.models.protocol import Params
from jaxlookahead.requests import check_count, per_prompt
from jaxlookahead.results import BadLogitsError, Generation, Output, Stats


class WithInputs:
    """A drafter that sees each request's encoder input in front of its prompt, so that it can draft from it.

    Requests are told apart by their namespace, which must be their index among `inputs`.
    """

    def __init__(self, drafter: Drafter, inputs: Sequence[Sequence[int]], namespace: Hashable | None = None):
        self.drafter, self.inputs, self.namespace = drafter, inputs, namespace

    def begin(self, request: Hashable, prompt: Sequence[int], *, namespace: Hashable | None = None) -> None:
        """See `Drafter`."""
        if not isinstance(namespace, int):
            raise TypeError(f"namespace must be the index of the request's input, got {namespace!r}")
        whole = [*self.inputs[namespace], *prompt]
        self.drafter.begin(request, whole, namespace=self.namespace)

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        """See `Drafter`."""
        self.drafter.extend(request, tokens)

    def draft(self, request: Hashable, budget: int, max_depth: int) -> Draft:
        """See `Drafter`."""
        return self.drafter.draft(request, budget, max_depth)

    def verified(self, request: Hashable, draft: Draft, accepted: Sequence[int]) -> None:
        """See `Drafter`."""
        self.drafter.verified(request, draft, accepted)

    def end(self, request: Hashable, *, remember: bool = True) -> None:
        """See `Drafter`."""
        self.drafter.end(request, remember=remember)

    def idle(self) -> None:
        """See `Drafter`."""
        self.drafter.idle()

    @property
    def wants_topk(self) -> int:
        """See `TopkDrafter`."""
        return getattr(self.drafter, "wants_topk", 0)

    def observe_topk(self, request: Hashable, tokens: Sequence[int], topk: Sequence[Sequence[int]]) -> None:
        """See `TopkDrafter`."""
        cast(TopkDrafter, self.drafter).observe_topk(request, tokens, topk)


def generate(
    model: Any,
    weights: Params,
    inputs: Sequence[Sequence[int]],
    *,
    drafter: Drafter | str | None = "trie",
    rows: int = 8,
    namespace: Hashable | None = None,
    sampling: Any = None,
    width: int | Sequence[int] | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    **options: Any,
) -> Generation:
    """Decodes a response to each encoder input. The tokens are those of plain decoding, with any drafter.

    Up to `rows` inputs are encoded and decoded together; the next ones follow when all of them have ended.

    Args:
      model: a `T5Model`, or one of `adapters.hf_flax_seq2seq`.
      weights: its weights.
      inputs: token ids of each input, at least one, none of them empty.

    Other Args:
      drafter: see `jaxlookahead.generate`; it sees a request's input in front of the response.
      rows: the most requests decoded together.
      namespace: which memory of the drafter all requests use and feed.
      sampling: one `Sampling` for all, or a list with one for each input; with `num_samples` 1.
      width: see `jaxlookahead.generate`; one number, or one for each input.
      max_new_tokens: the most tokens to emit for each input; one number, or one for each.
      **options: further options of `jaxlookahead.generate`.

    Raises:
      TypeError, ValueError: an argument is wrong; nothing was computed yet.
      BadLogitsError: the model gave NaN; holds what was decoded so far.
    """
    refused = sorted({"namespaces", "request_ids"} & set(options))
    if refused:
        raise TypeError(f"{', '.join(refused)} can't be given for encoder-decoder models")
    inputs = [list(ids) for ids in inputs]
    if not inputs or not all(inputs):
        raise ValueError("inputs must hold at least one input, and each at least one token id")
    bad = [i for i, ids in enumerate(inputs) if not all(0 <= token < model.vocab_size for token in ids)]
    if bad:
        raise ValueError(f"inputs[{bad[0]}] holds token ids outside the vocabulary of {model.vocab_size}")
    rows = check_count("rows", rows, 1)
    widths = per_prompt("width", width, len(inputs))
    limits = [check_count("max_new_tokens", x, 0) for x in per_prompt("max_new_tokens", max_new_tokens, len(inputs))]
    per_input = list(sampling) if isinstance(sampling, (list, tuple)) else [sampling] * len(inputs)
    if len(per_input) != len(inputs):
        raise ValueError(f"sampling has {len(per_input)} entries for {len(inputs)} inputs; give one for each")
    if any(each is not None and each.num_samples != 1 for each in per_input):
        raise ValueError("num_samples other than 1 is not supported for encoder-decoder models; repeat the input")
    found = make_drafter(drafter)
    seen = None if found is None else WithInputs(found, inputs, namespace)
    outputs: list[Output] = []
    stats = Stats()
    for first in range(0, len(inputs), rows):
        chosen = range(first, min(first + rows, len(inputs)))
        broke = False
        try:
            part = decoding.generate(
                model,
                model.with_inputs(weights, [inputs[i] for i in chosen]),
                [[model.start_token]] * len(chosen),
                drafter=seen,
                rows=len(chosen),
                namespaces=list(chosen),
                request_ids=list(chosen),
                sampling=None if sampling is None else [per_input[i] for i in chosen],
                width=[widths[i] for i in chosen],
                max_new_tokens=[limits[i] for i in chosen],
                **options,
            )
        except BadLogitsError as error:
            part, broke = error.generation, True
        outputs += [dataclasses.replace(output, request=first + output.request) for output in part]
        stats = _sum(stats, part.stats)
        if broke:
            raise BadLogitsError.of("inputs", Generation(outputs=outputs, stats=stats))
    return Generation(outputs=outputs, stats=stats)


def _sum(one: Stats, other: Stats) -> Stats:
    longest = max(len(one.histogram), len(other.histogram))
    padded = [stats.histogram + [0] * (longest - len(stats.histogram)) for stats in (one, other)]
    fields = [f.name for f in dataclasses.fields(Stats) if f.name != "histogram"]
    total = {name: getattr(one, name) + getattr(other, name) for name in fields}
    return Stats(histogram=[a + b for a, b in zip(*padded, strict=True)], **total)
