"""Sampled decoding with drafts against sampled decoding without."""

from __future__ import annotations

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlookahead import engine
from jaxlookahead.decoding import generate, stream
from jaxlookahead.drafters.trie import TrieDrafter
from jaxlookahead.models.dummy import tiny_decoder
from jaxlookahead.results import BadLogitsError, first_difference
from jaxlookahead.sampling import MatcherConstraint, Sampling
from jaxlookahead.testing import ATTACKS, AdversarialDrafter, OracleDrafter

V = 50
LENGTHS = (1, 5, 40, 17, 3, 26)
PROMPTS = [np.random.default_rng(n).integers(0, V, n).tolist() for n in LENGTHS]
# Every setting, sampled and greedy rows, all in one batch; eight requests.
MIXED = [
    Sampling(temperature=0.7, top_p=0.9, seed=1),
    Sampling(temperature=1.0, top_k=9, min_p=0.05, repetition_penalty=1.3, no_repeat_ngram=3, seed=2**40),
    Sampling(),
    Sampling(
        temperature=1.2,
        frequency_penalty=0.5,
        presence_penalty=0.3,
        logit_bias={3: 2.0, 7: -math.inf},
        banned_sequences=((1, 2), (4,)),
        seed=3,
    ),
    Sampling(temperature=0.9, min_new_tokens=9, forced_tokens={2: 11}, banned_tokens=(8,)),
    Sampling(temperature=1.0, num_samples=3, seed=5),
]
# Short texts and narrow trees: few shapes compile.
OPTIONS = dict(max_new_tokens=30, eos_ids=[27], stop=[[30, 13]], width=4, adapt=False)


def decode(tiny, prompts=PROMPTS, **options):
    return generate(*tiny, prompts, **{**OPTIONS, "sampling": MIXED, **options})


@pytest.fixture(scope="module")
def plain(tiny):
    return decode(tiny, drafter=None)


class Replay(OracleDrafter):
    """Drafts the responses of each prompt's requests, in the order in which they begin."""

    def __init__(self, prompts, outputs, **options):
        super().__init__({}, V, **options)
        self.responses = {tuple(prompt): [] for prompt in prompts}
        for output in outputs:
            self.responses[tuple(prompts[output.request])].append(output.tokens)

    def begin(self, request, prompt, *, namespace=None):
        self._live[request] = (self.responses[tuple(prompt)].pop(0), 0)


def assert_same(wanted, got):
    """B20, F9: tokens, and what is told of each of them."""
    assert len(wanted) == len(got)
    for a, b in zip(wanted, got, strict=True):
        difference = first_difference(a, b)
        if difference is not None:
            assert difference.margin < 1e-4, (a.request, difference)
            continue
        assert (a.sample, a.finish_reason) == (b.sample, b.finish_reason)
        np.testing.assert_allclose(a.margins, b.margins, atol=3e-3)
        assert set(a.scores) == set(b.scores) == {"logprob", "logprob_raw"}
        for name in a.scores:
            assert a.scores[name].shape == a.tokens.shape
            np.testing.assert_allclose(a.scores[name], b.scores[name], atol=1e-3)


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("name", ["trie", "prompt_lookup", "oracle"])
def test_A34_B23_drafted_equals_plain(tiny, plain, name, rows):
    drafter = Replay(PROMPTS, plain) if name == "oracle" else name
    drafted = decode(tiny, drafter=drafter, rows=rows)
    assert_same(plain, drafted)
    if name == "oracle":
        assert drafted.stats.accepted > 0.3 * drafted.stats.tokens
        # Penalties, biases and bans are no reason to draft less.
        assert all(output.stats.accepted for output in drafted if len(output.tokens) > 3)


@pytest.mark.parametrize("attack", ATTACKS)
def test_A32_D16_adversarial_drafts(tiny, plain, attack):
    assert_same(plain, decode(tiny, drafter=AdversarialDrafter(attack, V), rows=3))


def test_rules_hold(tiny, plain):
    """The settings do what they say, so that the equalities above are about something."""
    by_request = [[x.tokens.tolist() for x in plain if x.request == i] for i in range(6)]
    (_,), (no_repeat,), (greedy,), (banned,), (forced,), samples = by_request
    trigrams = [tuple(no_repeat[i : i + 3]) for i in range(len(no_repeat) - 2)]
    assert len(set(trigrams)) == len(trigrams)
    assert greedy == generate(*tiny, PROMPTS[2:3], **OPTIONS, drafter=None).tokens[0]
    assert not {7, 4} & set(banned) and (1, 2) not in itertools.pairwise(banned)
    assert forced[2] == 11 and 8 not in forced and 27 not in forced[:9] and len(forced) > 9
    assert len({tuple(x) for x in samples}) == 3
    assert [x.sample for x in plain] == [0, 0, 0, 0, 0, 0, 1, 2]


