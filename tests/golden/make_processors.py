"""Writes `processors.npz`: logits as the processors of `transformers` change them, in its own order.

Needs torch and transformers (made with torch 2.13.0 and transformers 5.24.0); the tests need neither:

    python tests/golden/make_processors.py
"""

from __future__ import annotations

import itertools
import json
import pathlib

import numpy as np
import torch
import transformers

V, EOS, ROWS = 48, 2, 4

SINGLE = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.3, "top_k": 100},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.3},
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.8, "min_p": 0.3},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"logit_bias": {"3": 2.5, "7": -1.5, "2": 4.0}},
    {"banned_tokens": [1, 5, 9]},
    {"banned_sequences": [[0, 1], [1, 2, 3], [2, 2], [4, 0, 1, 2, 3], [3]]},
    {"no_repeat_ngram": 1},
    {"no_repeat_ngram": 2},
    {"no_repeat_ngram": 3},
    {"no_repeat_ngram": 4},
    {"min_new_tokens": 6},
]
COMBINED = [
    {"temperature": 0.7, "top_k": 12, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 1.5, "top_p": 0.9, "repetition_penalty": 1.3, "logit_bias": {"1": 3.0, "0": -2.0}},
    {"temperature": 0.9, "top_k": 8, "no_repeat_ngram": 2, "banned_tokens": [4], "min_new_tokens": 20},
    {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "logit_bias": {"0": 1.0, "1": 1.0, "2": 2.0, "3": 1.0},
        "banned_tokens": [6],
        "banned_sequences": [[0, 1], [3, 3]],
        "no_repeat_ngram": 3,
        "min_new_tokens": 5,
    },
]


def generation_config(settings: dict) -> transformers.GenerationConfig:
    """Translates settings of `Sampling` to those of `generate`."""
    bad_words = [[token] for token in settings.get("banned_tokens", [])] + settings.get("banned_sequences", [])
    bias = [[[int(token)], value] for token, value in settings.get("logit_bias", {}).items()]
    sampled = "temperature" in settings
    return transformers.GenerationConfig(
        do_sample=sampled,
        temperature=settings.get("temperature", 1.0) if sampled else None,
        top_k=settings.get("top_k", 0) if sampled else None,
        top_p=settings.get("top_p", 1.0) if sampled else None,
        min_p=settings.get("min_p"),
        repetition_penalty=settings.get("repetition_penalty", 1.0),
        sequence_bias=bias or None,
        bad_words_ids=bad_words or None,
        no_repeat_ngram_size=settings.get("no_repeat_ngram", 0),
        min_new_tokens=settings.get("min_new_tokens"),
        eos_token_id=EOS,
        pad_token_id=0,
    )


def main() -> None:
    """Runs every setting on a few random rows."""
    rng = np.random.default_rng(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=V,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    cases = []
    for settings, row in itertools.product(SINGLE + COMBINED, range(ROWS)):
        prompt_length, output_length = int(rng.integers(1, 8)), int(rng.integers(0, 12))
        # Few distinct tokens, so that the n-gram rules have something to do.
        history = rng.integers(0, 5 if row % 2 else V, prompt_length + output_length)
        cases.append((settings, prompt_length, history, rng.normal(size=V).astype(np.float32) * 3))
    longest = max(len(history) for _, _, history, _ in cases)
    histories = np.zeros((len(cases), longest), np.int32)
    outputs = np.zeros((len(cases), V), np.float32)
    for i, (settings, prompt_length, history, logits) in enumerate(cases):
        histories[i, : len(history)] = history
        config = generation_config(settings)
        model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device="cpu")
        processors = model._get_logits_processor(
            generation_config=config, input_ids_seq_length=prompt_length, device="cpu"
        )
        outputs[i] = processors(torch.tensor(history[None]), torch.tensor(logits[None]))[0].numpy()
    path = pathlib.Path(__file__).with_name("processors.npz")
    np.savez_compressed(
        path,
        settings=np.array([json.dumps(settings) for settings, *_ in cases]),
        histories=histories,
        prompt_lengths=np.array([length for _, length, _, _ in cases], np.int32),
        lengths=np.array([len(history) for _, _, history, _ in cases], np.int32),
        logits=np.stack([logits for *_, logits in cases]),
        outputs=outputs,
        versions=np.array([torch.__version__, transformers.__version__]),
    )
    print(f"{path}: {len(cases)} cases, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
