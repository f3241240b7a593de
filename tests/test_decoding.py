from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlookahead import engine
from jaxlookahead.decoding import generate, stream
from jaxlookahead.drafters.prompt_lookup import PromptLookup
from jaxlookahead.drafters.protocol import Draft, DrafterBase
from jaxlookahead.drafters.trie import TrieDrafter
from jaxlookahead.models.dummy import tiny_decoder
from jaxlookahead.results import BadLogitsError, first_difference
from jaxlookahead.testing import ATTACKS, AdversarialDrafter, OracleDrafter
from tests.models_that_fail import Breaks


@pytest.fixture(scope="module")
def plain(tiny, prompts):
    return generate(*tiny, prompts, drafter=None, max_new_tokens=60)


def oracle(prompts, outputs, error_rate=0.1):
    return OracleDrafter({tuple(p): x.tokens for p, x in zip(prompts, outputs, strict=True)}, 50, error_rate=error_rate)


def forced(*args, **options):
    """`generate` that verifies whole drafts."""
    return generate(*args, adapt=False, **options)


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        difference = first_difference(x, y)
        assert difference is None or difference.margin < 1e-4, (x.request, difference)
        assert x.finish_reason == y.finish_reason


@pytest.mark.parametrize(("width", "rows"), [(1, 3), (4, 3), (8, 3), (16, 1), (16, 3), (16, 8), (64, 3)])
@pytest.mark.parametrize("name", ["trie", "prompt_lookup", "oracle"])
def test_drafted_equals_plain(tiny, prompts, plain, name, width, rows):
    """E4, B34, F2: every drafter, width and batch gives the tokens of plain decoding."""
    drafter = oracle(prompts, plain) if name == "oracle" else name
    drafted = forced(*tiny, prompts, drafter=drafter, width=width, rows=rows, max_new_tokens=60)
    assert_same(plain, drafted)
    assert drafted.stats.steps < plain.stats.steps or width == 1 or rows != 8


@pytest.mark.parametrize("attack", ATTACKS)
def test_A32_A35_D16_adversarial_drafts(tiny, prompts, plain, attack):
    for width, rows in ((2, 8), (16, 3), (13, 1)):
        drafter = AdversarialDrafter(attack, 50)
        assert_same(plain, forced(*tiny, prompts, drafter=drafter, width=width, rows=rows, max_new_tokens=60))


def test_adaptive_width_changes_no_token(tiny, prompts, plain):
    for drafter in ("trie", "prompt_lookup", oracle(prompts, plain)):
        for rows in (1, 8):
            assert_same(plain, generate(*tiny, prompts, drafter=drafter, width=16, rows=rows, max_new_tokens=60))


def test_plain_equals_a_loop_without_this_library(tiny, prompts, plain):
    model, params = tiny
    text = list(prompts[2])
    size = len(text) + 20
    forward = jax.jit(model.forward)
    for _ in range(20):
        tokens = np.zeros((1, size), np.int32)
        tokens[0, : len(text)] = text
        mask = np.tril(np.ones((1, size, size), bool))
        logits, _ = forward(params, tokens, np.arange(size)[None], mask, model.init_cache(1, size), jnp.int32(0))
        text.append(int(logits[0, len(text) - 1].argmax()))
    assert plain.tokens[2][:20] == text[len(prompts[2]) :]


def test_C9_C10_C11_counts_agree(tiny, prompts, plain):
    drafted = forced(*tiny, prompts, drafter=oracle(prompts, plain), width=16, rows=3, max_new_tokens=60)
    for stats, outputs in [(drafted.stats, list(drafted)), *((x.stats, [x]) for x in drafted)]:
        assert stats.tokens == sum(len(x.tokens) for x in outputs)
        assert stats.accepted == sum(int(x.from_draft.sum()) for x in outputs)
        assert sum(stats.histogram) == stats.row_steps
        assert sum(i * n for i, n in enumerate(stats.histogram)) == stats.accepted
        assert stats.tokens_per_call == stats.tokens / stats.row_steps
        assert 0 < stats.acceptance_rate <= 1
    assert drafted.stats.row_steps == sum(x.stats.row_steps for x in drafted)
    assert drafted.stats.drafted == sum(x.stats.drafted for x in drafted)
    assert drafted.stats.steps < drafted.stats.row_steps


