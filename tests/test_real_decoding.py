"""The main job on the real model and real prompts."""

from __future__ import annotations

import os

import pytest

from jaxlookahead import first_difference, generate, load
from jaxlookahead.drafters.protocol import DrafterBase
from jaxlookahead.testing import ATTACKS, AdversarialDrafter, check_model

pytestmark = pytest.mark.real
# Every golden prompt takes half an hour; CI takes some.
EVERY = os.environ.get("JAXLOOKAHEAD_GOLDENS") == "all"


@pytest.fixture(scope="module")
def loaded():
    return load()


@pytest.fixture(scope="module")
def goldens(shared_rows):
    rows = shared_rows("goldens.jsonl")
    return rows if EVERY else [row for row in rows if len(row["prompt"]) < 160][::6]


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


CASES = [("trie", width, 8) for width in (1, 4, 8, 16, 32, 64)]
CASES += [("trie", 16, 1), ("trie", 16, 3), ("prompt_lookup", 8, 3), ("prompt_lookup", 16, 8)]


@pytest.mark.parametrize(("drafter", "width", "rows"), CASES)
def test_greedy_equals_goldens(loaded, goldens, drafter, width, rows):
    if not EVERY and (width, rows) not in ((1, 8), (16, 3), (64, 8)):
        pytest.skip("one of the longer ones")
    stats = check(loaded, goldens, limit=None if EVERY else 64, drafter=drafter, width=width, rows=rows)
    assert stats.accepted > 0 or width == 1


class Alternating(DrafterBase):
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


def test_adversarial_drafts(loaded, goldens):
    limit = None if EVERY else 32
    check(loaded, goldens, limit, drafter=Alternating(loaded.model.vocab_size), width=8, rows=8)


def test_drafted_equals_plain(loaded, goldens):
    prompts = [row["prompt"] for row in goldens[:2]]
    options = dict(max_new_tokens=64, eos_ids=loaded.eos_ids)
    plain, drafted = (generate(loaded.model, loaded.params, prompts, drafter=x, **options) for x in (None, "trie"))
    for a, b in zip(plain, drafted, strict=True):
        difference = first_difference(a, b)
        assert difference is None or difference.margin < 1e-4