def test_raw_logprobs_are_the_models_own(tiny, plain):
    model, params = tiny
    output, prompt = plain[1], PROMPTS[1]
    text = [*prompt, *output.tokens.tolist()]
    size = len(text)
    mask = np.tril(np.ones((1, size, size), bool))
    logits, _ = model.forward(
        params, np.array([text], np.int32), np.arange(size)[None], mask, model.init_cache(1, size), jnp.int32(0)
    )
    logits = np.asarray(logits[0, len(prompt) - 1 : -1], np.float64)
    wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = wanted[np.arange(len(output.tokens)), output.tokens]
    np.testing.assert_allclose(output.scores["logprob_raw"], wanted, atol=1e-4)


def test_B26_order_and_company_do_not_matter(tiny, plain):
    """A request is sampled alike in any order, row and batch, also through refilled rows."""
    order = [4, 0, 5, 2, 1, 3]
    ids = [10, 11, 12, 13, 14, 15]
    straight = decode(tiny, drafter=None, request_ids=ids)
    mixed = decode(
        tiny,
        [PROMPTS[i] for i in order],
        sampling=[MIXED[i] for i in order],
        request_ids=[ids[i] for i in order],
        rows=3,
        drafter="trie",
    )
    by_place = {order[x.request]: [y for y in mixed if y.request == x.request] for x in mixed}
    for i, same in by_place.items():
        assert_same([x for x in straight if x.request == i], same)
    for i in (1, 3):
        alone = decode(tiny, PROMPTS[i : i + 1], sampling=MIXED[i], request_ids=ids[i : i + 1], rows=1)
        assert_same([straight[i]], alone)
    assert straight.tokens != plain.tokens


def test_stop_rules_end_at_the_same_token(tiny, plain):
    """C1: EOS and stop sequences that sampled texts really hold."""
    longest = max(plain.tokens, key=len)
    options = dict(stop=[longest[4:6]])
    wanted = decode(tiny, drafter=None, **options)
    assert {x.finish_reason for x in wanted} >= {"eos", "stop"}
    assert_same(wanted, decode(tiny, drafter=Replay(PROMPTS, wanted, error_rate=0.0), rows=3, **options))


def test_max_new_tokens_cuts_and_changes_nothing(tiny, plain):
    short = decode(tiny, drafter=Replay(PROMPTS, plain, error_rate=0.0), max_new_tokens=7, rows=3)
    assert short.tokens == [tokens[:7] for tokens in plain.tokens]


def test_stream_equals_generate(tiny, plain):
    texts, scores = [[] for _ in plain], [[] for _ in plain]
    place = {(x.request, x.sample): i for i, x in enumerate(plain)}
    for chunk in stream(*tiny, PROMPTS, sampling=MIXED, rows=3, **OPTIONS):
        texts[place[chunk.request, chunk.sample]] += chunk.tokens.tolist()
        scores[place[chunk.request, chunk.sample]] += chunk.scores["logprob"].tolist()
    assert texts == plain.tokens
    assert [len(x) for x in scores] == [len(x) for x in texts]


def test_B25_B35_F8_same_call_twice(tiny):
    """Also with a drafter that has learnt in between."""
    sampling, drafter = Sampling(temperature=1.0, seed=42), TrieDrafter()
    first, second = (decode(tiny, sampling=sampling, drafter=drafter, rows=3) for _ in range(2))
    assert_same(first, second)
    assert second.stats.accepted > first.stats.accepted
    other = decode(tiny, sampling=Sampling(temperature=1.0, seed=43), rows=3)
    assert other.tokens != first.tokens


def test_B29_B32_law_with_drafts(tiny):
    """Every likely token occurs, as often as its probability says, whatever is drafted."""
    sampling = Sampling(temperature=6.0, num_samples=600, seed=9)
    drafted = decode(tiny, PROMPTS[:1], sampling=sampling, max_new_tokens=1, width=1)
    second = decode(tiny, PROMPTS[:1], sampling=sampling, max_new_tokens=2, drafter=AdversarialDrafter("random", V))
    assert [x.tokens[0] for x in second] == [x.tokens[0] for x in drafted]
    tokens = np.array([x.tokens[0] for x in drafted])
    seen = {int(x.tokens[0]): float(np.exp(x.scores["logprob"][0])) for x in drafted}
    likely = {token: p for token, p in seen.items() if p > 0.02}
    assert len(likely) > 3
    for token, p in likely.items():
        share = np.mean(tokens == token)
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / len(tokens)), (token, p, share)


def test_scores_without_sampling(tiny):
    greedy = generate(*tiny, PROMPTS, **OPTIONS, drafter=None, rows=3)
    assert greedy[0].scores == {}
    scored = generate(*tiny, PROMPTS, **OPTIONS, drafter="trie", logprobs=True, rows=3)
    assert scored.tokens == greedy.tokens
    for output in scored:
        np.testing.assert_array_equal(output.scores["logprob"], output.scores["logprob_raw"])
        assert len(output.scores["logprob"]) == len(output.tokens)