def test_A33_drafting_happens(tiny, prompts):
    stats = forced(*tiny, [[7, 8, 9] * 10], max_new_tokens=40).stats
    assert stats.drafted > 0 and stats.accepted > 0


@pytest.mark.parametrize("limit", range(6))
def test_A4_max_new_tokens(tiny, prompts, plain, limit):
    drafted = forced(*tiny, prompts, drafter=oracle(prompts, plain, 0.0), width=16, max_new_tokens=limit)
    assert drafted.tokens == [tokens[:limit] for tokens in plain.tokens]
    assert {x.finish_reason for x in drafted} == {"length"}


def test_max_new_tokens_for_each(tiny, prompts, plain):
    limits = [3, 0, 60, 1, 7, 20]
    drafted = forced(*tiny, prompts, max_new_tokens=limits, rows=2)
    assert drafted.tokens == [tokens[:limit] for tokens, limit in zip(plain.tokens, limits, strict=True)]


class Recorder(DrafterBase):
    """Passes calls on and keeps them."""

    def __init__(self, inner):
        self.inner, self.calls, self.alive = inner, [], set()

    def begin(self, request, prompt, *, namespace=None):
        self.alive.add(request)
        self.calls.append(("begin", request, list(prompt), namespace))
        self.inner.begin(request, prompt, namespace=namespace)

    def extend(self, request, tokens):
        self.calls.append(("extend", request, list(tokens)))
        self.inner.extend(request, tokens)

    def draft(self, request, budget, max_depth):
        self.calls.append(("draft", request, budget, max_depth))
        return self.inner.draft(request, budget, max_depth)

    def end(self, request, *, remember=True):
        self.alive.remove(request)
        self.calls.append(("end", request, remember))
        self.inner.end(request, remember=remember)


@pytest.mark.parametrize("drafter", [None, "trie", "oracle"])
def test_A2_A3_A36_context_limit(tiny, drafter):
    """Prompt and response together never pass the model's length, drafts are capped with it."""
    model, params = tiny_decoder(vocab_size=50, max_length=24)
    prompts = [list(range(n)) for n in (1, 20, 22, 23, 24)]
    free = generate(*tiny, prompts, drafter=None, max_new_tokens=40)
    inner = oracle(prompts, free, 0.0) if drafter == "oracle" else TrieDrafter()
    given = Recorder(inner) if drafter else None
    capped = forced(model, params, prompts, drafter=given, max_new_tokens=40, rows=2)
    assert capped.tokens == [x[: 24 - len(p)] for p, x in zip(prompts, free.tokens, strict=True)]
    assert {x.finish_reason for x in capped} == {"length"}
    if given:
        depths = [call[3] for call in given.calls if call[0] == "draft"]
        assert min(depths) >= 1 and max(depths) <= 22


def test_prompt_too_long_is_refused_at_once():
    model, params = tiny_decoder(vocab_size=50, max_length=24)
    drafter = Recorder(TrieDrafter())
    with pytest.raises(ValueError, match=r"prompts\[1\] has 25 tokens, but the model holds at most 24"):
        generate(model, params, [[1], list(range(25))], drafter=drafter)
    assert not drafter.calls


@pytest.mark.parametrize("drafter", [None, "oracle", "trie"])
def test_C1_eos_and_stop(tiny, prompts, plain, drafter):
    eos = [27, 9]
    stop = [plain.tokens[4][5:8], plain.tokens[2][3:4]]
    given = oracle(prompts, plain, 0.0) if drafter == "oracle" else drafter
    got = forced(*tiny, prompts, drafter=given, max_new_tokens=60, eos_ids=eos, stop=stop, rows=4)
    for full, output in zip(plain.tokens, got, strict=True):
        text, reason = [], None
        for token in full:
            text.append(token)
            if token in eos:
                reason = "eos"
            elif any(text[-len(s) :] == s for s in stop):
                reason = "stop"
            elif len(text) == 60:
                reason = "length"
            if reason:
                break
        assert (output.tokens.tolist(), output.finish_reason) == (text, reason)
        assert len(output.tokens) == len(output.margins) == len(output.from_draft) == len(output.sources)


