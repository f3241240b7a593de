import json

import numpy as np
import pytest
from tokenizers import SentencePieceBPETokenizer, Tokenizer, models, pre_tokenizers, trainers

from jaxlookahead.checkpoints.gguf_tokenizer import backend, eos_token_ids, special_tokens

TEXTS = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "Numbers: 1 22 333 4444 and 3.14159; they'll be split, I'd say.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1,  2))\n",
    "naïve café — 東京 and emoji 🙂🙃",
]


def pieces(tokenizer, text):
    """What the text is split into before merges, as text."""
    return [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def byte_level_metadata(pre, **more):
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|end|>", "<|start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    trained.train_from_iterator(TEXTS * 3, trainer)
    state = json.loads(trained.to_str())
    vocab = state["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in state["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "<tool>", "[PAD0]"],
        "tokenizer.ggml.token_type": np.array([3, 3] + [1] * (len(tokens) - 2) + [4, 5], np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
    } | more


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "a  40 it's", ["a", " ", " 40", " it", "'s"]),
        ("smollm", "a  40 it's", ["a", "  ", "4", "0", " it", "'s"]),
        ("llama-bpe", "a  12345 IT'S\n\n x", ["a", " ", " ", "123", "45", " IT", "'S", "\n\n", " x"]),
        ("qwen2", "a  123 IT'S\n\n x", ["a", " ", " ", "1", "2", "3", " IT", "'S", "\n\n", " x"]),
    ],
)
def test_text_is_split_as_the_vocabulary_was_trained(pre, text, expected):
    assert pieces(backend(byte_level_metadata(pre)), text) == expected


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_round_trip(pre):
    tokenizer = backend(byte_level_metadata(pre))
    for text in [*TEXTS, "\x00\t \u200f ‏שלום  \r\n"]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text
        assert len(ids) < len(text.encode()) or text not in TEXTS


def test_marked_tokens_stay_whole_and_unused_ones_are_left_out():
    metadata = byte_level_metadata("gpt-2")
    tokenizer = backend(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = tokenizer.encode("<|start|>the<tool>", add_special_tokens=False).ids
    assert ids[0] == 1 and ids[-1] == tokens.index("<tool>")
    assert tokenizer.decode(ids) == "the<tool>"
    assert tokenizer.token_to_id("[PAD0]") is None


@pytest.mark.parametrize(
    ("pre", "more", "starts", "ends"),
    [
        ("gpt-2", {}, False, False),
        ("llama-bpe", {}, True, False),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, False, False),
        ("qwen2", {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, True, True),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(pre, more, starts, ends):
    tokenizer = backend(byte_level_metadata(pre, **more))
    bare = tokenizer.encode("the fox", add_special_tokens=False).ids
    assert tokenizer.encode("the fox").ids == [1] * starts + bare + [0] * ends


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tokenizer.ggml.pre": "default"},
            "tokenizer.ggml.pre 'default' is not supported; supported: .*smollm",
        ),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre None"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model 'bert' is not supported"),
        ({"tokenizer.ggml.token_type": np.ones(3, np.int32)}, "token_type has 3 entries"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "bos_token_id"),
    ],
)
def test_what_is_not_supported_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        backend(byte_level_metadata("gpt-2", **change))


def test_roles():
    metadata = byte_level_metadata("gpt-2", **{"tokenizer.ggml.eot_token_id": 5})
    assert special_tokens(metadata) == {"eos_token": "<|end|>", "bos_token": "<|start|>"}
    assert eos_token_ids(metadata) == [0, 5]
    metadata["tokenizer.ggml.eos_token_id"] = 9999
    with pytest.raises(ValueError, match="eos_token_id 9999 is outside the vocabulary"):
        special_tokens(metadata)


@pytest.fixture(scope="module")
def sentencepiece():
    """A trained SentencePiece-like BPE, and the metadata that llama.cpp's converter would write for it."""
    trained = SentencePieceBPETokenizer()
    trained.train_from_iterator(
        TEXTS[:3] * 3, vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    vocab = trained.get_vocab()
    learned = sorted(vocab, key=vocab.get)[3:]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned]
    return trained, {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([0.0] * 259 + [-float(i) for i in range(len(learned))], np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(learned), np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def test_sentencepiece_merges_as_it_was_trained(sentencepiece):
    trained, metadata = sentencepiece
    tokenizer = backend(metadata)
    for text in [
        "The lazy dog jumps again",
        "they'll split numbers 22 333",
        "return add(a, b)",
        "unseen words too",
    ]:
        expected = trained.encode(text).tokens
        assert tokenizer.encode(text).tokens == ["<s>", *expected]
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_sentencepiece_falls_back_to_bytes(sentencepiece):
    tokenizer = backend(sentencepiece[1])
    encoded = tokenizer.encode("dog 🙂")
    assert encoded.tokens[-4:] == ["<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]
    assert tokenizer.decode(encoded.ids) == "dog 🙂"


def test_sentencepiece_without_scores(sentencepiece):
    metadata = {**sentencepiece[1], "tokenizer.ggml.scores": None}
    with pytest.raises(ValueError, match=r"needs one tokenizer\.ggml\.scores entry"):
        backend(metadata)
