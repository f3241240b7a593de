from __future__ import annotations

import unicodedata

import hypothesis
import hypothesis.strategies as st

from jaxlookahead.show import Detokenizer, coloured, pieces, printable
from jaxlookahead.show.text import label

IDS = st.lists(st.integers(0, 260), max_size=24)


@hypothesis.given(IDS)
@hypothesis.example([0xE2, 0x82, 0xAC])  # a character of three tokens
@hypothesis.example([0xFF, 0xFE, ord("a"), 0xC3])  # no UTF-8, and half a character at the end
@hypothesis.example([0xEF, 0xBF, 0xBD, ord("a")])  # U+FFFD itself
@hypothesis.example([260, 258, 258])
def test_pieces_join_to_the_text_of_all_tokens(byte_tokenizer, ids):
    found = pieces(byte_tokenizer, ids)
    assert len(found) == len(ids)
    assert "".join(found) == byte_tokenizer.decode(ids)


@hypothesis.given(st.text(max_size=12))
def test_pieces_of_text_are_its_characters(byte_tokenizer, text):
    ids = byte_tokenizer.encode(text).ids
    assert "".join(pieces(byte_tokenizer, ids)) == byte_tokenizer.decode(ids)


def test_a_split_character_goes_to_its_last_token(byte_tokenizer):
    ids = [ord("x"), *"€".encode(), ord("y")]
    assert pieces(byte_tokenizer, ids) == ["x", "", "", "€", "y"]


def test_leading_spaces_are_kept_where_a_tokenizer_drops_them_at_the_beginning():
    from tokenizers import Tokenizer, decoders, models

    words = {"\u2581one": 0, "\u2581two": 1, "s": 2, "\u2581": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="s"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    assert pieces(tokenizer, [0, 1, 2, 3, 1]) == ["one", " two", "s", " ", " two"]


class Rewriting:
    """Removes a space that it has already given out, as clean-ups of tokenization do."""

    def decode(self, ids):
        return "".join(["a", " ", ".", "\ufffd"][i] for i in ids).replace(" .", ".")


@hypothesis.given(st.lists(st.integers(0, 3), max_size=12))
def test_pieces_join_for_a_tokenizer_that_rewrites_what_it_decoded(ids):
    found = pieces(Rewriting(), ids)
    assert len(found) == len(ids)
    assert "".join(found) == Rewriting().decode(ids)


@hypothesis.given(IDS)
def test_the_detokenizer_gives_the_text_in_parts(byte_tokenizer, ids):
    detokenizer = Detokenizer(byte_tokenizer)
    text = "".join(detokenizer.add(token) for token in ids)
    assert text + detokenizer.finish() == byte_tokenizer.decode(ids)


@hypothesis.given(st.text(st.characters(), max_size=20))
def test_printable_leaves_nothing_that_steers_a_terminal(text):
    shown = printable(text)
    assert len(shown) == len(text)
    for c in shown:
        assert c in "\n\t\u200c\u200d" or unicodedata.category(c) not in ("Cc", "Cf", "Cs")
    assert printable(shown) == shown


def test_printable_keeps_letters_of_any_script():
    text = "שלום العربية 中文 é \U0001f469\u200d\U0001f680"
    assert printable(text) == text
    assert printable("\x1b[31m\x00\x7f\u202e\x9b\ud800") == "\u241b[31m\u2400\u2421\ufffd\ufffd\ufffd"


def test_coloured_marks_drafted_tokens_by_source(byte_tokenizer, make_output):
    output = make_output(list(b"ab\x1bc"), [None, "request", "shared", None])
    text = coloured(output, byte_tokenizer)
    assert text.plain == "ab\u241bc"
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans] == [
        ("b", "bold green"),
        ("\u241b", "bold cyan"),
    ]


def test_a_label_is_one_visible_line(byte_tokenizer):
    assert [label(byte_tokenizer, token) for token in (ord("a"), 10, 32, 258, 0xFF)] == [
        "a",
        "\u240a",
        "\u2423",
        "\u2423a",
        "#255",
    ]
