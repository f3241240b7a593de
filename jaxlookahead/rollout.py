"""Samples for reinforcement learning, as arrays that a loss can use."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from jaxlookahead.decoding import generate
from jaxlookahead.drafters.protocol import Drafter
from jaxlookahead.models.protocol import Model, Params
from jaxlookahead.results import Generation
from jaxlookahead.sampling.params import Sampling


@dataclasses.dataclass(frozen=True)
class Rollout:
    """`R = len(prompts) * n` samples, those of a prompt side by side. Padding is `pad_id`, False and 0.

    Attributes:
      prompts: `[R, P]` int32, left padded, so that responses begin at column `P` of `sequences`.
      prompt_mask: `[R, P]` bool.
      tokens: `[R, M]` int32 responses, right padded; `M` is the longest response.
      mask: `[R, M]` bool.
      logprobs: `[R, M]` float32, log-probability of each token under the distribution that it was sampled from.
      logprobs_raw: `[R, M]` float32, under the model's own logits.
      finish_reasons: `R` of `eos`, `stop`, `length`.
      generation: the outputs and statistics.
    """

    prompts: np.ndarray
    prompt_mask: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    logprobs_raw: np.ndarray
    finish_reasons: list[str | None]
    generation: Generation

    @property
    def sequences(self) -> np.ndarray:
        """`[R, P + M]` int32, prompts and responses."""
        return np.concatenate([self.prompts, self.tokens], axis=1)


def rollout(
    model: Model,
    params: Params,
    prompts: Sequence[Sequence[int]],
    n: int,
    *,
    max_new_tokens: int | Sequence[int] = 128,
    sampling: Sampling | None = None,
    drafter: Drafter | str | None = "trie",
    namespaces: Sequence[Hashable] | None = None,
    pad_id: int = 0,
    **options: Any,
) -> Rollout:
    """Draws `n` samples for each prompt.

    Keep one `TrieDrafter` and pass it to every call: what a prompt's samples said in earlier epochs is drafted in the
    next, and what its other samples have said so far at once, from a namespace of the prompt's own. Parameters are an
    argument of every call, so an update neither recompiles nor leaves anything stale.

    Args:
      model: see `jaxlookahead.models.protocol.Model`.
      params: its parameters, as they are now.
      prompts: token ids of each prompt.
      n: samples for each prompt; the prompt is prefilled once.

    Other Args:
      max_new_tokens: see `generate`.
      sampling: temperature 1 by default. Give each epoch a `seed` of its own.
      drafter: see `generate`; None is plain decoding, with the same tokens.
      namespaces: what a prompt is called in the drafter's memory; by default its tokens.
      pad_id: token id at padding.
      **options: further options of `generate` (`eos_ids`, `stop`, `rows`, `width`, ...).

    Returns:
      A `Rollout`.

    Raises:
      ValueError: `n` is below 1, or an argument of `generate` is wrong.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    chosen = dataclasses.replace(Sampling(temperature=1.0) if sampling is None else sampling, num_samples=n)
    generation = generate(
        model,
        params,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=chosen,
        drafter=drafter,
        namespaces=[tuple(prompt) for prompt in prompts] if namespaces is None else list(namespaces),
        **options,
    )
    repeated = [np.asarray(prompt, np.int32) for prompt in prompts for _ in range(n)]
    prompt_array, prompt_mask = _pad(repeated, pad_id, left=True)
    tokens, mask = _pad([output.tokens for output in generation], pad_id)
    scores = {name: _pad([output.scores[name] for output in generation], 0.0)[0] for name in ("logprob", "logprob_raw")}
    return Rollout(
        prompts=prompt_array,
        prompt_mask=prompt_mask,
        tokens=tokens,
        mask=mask,
        logprobs=scores["logprob"],
        logprobs_raw=scores["logprob_raw"],
        finish_reasons=[output.finish_reason for output in generation],
        generation=generation,
    )


def _pad(rows: Sequence[np.ndarray], fill: float, left: bool = False) -> tuple[np.ndarray, np.ndarray]:
    longest = max((len(row) for row in rows), default=0)
    dtype = rows[0].dtype if rows else np.int32
    out, mask = np.full((len(rows), longest), fill, dtype), np.zeros((len(rows), longest), bool)
    for i, row in enumerate(rows):
        where = slice(longest - len(row), longest) if left else slice(0, len(row))
        out[i, where], mask[i, where] = row, True
    return out, mask
