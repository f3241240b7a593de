"""Is sampled output with drafts that of plain decoding? `python -m jaxlookahead.bench.equality traces.jsonl`.

Every prompt is decoded with every seed and setting, settings mixed within each batch: without drafts, then with the
trie, with a trie that has seen the very responses (deep acceptance), and with nonsense drafts. Some requests are then
decoded once more, each alone. All must give the same tokens; a difference counts as a failure where the decision that
parted the texts was no floating-point tie. Tokens after a difference are not compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlookahead.decoding import generate
from jaxlookahead.drafters.protocol import Drafter
from jaxlookahead.drafters.trie import TrieDrafter
from jaxlookahead.models.protocol import Model, Params
from jaxlookahead.results import Difference, Output, first_difference
from jaxlookahead.sampling import Sampling
from jaxlookahead.testing import AdversarialDrafter, Attack

# Largest margin of a decision that float32 sums in another order may turn over.
TIE = 1e-4


def settings(vocab_size: int) -> dict[str, Sampling]:
    """Temperature 0.7 and 1.0 alone, with each filter and processor, and with all of them."""
    rng = np.random.default_rng(0)
    bias = dict(zip(rng.integers(0, vocab_size, 8).tolist(), rng.normal(0, 5, 8).tolist(), strict=True))
    options: dict[str, dict[str, Any]] = {
        "alone": {},
        "top-p 0.9": {"top_p": 0.9},
        "top-k 50": {"top_k": 50},
        "min-p 0.05": {"min_p": 0.05},
        "repetition penalty 1.3": {"repetition_penalty": 1.3},
        "bias": {"logit_bias": bias},
        "no-repeat 3-gram": {"no_repeat_ngram": 3},
    }
    options["all"] = {key: value for option in options.values() for key, value in option.items()}
    return {
        f"temperature {temperature}, {name}": Sampling(temperature=temperature, **option)
        for name, option in options.items()
        for temperature in (0.7, 1.0)
    }


@dataclasses.dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
      prompt: token ids.
      setting: name in `settings`.
      sampling: the settings, seed included.
      request_id: its `r` in the noise's key.
    """

    prompt: list[int]
    setting: str
    sampling: Sampling
    request_id: int


def make_cases(prompts: Sequence[list[int]], seeds: int, vocab_size: int, per_seed: int | None = None) -> list[Case]:
    """Every prompt with every seed and setting; neighbours share a prompt and differ in their settings.

    Args:
      prompts: token ids.
      seeds: how many.
      vocab_size: `V`.
      per_seed: how many settings each prompt and seed meet, in turns; all of them by default.
    """
    choices = list(settings(vocab_size).items())
    count = len(choices) if per_seed is None else per_seed
    cases: list[Case] = []
    for prompt in prompts:
        for seed in range(seeds):
            for _ in range(count):
                name, sampling = choices[len(cases) % len(choices)]
                cases.append(Case(prompt, name, dataclasses.replace(sampling, seed=seed), request_id=len(cases)))
    return cases


@dataclasses.dataclass
class Comparison:
    """How one way of decoding compares with plain decoding in mixed batches.

    Attributes:
      name: the way.
      seconds: that its decoding took.
      sequences: compared responses.
      equal: those of them that are equal throughout.
      tokens: compared tokens, up to the first difference of each response.
      accepted: how many of the tokens a draft had proposed.
      gaps: the largest difference between log-probabilities of one token, by their name. Those under the processed
        distribution may differ by a token at the edge of top-k, top-p or min-p that falls on the other side of it.
      differences: where responses part, and with which setting.
    """

    name: str
    seconds: float = 0.0
    sequences: int = 0
    equal: int = 0
    tokens: int = 0
    accepted: int = 0
    gaps: dict[str, float] = dataclasses.field(default_factory=dict)
    differences: list[tuple[str, Difference]] = dataclasses.field(default_factory=list)

    def add(self, setting: str, wanted: Output, got: Output) -> None:
        """Compares one response."""
        difference = first_difference(wanted, got)
        size = len(wanted.tokens) if difference is None else difference.position
        self.sequences += 1
        self.tokens += size
        self.accepted += int(got.from_draft[:size].sum())
        for name, values in wanted.scores.items():
            gap = np.abs(values[:size] - got.scores[name][:size])
            self.gaps[name] = float(gap.max(initial=self.gaps.get(name, 0.0)))
        if difference is None:
            self.equal += 1
        else:
            self.differences.append((setting, difference))

    @property
    def failures(self) -> int:
        """Differences that no floating-point tie explains."""
        return sum(not difference.margin <= TIE for _, difference in self.differences)

    def __str__(self) -> str:
        gaps = ", ".join(f"{name} {gap:.2g}" for name, gap in self.gaps.items())
        text = (
            f"{self.name}: {self.sequences} sequences, {self.tokens} tokens compared, {self.accepted} from drafts, "
            f"{self.equal} sequences equal, {len(self.differences)} part at a tie or otherwise, "
            f"{self.failures} of them with a margin over {TIE:g}; "
            f"largest differences of log-probabilities: {gaps}; {self.seconds:.0f} s"
        )
        for setting, difference in self.differences:
            text += f"\n    {setting}: token {difference.position}, margin {difference.margin:.2g}"
        return text


