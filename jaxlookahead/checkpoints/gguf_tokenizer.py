"""Tokenizers from the vocabulary, merges and scores of GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# `tokenizer.ggml.pre`: the patterns that split text one after the other, before any merge.
_SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "gpt2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
}
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_NFC_NAMES = ("qwen2", "deepseek-r1-qwen")
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5


def backend(metadata: Mapping[str, Any]) -> Any:
    """Builds a `tokenizers.Tokenizer`.

    Raises:
      ValueError: the kind of vocabulary or the way text is split is not supported, named.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(metadata)
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(metadata), True
    else:
        raise ValueError(f"tokenizer.ggml.model {kind!r} is not supported; supported: gpt2, llama")
    _add_marked_tokens(tokenizer, metadata)
    before = _added(metadata, "bos", adds_bos)
    after = _added(metadata, "eos", False)
    if before or after:
        from tokenizers import processors

        single = [*before, "$A", *after]
        pair = [*single, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)]
        template = processors.TemplateProcessing(
            single=single,
            pair=pair,
            special_tokens=[(t, tokenizer.token_to_id(t)) for t in {*before, *after}],
        )
        ours = [tokenizer.post_processor, template] if tokenizer.post_processor else [template]
        tokenizer.post_processor = processors.Sequence(ours)
    return tokenizer


def _added(metadata: Mapping[str, Any], role: str, default: bool) -> list[str]:
    """The token that goes before or after every text, if there is one."""
    if not metadata.get(f"tokenizer.ggml.add_{role}_token", default):
        return []
    token = special_tokens(metadata).get(f"{role}_token")
    if token is None:
        raise ValueError(f"tokenizer.ggml.{role}_token_id is missing, but texts get that token")
    return [token]


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The tokens with a role (`bos_token`, ...), by role, as `PreTrainedTokenizerFast` takes them.

    Raises:
      ValueError: an id is outside the vocabulary.
    """
    roles = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    tokens = metadata["tokenizer.ggml.tokens"]
    found = {}
    for role, name in roles.items():
        index = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if index is None:
            continue
        if not 0 <= index < len(tokens):
            raise ValueError(f"tokenizer.ggml.{role}_token_id {index} is outside the vocabulary of {len(tokens)}")
        found[name] = tokens[index]
    return found


def eos_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Ids of the tokens that end a sequence, a turn or a message."""
    ids = (metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom"))
    return [index for index in ids if isinstance(index, int)]


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    tokens, types = metadata["tokenizer.ggml.tokens"], _types(metadata)
    return {token: index for index, token in enumerate(tokens) if types[index] != _UNUSED}


def _types(metadata: Mapping[str, Any]) -> list[int]:
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type")
    types = [1] * len(tokens) if types is None else types.tolist()
    if len(types) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    return types


def _byte_level(metadata: Mapping[str, Any]) -> tuple[Any, bool]:
    """Byte-level BPE, and whether it puts a BOS in front where the file doesn't say."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    name = metadata.get("tokenizer.ggml.pre")
    if name not in _SPLITS:
        raise ValueError(f"tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(sorted(_SPLITS))}")
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", ())]
    llama3 = name in _LLAMA3_NAMES
    model = models.BPE(vocab=_vocabulary(metadata), merges=merges, ignore_merges=llama3)
    tokenizer = Tokenizer(model)
    if name in _NFC_NAMES:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _SPLITS[name]]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer, llama3


def _sentencepiece(metadata: Mapping[str, Any]) -> Any:
    """BPE of SentencePiece: spaces are part of the pieces, characters not in the vocabulary become bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = metadata.get("tokenizer.ggml.scores")
    tokens = metadata["tokenizer.ggml.tokens"]
    if scores is None or len(scores) != len(tokens):
        raise ValueError("tokenizer.ggml.model 'llama' needs one tokenizer.ggml.scores entry a token")
    types = _types(metadata)
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    merges = _merges_of_scores(tokens, scores.tolist(), types)
    tokenizer = Tokenizer(
        models.BPE(vocab=_vocabulary(metadata), merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_of_scores(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, best score first: the order in which SentencePiece merges."""
    pieces = {token: i for i, token in enumerate(tokens) if types[i] in (1, _USER_DEFINED, _UNUSED)}
    found = []
    for token, index in pieces.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces and types[index] == 1:
                found.append((-scores[index], index, pieces[left], pieces[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _add_marked_tokens(tokenizer: Any, metadata: Mapping[str, Any]) -> None:
    from tokenizers import AddedToken

    for token, kind in zip(metadata["tokenizer.ggml.tokens"], _types(metadata), strict=True):
        if kind in (_CONTROL, _UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
