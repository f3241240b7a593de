"""Shared by the sampling tests: compiled functions of one shape, and slow references in numpy."""

import functools

import jax
import numpy as np

from jaxlookahead.sampling import Sampling, decide, init_context, pack, process

V, L, EOS = 24, 20, 2


@functools.partial(jax.jit, static_argnames=("processors", "constraint"))
def run_process(arrays, history, prompt_length, length, logits, processors=(), constraint=None):
    context = init_context(arrays, history, prompt_length, length)
    return process(arrays, context, logits, processors=processors, constraint=constraint)


@functools.partial(jax.jit, static_argnames=("processors", "constraint"))
def run_decide(arrays, history, prompt_length, length, logits, processors=(), constraint=None):
    context = init_context(arrays, history, prompt_length, length)
    return decide(arrays, context, logits, processors=processors, constraint=constraint)


def rows(samplings, requests=None, vocab_size=V, **kwargs):
    requests = range(len(samplings)) if requests is None else requests
    return pack(samplings, requests=list(requests), vocab_size=vocab_size, eos_ids=[EOS], **kwargs)


def padded(histories, width=L):
    out = np.full((len(histories), width), 7, np.int32)  # 7 is a real token: padding must not be read
    for row, history in enumerate(histories):
        out[row, : len(history)] = history
    return out


def processed(sampling, prompt, output, logits, **kwargs):
    """The processed logits of one row."""
    arrays = rows([sampling], vocab_size=len(logits))
    history = padded([[*prompt, *output]])
    lengths = np.array([len(prompt)]), np.array([len(prompt) + len(output)])
    return np.asarray(run_process(arrays, history, *lengths, np.array([logits], np.float32), **kwargs))[0]


def softmax(x):
    x = np.asarray(x, np.float64)
    with np.errstate(invalid="ignore"):
        e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def reference_processors(s: Sampling, prompt, output, logits):
    """All processors before temperature, as loops over the definitions."""
    x = np.array(logits, np.float64)
    history = [*prompt, *output]
    for token, value in s.logit_bias.items():
        x[token] += value
    for token in set(history):
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    for token in set(output):
        x[token] -= s.frequency_penalty * output.count(token) + s.presence_penalty
    n = s.no_repeat_ngram
    if n:
        seen = {tuple(history[i : i + n]) for i in range(len(history) - n + 1)}
        for token in range(len(x)):
            if len(history) >= n - 1 and tuple([*history, token][-n:]) in seen:
                x[token] = -np.inf
    for sequence in [*((token,) for token in s.banned_tokens), *s.banned_sequences]:
        body = list(sequence[:-1])
        if not body or (len(history) >= len(body) and history[-len(body) :] == body):
            x[sequence[-1]] = -np.inf
    if len(output) < s.min_new_tokens:
        x[EOS] = -np.inf
    if len(output) in s.forced_tokens:
        x[:] = -np.inf
        x[s.forced_tokens[len(output)]] = 0
    return x


def reference_filters(s: Sampling, logits):
    """Temperature and filters by sorting; returns logits and whether each token's fate is beyond rounding."""
    x = np.float32(logits) / np.float32(s.temperature)
    sure = np.ones(x.shape, bool)
    if s.top_k:
        kth = np.sort(x)[::-1][min(s.top_k, len(x)) - 1]
        x = np.where(x >= kth, x, -np.inf)
    if s.top_p < 1:
        p = softmax(x)
        upto = np.array([p[x <= value].sum() for value in x])
        keep = (upto > 1 - s.top_p) | (x == x.max())
        sure &= (abs(upto - (1 - s.top_p)) > 1e-6) | (x == x.max()) | (x == -np.inf)
        x = np.where(keep, x, -np.inf)
    if s.min_p:
        ratio = np.exp(x.astype(np.float64) - x.max())
        sure &= (abs(ratio / s.min_p - 1) > 1e-5) | (x == x.max())
        x = np.where((ratio >= s.min_p) | (x == x.max()), x, -np.inf)
    return x, sure