def seen(cases: Sequence[Case], outputs: Iterable[Output]) -> TrieDrafter:
    """A trie that remembers the responses."""
    drafter = TrieDrafter()
    for i, (case, output) in enumerate(zip(cases, outputs, strict=True)):
        drafter.begin(("seen", i), case.prompt)
        drafter.extend(("seen", i), output.tokens.tolist())
        drafter.end(("seen", i), remember=True)
    return drafter


def compare(
    model: Model,
    params: Params,
    cases: Sequence[Case],
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int] = (),
    rows: int = 8,
    width: int = 8,
    attacks: Sequence[Attack] = ("random", "constant"),
    nonsense: int | None = None,
    alone: int = 16,
    report: Callable[[Comparison], None] = lambda comparison: None,
) -> list[Comparison]:
    """Decodes all cases in all ways.

    Args:
      model: the model.
      params: its parameters.
      cases: the requests.
      max_new_tokens: of each response.
      eos_ids: token ids that end a response.
      rows: requests decoded together.
      width: of the trees, which are verified whole.
      attacks: kinds of nonsense drafts.
      nonsense: how many cases, evenly spaced, see nonsense drafts; all by default.
      alone: how many cases, evenly spaced, are decoded alone, without drafts and with the trie.
      report: called with each comparison as soon as it is made.

    Returns:
      One comparison for each way.
    """

    def decode(some: Sequence[Case], drafter: Drafter | str | None, together: int = rows) -> list[Output]:
        result = generate(
            model,
            params,
            [case.prompt for case in some],
            max_new_tokens=max_new_tokens,
            eos_ids=eos_ids,
            rows=together,
            width=width,
            adapt=False,
            drafter=drafter,
            sampling=[case.sampling for case in some],
            request_ids=[case.request_id for case in some],
        )
        return list(result)

    def spaced(count: int | None) -> np.ndarray:
        count = len(cases) if count is None else min(count, len(cases))
        return np.linspace(0, len(cases) - 1, count).astype(int)

    found: list[Comparison] = []

    def check(name: str, which: np.ndarray, decoded: Callable[[], list[Output]]) -> None:
        comparison = Comparison(name)
        start = time.perf_counter()
        outputs = decoded()
        comparison.seconds = time.perf_counter() - start
        for i, output in zip(which, outputs, strict=True):
            comparison.add(cases[i].setting, plain[i], output)
        found.append(comparison)
        report(comparison)

    everything = spaced(None)
    start = time.perf_counter()
    plain = decode(cases, None)
    base = Comparison("plain, mixed batches, with itself", time.perf_counter() - start)
    for case, output in zip(cases, plain, strict=True):
        base.add(case.setting, output, output)
    report(base)

    # Requests stand in other batches than in plain decoding.
    order = np.random.default_rng(1).permutation(len(cases))
    check("trie that has seen the responses", everything, lambda: decode(cases, seen(cases, plain)))
    check("trie", everything, lambda: decode(cases, "trie"))
    few = spaced(nonsense)
    for attack in attacks:
        drafter = AdversarialDrafter(attack, model.vocab_size)
        check(f"{attack} drafts", few, functools.partial(decode, [cases[i] for i in few], drafter))
    shuffled = order[: len(spaced(alone))]
    check("plain, other neighbours", shuffled, lambda: decode([cases[i] for i in shuffled], None))
    ones = [cases[i] for i in spaced(alone)]
    check("alone, plain", spaced(alone), lambda: [decode([case], None, 1)[0] for case in ones])
    check("alone, trie", spaced(alone), lambda: [decode([case], "trie", 1)[0] for case in ones])
    return found


def read_prompts(path: Path, count: int, longest: int) -> list[list[int]]:
    """Evenly spaced prompts of a JSONL file whose lines hold token ids as `prompt`, none over `longest` tokens."""
    with path.open() as file:
        prompts = [json.loads(line)["prompt"] for line in file]
    fitting = [prompt for prompt in prompts if len(prompt) <= longest]
    if len(fitting) < count:
        raise SystemExit(f"{path} has {len(fitting)} prompts of at most {longest} tokens, {count} are needed")
    return [fitting[i] for i in np.linspace(0, len(fitting) - 1, count).astype(int)]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m jaxlookahead.bench.equality", description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, help="JSONL file; `prompt` of each line holds token ids")
    parser.add_argument("--checkpoint", help="GGUF file, Hugging Face directory or hub id; else the demo's model")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument(
        "--per-seed", type=int, help="settings that each prompt and seed meet, in turns; all by default"
    )
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--longest-prompt", type=int, default=128, help="tokens; longer prompts are left out")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--nonsense", type=int, help="cases that see nonsense drafts, all by default")
    parser.add_argument("--alone", type=int, default=16, help="cases decoded alone")
    options = parser.parse_args()

    from jaxlookahead.checkpoints.load import load

    loaded = load(options.checkpoint, tokenizer=None) if options.checkpoint else load(tokenizer=None)
    prompts = read_prompts(options.traces, options.prompts, options.longest_prompt)
    cases = make_cases(prompts, options.seeds, loaded.model.vocab_size, options.per_seed)
    found = compare(
        loaded.model,
        loaded.params,
        cases,
        max_new_tokens=options.max_new_tokens,
        eos_ids=loaded.eos_ids,
        rows=options.rows,
        width=options.width,
        nonsense=options.nonsense,
        alone=options.alone,
        report=lambda comparison: print(comparison, flush=True),
    )
    failures = sum(comparison.failures for comparison in found)
    print(f"{failures} failures in {sum(comparison.tokens for comparison in found)} tokens")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
