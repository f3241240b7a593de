"""What decoding returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np


@dataclasses.dataclass(repr=False)
class Stats:
    """Counts and times of a run, or of one request.

    For every step and request that took part in it: `accepted` tokens came from the draft, and one more from the
    model unless the step ended the request on a drafted token. So `sum(histogram) == row_steps` and
    `sum(i * histogram[i]) == accepted`.

    Attributes:
      steps: model calls after prefill.
      row_steps: the same, counted once for each request that took part.
      tokens: emitted tokens.
      drafted: draft nodes verified, roots not counted.
      accepted: emitted tokens that a draft had proposed.
      histogram: `histogram[i]` row-steps accepted `i` draft tokens.
      prefill_seconds: time in prefill, compilation included.
      draft_seconds: time in the drafter and in laying out its trees.
      step_seconds: time from dispatching steps to having their results, compilation included.
      wait_seconds: of these, seconds in which the host waited for the device.
    """

    steps: int = 0
    row_steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: list[int] = dataclasses.field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    step_seconds: float = 0.0
    wait_seconds: float = 0.0

    @property
    def tokens_per_call(self) -> float:
        """Emitted tokens for each row-step; 1 is what plain decoding gives."""
        return self.tokens / self.row_steps if self.row_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the drafted nodes."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def count(self, *, emitted: int, drafted: int, accepted: int) -> None:
        """Adds one row-step."""
        self.row_steps += 1
        self.tokens += emitted
        self.drafted += drafted
        self.accepted += accepted
        self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1

    def __repr__(self) -> str:
        seconds = self.prefill_seconds + self.draft_seconds + self.step_seconds
        return (
            f"<Stats: {self.tokens} tokens in {self.row_steps} calls, {self.tokens_per_call:.2f} per call; "
            f"{self.accepted} of {self.drafted} drafted accepted; {seconds:.3f} s>"
        )

    def __str__(self) -> str:
        seconds = self.prefill_seconds + self.draft_seconds + self.step_seconds
        rows = [
            ("tokens", f"{self.tokens}"),
            ("calls", f"{self.row_steps}" + (f" in {self.steps} steps" if self.steps != self.row_steps else "")),
            ("tokens per call", f"{self.tokens_per_call:.2f}"),
            ("drafted", f"{self.drafted}, {self.accepted} accepted ({self.acceptance_rate:.1%})"),
            ("accepted per call", ", ".join(f"{i}: {count}" for i, count in enumerate(self.histogram) if count)),
        ]
        for name in ("prefill", "draft", "step"):
            spent = getattr(self, f"{name}_seconds")
            rows.append((f"{name} seconds", f"{spent:.3f}" + (f" ({spent / seconds:.0%})" if seconds else "")))
        return "\n".join(f"{name:<18} {value}" for name, value in rows)

    def _repr_html_(self) -> str:
        return f"<pre>{self}</pre>"


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens that one step emitted for one request.

    Attributes:
      request: index of the prompt.
      sample: which of the prompt's samples.
      tokens: `[n]` int32 token ids; may be empty in the last chunk.
      from_draft: `[n]` bool, True where a draft had proposed the token.
      sources: which source proposed each token, None where none had or the drafter does not say.
      margins: `[n]` float32, best minus second best of what was maximized (logits, or logits plus noise).
      scores: with sampling settings or `logprobs`, `[n]` float32 log-probabilities: `logprob_raw` under the model's
        own logits, `logprob` under the processed ones. With `top_logprobs`, `[n, k]` `top_tokens` and `top_logprobs`.
      finish_reason: None while the request goes on, then `eos`, `stop` or `length`.
    """

    request: int
    sample: int
    tokens: np.ndarray
    from_draft: np.ndarray
    sources: list[str | None]
    margins: np.ndarray
    scores: dict[str, np.ndarray]
    finish_reason: str | None


@dataclasses.dataclass
class Output:
    """The response to one prompt. `tokens` ends with the token that ended it (the EOS id, or the stop sequence).

    Attributes: see `Chunk`; all arrays have the length of the response. `stats` are this request's own counts.
    """

    request: int
    sample: int
    tokens: np.ndarray
    # Left out of the repr, which would fill screens.
    from_draft: np.ndarray = dataclasses.field(repr=False)
    sources: list[str | None] = dataclasses.field(repr=False)
    margins: np.ndarray = dataclasses.field(repr=False)
    scores: dict[str, np.ndarray] = dataclasses.field(repr=False)
    finish_reason: str | None
    stats: Stats


@dataclasses.dataclass
class Generation(Sequence[Output]):
    """The responses, in the order of the prompts, and the statistics of the run."""

    outputs: list[Output]
    stats: Stats

    @overload
    def __getitem__(self, index: int) -> Output: ...
    @overload
    def __getitem__(self, index: slice) -> list[Output]: ...
    def __getitem__(self, index: int | slice) -> Output | list[Output]:
        return self.outputs[index]

    def __len__(self) -> int:
        return len(self.outputs)

    def __iter__(self) -> Iterator[Output]:
        return iter(self.outputs)

    @property
    def tokens(self) -> list[list[int]]:
        """The token ids of every response."""
        return [output.tokens.tolist() for output in self.outputs]


class BadLogitsError(FloatingPointError):
    """The model gave NaN logits, or left no token to choose.

    Attributes:
      generation: everything decoded up to that step.
    """

    def __init__(self, message: str, generation: Generation):
        super().__init__(message)
        self.generation = generation

    @classmethod
    def of(cls, argument: str, generation: Generation) -> BadLogitsError:
        """Names the first response that broke off, by the place of its prompt in `argument`."""
        bad = next(output for output in generation if output.finish_reason == "bad_logits")
        return cls(
            f"the model's logits for {argument}[{bad.request}], token {len(bad.tokens)} of the response, are NaN or "
            "leave no token to choose; check the parameters and the dtype",
            generation,
        )


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two responses to one prompt part.

    Attributes:
      position: index of the first token that differs, or the shorter length where one is the other's beginning.
      margin: the smaller of the two margins there; a floating-point tie if it is small.
    """

    position: int
    margin: float


def first_difference(a: Output, b: Output) -> Difference | None:
    """Compares two responses: None where they hold the same tokens."""
    size = min(len(a.tokens), len(b.tokens))
    unequal = np.flatnonzero(a.tokens[:size] != b.tokens[:size])
    if not len(unequal) and len(a.tokens) == len(b.tokens):
        return None
    position = int(unequal[0]) if len(unequal) else size
    margins = [float(x.margins[position]) for x in (a, b) if position < len(x.margins)]
    return Difference(position=position, margin=min(margins))
