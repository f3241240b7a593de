"""The main job on the real model and real prompts."""

from __future__ import annotations

import os

import pytest

from jaxlookahead import first_difference, generate, load
from jaxlookahead.drafters.protocol import DrafterBase
from jaxlookahead.testing import ATTACKS, AdversarialDrafter, check_model

pytestmark = pytest.mark.real
# CI takes some prompts; a number takes that many tokens of every golden response, `all` takes all.
ASKED = os.environ.get("JAXLOOKAHEAD_GOLDENS")


@pytest.fixture(scope="module")
def loaded():
    return load()


@pytest.fixture(scope="module")
def goldens(shared_rows):
    rows = shared_rows("goldens.jsonl")
    return rows if ASKED else [row for row in rows if len(row["prompt"]) < 160][::6]


def check(loaded, goldens, limit=None, **options):
    """Decodes; the tokens are the golden ones, or part from them at a near-tie. Returns the statistics."""
    limits = [min(len(row["response"]), limit or 10**6) for row in goldens]
    prompts = [row["prompt"] for row in goldens]
    result = generate(
        loaded.model, loaded.params, prompts, max_new_tokens=limits, eos_ids=loaded.eos_ids, adapt=False, **options
    )
    for row, output, size in zip(goldens, result, limits, strict=True):
        wanted, got = row["response"][:size], output.tokens.tolist()
        if wanted != got:
            where = next(i for i, pair in enumerate(zip(wanted, got, strict=False)) if pair[0] != pair[1])
            assert min(row["margins"][where], output.margins[where]) < 1e-4, (row["name"], where)
    return result.stats


def test_check_model(loaded):
    report = check_model(loaded.model, loaded.params)
    assert max(report.tree, report.commit) < 1e-5


class Nonsense(DrafterBase):
    """Each request is drafted for by another attack."""

    def __init__(self, vocab_size):
        self.attacks = [AdversarialDrafter(attack, vocab_size) for attack in ATTACKS]

    def of(self, request):
        return self.attacks[request % len(self.attacks)]

    def begin(self, request, prompt, *, namespace=None):
        self.of(request).begin(request, prompt)

    def extend(self, request, tokens):
        self.of(request).extend(request, tokens)

    def draft(self, request, budget, max_depth):
        return self.of(request).draft(request, budget, max_depth)

    def end(self, request, *, remember=True):
        self.of(request).end(request)


# Every width with every number of rows, and every drafter with each of both.
DRAFTERS = ("trie", "prompt_lookup", "nonsense")
CASES = [
    (DRAFTERS[(i + j + 2) % 3], width, rows)
    for i, width in enumerate((1, 4, 8, 16, 32, 64))
    for j, rows in enumerate((1, 3, 8))
]
IN_CI = [("prompt_lookup", 1, 8), ("trie", 16, 3), ("trie", 64, 8), ("nonsense", 8, 3)]
assert set(IN_CI) <= set(CASES)


@pytest.mark.parametrize(("drafter", "width", "rows"), CASES if ASKED else IN_CI)
def test_greedy_equals_goldens(loaded, goldens, drafter, width, rows):
    limit = 48 if ASKED is None else None if ASKED == "all" else int(ASKED)
    given = Nonsense(loaded.model.vocab_size) if drafter == "nonsense" else drafter
    stats = check(loaded, goldens, limit, drafter=given, width=width, rows=rows)
    assert (stats.drafted > 0) == (width > 1)
    assert stats.accepted > 0 or width == 1 or drafter == "nonsense"


def test_drafted_equals_plain(loaded, goldens):
    prompts = [row["prompt"] for row in goldens[:2]]
    options = dict(max_new_tokens=64, eos_ids=loaded.eos_ids)
    plain, drafted = (generate(loaded.model, loaded.params, prompts, drafter=x, **options) for x in (None, "trie"))
    for a, b in zip(plain, drafted, strict=True):
        difference = first_difference(a, b)
        assert difference is None or difference.margin < 1e-4
