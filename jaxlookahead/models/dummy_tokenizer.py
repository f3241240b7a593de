"""A tokenizer of characters that fits `tiny_decoder`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))


class TinyTokenizer:
    """One token for each of 96 characters: newline and printable ASCII; others become `?`.

    It has as much of the interface of `transformers`' tokenizers as decoding and the commands use.
    """

    chat_template: str | None = "user: ...\nassistant: "
    eos_token_id: int | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        del add_special_tokens
        unknown = _CHARACTERS.index("?")
        return [place if (place := _CHARACTERS.find(c)) >= 0 else unknown for c in text]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        del skip_special_tokens
        return "".join(_CHARACTERS[int(i)] for i in ids)

    def get_vocab(self) -> dict[str, int]:
        """The id of each token."""
        return {c: i for i, c in enumerate(_CHARACTERS)}

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], tokenize: bool = False, add_generation_prompt: bool = True
    ) -> Any:
        """A conversation as text, or as token ids."""
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        text += "assistant: " if add_generation_prompt else ""
        return self.encode(text) if tokenize else text