def test_F1_token_zero(tiny):
    prompts = [[0], [0, 0, 0], [5, 0, 7, 0], [0, 3]]
    plain = generate(*tiny, prompts, drafter=None, max_new_tokens=30)
    assert_same(plain, generate(*tiny, prompts, max_new_tokens=30))
    assert_same(plain, generate(*tiny, prompts, drafter=AdversarialDrafter("zero", 50), max_new_tokens=30))


def test_B35_F8_same_call_twice(tiny, prompts):
    options = dict(drafter="trie", max_new_tokens=20, eos_ids=[3], stop=[[1, 2]])
    before = {key: list(x) if isinstance(x, list) else x for key, x in options.items()}
    first, second = (forced(*tiny, prompts, **options) for _ in range(2))
    assert first.tokens == second.tokens and first.stats.histogram == second.stats.histogram
    assert options == before


def test_drafter_remembers_across_calls_and_requests_end(tiny, prompts):
    drafter = Recorder(TrieDrafter())
    cold = forced(*tiny, prompts, drafter=drafter, max_new_tokens=40)
    assert not drafter.alive
    warm = forced(*tiny, prompts, drafter=drafter, max_new_tokens=40)
    assert warm.tokens == cold.tokens and warm.stats.row_steps < cold.stats.row_steps
    said = {call[1]: [] for call in drafter.calls}
    for call in drafter.calls:
        if call[0] == "extend":
            said[call[1]] += call[2]
    assert list(said.values()) == cold.tokens + warm.tokens


def test_successors_are_the_models_own(tiny, prompts, plain):
    """Every verified node, accepted or not, tells its likeliest next tokens."""
    seen = []

    class Watching(TrieDrafter):
        def observe_topk(self, request, tokens, topk):
            seen.append((list(tokens), topk))
            super().observe_topk(request, tokens, topk)

    drafted = forced(*tiny, prompts[:2], drafter=Watching(successors=4), width=8, max_new_tokens=60)
    assert_same(plain[:2], drafted)
    assert all(len(tokens) == len(rows) and all(len(row) == 4 for row in rows) for tokens, rows in seen)
    assert sum(len(tokens) - 1 for tokens, _ in seen) == drafted.stats.drafted
    # The first root is the prompt's last token, and what follows it is the response.
    firsts = [rows[0][0] for tokens, rows in seen[:2]]
    assert firsts == [output.tokens[0] for output in drafted]


def test_namespaces_reach_the_drafter(tiny):
    drafter = Recorder(TrieDrafter())
    generate(*tiny, [[1], [2]], drafter=drafter, max_new_tokens=2, namespaces=["a", "b"])
    assert [call[3] for call in drafter.calls if call[0] == "begin"] == ["a", "b"]


@pytest.mark.parametrize("rows", [1, 3])
def test_stream_equals_generate(tiny, prompts, plain, rows):
    texts, reasons = [[] for _ in prompts], [None] * len(prompts)
    for chunk in stream(*tiny, prompts, max_new_tokens=60, rows=rows, adapt=False):
        assert reasons[chunk.request] is None
        texts[chunk.request] += chunk.tokens.tolist()
        reasons[chunk.request] = chunk.finish_reason
    assert texts == plain.tokens and reasons == ["length"] * len(prompts)


def test_closing_a_stream_ends_its_requests(tiny, prompts):
    drafter = Recorder(TrieDrafter())
    chunks = stream(*tiny, prompts, drafter=drafter, rows=2)
    next(chunks)
    assert len(drafter.alive) == 2
    chunks.close()
    assert not drafter.alive and drafter.calls[-1][2] is False


