"""The main job on the real model and real prompts."""

from __future__ import annotations

import os

import pytest

from jaxlookahead import first_difference, generate, load
from jaxlookahead.testing import ATTACKS, AdversarialDrafter, check_model

pytestmark = pytest.mark.real
# Every golden prompt takes an hour; CI takes some of each kind.
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


@pytest.mark.parametrize(("width", "rows"), [(1, 1), (4, 1), (16, 3), (64, 1)])
def test_greedy_equals_goldens(loaded, goldens, width, rows):
    some = goldens if EVERY or width == 16 else goldens[:3]
    stats = check(loaded, some, drafter="trie", width=width, rows=rows)
    assert stats.accepted > 0 or width == 1


def test_batch_of_eight(loaded, goldens):
    check(loaded, goldens[:8], limit=None if EVERY else 48, drafter="prompt_lookup", width=8, rows=8)


@pytest.mark.parametrize("attack", ATTACKS)
def test_adversarial_drafts(loaded, goldens, attack):
    drafter = AdversarialDrafter(attack, loaded.model.vocab_size)
    check(loaded, goldens if EVERY else goldens[:3], limit=None if EVERY else 16, drafter=drafter, width=16, rows=3)


def test_drafted_equals_plain(loaded, goldens):
    prompts = [row["prompt"] for row in goldens[:2]]
    options = dict(max_new_tokens=64, eos_ids=loaded.eos_ids)
    plain, drafted = (generate(loaded.model, loaded.params, prompts, drafter=x, **options) for x in (None, "trie"))
    for a, b in zip(plain, drafted, strict=True):
        difference = first_difference(a, b)
        assert difference is None or difference.margin < 1e-4