def shun_last(history, length, logits):
    """A user's processor: makes the newest token less likely, and the smallest ones too."""
    newest = jnp.take_along_axis(history, length[:, None] - 1, axis=1)
    ids = jnp.arange(logits.shape[-1])
    return logits - 4 * (ids == newest) - 1.0 * (ids < length[:, None] % 7)


def test_users_processor(tiny, plain):
    options = dict(processors=(shun_last,), rows=3)
    wanted = decode(tiny, drafter=None, **options)
    assert wanted.tokens != plain.tokens
    assert_same(wanted, decode(tiny, drafter=Replay(PROMPTS, wanted), **options))


class Classes:
    """After `TRIGGER`, tokens alternate between even and odd ones; before it all but 27 are free."""

    TRIGGER = 10

    def __init__(self):
        self.steps = set()

    def start(self, request):
        return ("free", ())

    def step(self, state, token):
        mode, emitted = state
        self.steps.add((*emitted, token))
        if mode == "free":
            return ("even" if token == self.TRIGGER else "free", (*emitted, token))
        return ("odd" if mode == "even" else "even", (*emitted, token))

    def mask(self, state):
        ids = np.arange(V)
        mode = state[0]
        return ids != 27 if mode == "free" else ids % 2 == (0 if mode == "even" else 1)


def test_E1_E2_E3_constraint(tiny):
    """A constraint that starts in mid-text, maybe in mid-draft; drafts it forbids never move the matcher."""
    matcher = Classes()
    options = dict(
        constraint=MatcherConstraint(matcher),
        sampling=[Sampling(temperature=1.0, seed=i, logit_bias={Classes.TRIGGER: 9.0}) for i in range(6)],
        eos_ids=[],
        stop=[],
        rows=3,
    )
    wanted = decode(tiny, drafter=None, **options)
    for drafter in (Replay(PROMPTS, wanted, error_rate=0.0), AdversarialDrafter("constant", V)):
        assert_same(wanted, decode(tiny, drafter=drafter, **options))
    started = 0
    for tokens in wanted.tokens:
        assert 27 not in tokens[: tokens.index(Classes.TRIGGER) + 1 if Classes.TRIGGER in tokens else None]
        after = tokens[tokens.index(Classes.TRIGGER) + 1 :] if Classes.TRIGGER in tokens else []
        assert [token % 2 for token in after] == [i % 2 for i in range(len(after))]
        started += len(after) > 4
    assert started > 2
    emitted = {tuple(tokens[: i + 1]) for tokens in wanted.tokens for i in range(len(tokens))}
    assert matcher.steps <= emitted


def test_no_setting_recompiles():
    """One trace a bucket, whatever the rows ask for."""
    tiny = tiny_decoder(vocab_size=V, max_length=300)
    engine.TRACES.clear()
    rng = np.random.default_rng(0)
    for _ in range(3):
        sampling = [
            Sampling(
                temperature=float(rng.choice([0, 0.5, 1])),
                top_k=int(rng.integers(0, 9)),
                top_p=float(rng.uniform(0.3, 1)),
                repetition_penalty=float(rng.uniform(1, 2)),
                logit_bias={int(rng.integers(0, V)): 1.0},
                no_repeat_ngram=int(rng.integers(0, 4)),
                forced_tokens={int(rng.integers(0, 9)): 3},
                seed=int(rng.integers(0, 99)),
            )
            for _ in PROMPTS
        ]
        decode(tiny, sampling=sampling, rows=3, request_ids=rng.permutation(6).tolist())
    assert max(engine.TRACES.values()) == 1
    assert len({key for key in engine.TRACES if key[1] == "step"}) <= 3


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(sampling={"temperature": 1.0}), TypeError, "sampling must be a Sampling"),
        (dict(sampling=[Sampling()] * 2), ValueError, "sampling has 2 entries for 1 prompts"),
        (dict(sampling=Sampling(logit_bias={V: 1.0})), ValueError, r"Sampling.logit_bias = 50.*below the vocabulary"),
        (dict(sampling=Sampling(), request_ids=[1, 2]), ValueError, "request_ids has 2 entries for 1 prompts"),
        (dict(sampling=Sampling(), request_ids=[-1]), ValueError, "request_ids must be at least 0"),
        (dict(sampling=Sampling(), request_ids=[2**31]), ValueError, r"request_ids must be below 2\^31"),
        (dict(sampling=Sampling(), request_ids=["a"]), TypeError, "request_ids must be an int"),
    ],
)
def test_bad_arguments(tiny, options, error, words):
    for call in (generate, stream):
        with pytest.raises(error, match=words):
            call(*tiny, [[1]], **options)


def test_B17_everything_banned_loses_nothing(tiny):
    sampling = [Sampling(temperature=1.0), Sampling(banned_tokens=range(V), forced_tokens={0: 3}), Sampling()]
    with pytest.raises(BadLogitsError, match=r"prompts\[1\], token 1 of the response") as caught:
        decode(tiny, PROMPTS[:3], sampling=sampling, drafter="trie", rows=3)
    assert caught.value.generation.tokens[1] == [3]