def test_no_compilation_after_warm_up(tiny):
    """Every bucket is traced once over a long, varied decode."""
    rng = np.random.default_rng(3)
    model, params = tiny_decoder(seed=5, vocab_size=50)
    engine.TRACES.clear()

    def decode():
        prompts = [rng.integers(0, 50, rng.integers(1, 260)).tolist() for _ in range(40)]
        limits = rng.integers(1, 60, 40).tolist()
        options = dict(eos_ids=rng.integers(0, 50, 2).tolist(), stop=[rng.integers(0, 50, 2).tolist()])
        forced(model, params, prompts, rows=4, max_new_tokens=limits, **options)

    for _ in range(5):
        decode()
    assert max(engine.TRACES.values()) == 1
    # Widths 1, 2, 4, 8, 16 and 256 or 512 slots; decoding 200 requests of 200 shapes meets no other bucket.
    assert len({key for key in engine.TRACES if key[1] == "step"}) <= 5 * 2


def test_B17_nan_logits_lose_nothing(tiny):
    model, params = tiny
    plain = generate(model, params, [[1, 2, 3], [4]], drafter=None, max_new_tokens=10)
    drafter = Recorder(TrieDrafter())
    with pytest.raises(BadLogitsError, match=r"prompts\[0\], token 4 of the response") as caught:
        generate(Breaks(model, 6), params, [[1, 2, 3], [4]], drafter=drafter, max_new_tokens=10)
    tokens = caught.value.generation.tokens
    assert tokens[0] == plain.tokens[0][:4] and tokens[1] == plain.tokens[1][: len(tokens[1])]
    assert not drafter.alive


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(prompts=[[]]), ValueError, r"prompts\[0\] must be a non-empty"),
        (dict(prompts=[[1], [50]]), ValueError, r"prompts\[1\] holds token id 50"),
        (dict(prompts=[[-1]]), ValueError, "token id -1"),
        (dict(prompts=[[1.5]]), TypeError, "integer token ids"),
        (dict(prompts=[1, 2]), TypeError, "flat list"),
        (dict(prompts=["text"]), TypeError, "encode it with the tokenizer"),
        (dict(max_new_tokens=-1), ValueError, "max_new_tokens must be at least 0"),
        (dict(max_new_tokens=2.0), TypeError, "max_new_tokens"),
        (dict(max_new_tokens=[1, 2]), ValueError, "max_new_tokens has 2 entries for 1 prompts"),
        (dict(width=0), ValueError, "width must be at least 1"),
        (dict(rows=0), ValueError, "rows must be at least 1"),
        (dict(drafter="tree"), ValueError, "'tree' is unknown; choose 'trie'"),
        (dict(drafter=TrieDrafter), TypeError, "instance"),
        (dict(drafter=object()), TypeError, "Drafter protocol"),
        (dict(eos_ids=[99]), ValueError, "eos_ids holds token id 99"),
        (dict(stop=[[]]), ValueError, r"stop\[0\]"),
        (dict(stop=[[77]]), ValueError, "token id 77"),
    ],
)
def test_bad_arguments(tiny, options, error, words):
    for call in (generate, stream):
        with pytest.raises(error, match=words):
            call(*tiny, **{"prompts": [[1]], **options})


def test_F10_unknown_option(tiny):
    for call in (generate, stream):
        with pytest.raises(TypeError, match="widht"):
            call(*tiny, [[1]], widht=3)


def test_no_prompts(tiny):
    assert generate(*tiny, []).tokens == []


class Failing(DrafterBase):
    def begin(self, request, prompt, *, namespace=None):
        pass

    def extend(self, request, tokens):
        pass

    def end(self, request, *, remember=True):
        pass

    def draft(self, request, budget, max_depth):
        return Draft(tokens=[1, 2], parents=[-1])


def test_broken_drafter_is_named(tiny):
    with pytest.raises(ValueError, match="draft lists differ in length"):
        generate(*tiny, [[1]], drafter=Failing())


def test_a_drafter_that_refuses_a_prompt_is_heard(tiny):
    """Its own words come through, and the requests before it end."""
    drafter = TrieDrafter(vocab_size=30)
    with pytest.raises(ValueError, match="prompt holds the token id 40: ids must be from 0 to 29"):
        generate(*tiny, [[1, 2], [40]], drafter=drafter, max_new_tokens=4)
    drafter.forget_namespace(None)


def test_prompt_lookup_object(tiny, prompts, plain):
    assert_same(plain, forced(*tiny, prompts, drafter=PromptLookup(match="earliest"), max_new_tokens=60))
