from pathlib import Path

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from jaxlookahead.checkpoints.tokenizer import chat_ids, eos_ids, from_directory, from_gguf

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@pytest.fixture
def metadata():
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3, 3] + [1] * (len(tokens) - 2), np.int32),
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": TEMPLATE,
    }


def test_chat_template_and_roles(metadata):
    tokenizer = from_gguf(Path("x.gguf"), metadata)
    ids = chat_ids(tokenizer, [{"role": "user", "content": "he said: hi ,  ok ."}])
    assert tokenizer.decode(ids) == "<s>user\nhe said: hi ,  ok .</s><s>assistant\n"
    assert ids.count(0) == 2 and ids.count(1) == 1
    assert (tokenizer.bos_token, tokenizer.eos_token_id) == ("<s>", 1)


def test_directory_gives_the_same_tokenizer(metadata, tmp_path):
    tokenizer = from_gguf(Path("x.gguf"), metadata)
    tokenizer.save_pretrained(tmp_path)
    again = from_directory(tmp_path)
    messages = [{"role": "user", "content": "the  40 héros"}]
    assert chat_ids(again, messages) == chat_ids(tokenizer, messages)
    assert eos_ids(again) == (1,)


def test_no_chat_template(metadata):
    del metadata["tokenizer.chat_template"]
    with pytest.raises(ValueError, match="no chat template: encode plain text"):
        chat_ids(from_gguf(Path("x.gguf"), metadata), [{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        (({"eos_token_id": [7, 3]}, {"eos_token_id": 9}), (1, 3, 7)),
        ((None, {"eos_token_id": 9}), (1, 9)),
        (({}, {}), (1,)),
        (({"eos_token_id": 1},), (1,)),
    ],
)
def test_eos_ids(metadata, configs, expected):
    assert eos_ids(from_gguf(Path("x.gguf"), metadata), *configs) == expected


def test_eos_ids_without_a_tokenizer():
    assert eos_ids(None, {"eos_token_id": 4}) == (4,)
    assert eos_ids(None) == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.tokens": None}, r"x\.gguf holds no tokenizer.*tokenizer=None"),
        ({"tokenizer.ggml.pre": "chameleon"}, r"x\.gguf: tokenizer\.ggml\.pre 'chameleon'.*pass tokenizer="),
        ({"tokenizer.ggml.merges": ["x nothing"]}, r"x\.gguf: the tokenizer is damaged"),
        ({"tokenizer.ggml.merges": ["lonely"]}, r"x\.gguf: "),
    ],
)
def test_unusable_metadata_names_file_and_remedy(metadata, change, message):
    with pytest.raises(ValueError, match=message):
        from_gguf(Path("x.gguf"), metadata | change)


def test_damaged_tokenizer_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ValueError, match=r"can't be read.*pass tokenizer="):
        from_directory(tmp_path)


def test_empty_directory(tmp_path):
    with pytest.raises(ValueError, match=r"holds no tokenizer.*tokenizer=None"):
        from_directory(tmp_path)
