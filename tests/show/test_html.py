from __future__ import annotations

import html.parser
import io

import hypothesis
import hypothesis.strategies as st
import pytest
from rich.console import Console

from jaxlookahead.results import Generation, Stats
from jaxlookahead.show import printable, show

NASTY = [
    "<script>alert(1)</script>",
    "\"'&amp;</span></div>",
    "\x1b[2J\x1b]0;title\x07",
    "שלום \u202e abc",
    "a\x00b\r\n\tc",
    "$x_1$ [bold]no markup[/bold] :smile:",
]


class Reader(html.parser.HTMLParser):
    """Collects text, tags and titles."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.text, self.tags, self.titles = "", [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.titles += [value for name, value in attrs if name == "title"]

    def handle_data(self, data):
        self.text += data


def read(shown) -> Reader:
    reader = Reader()
    reader.feed(shown._repr_html_())
    reader.close()
    return reader


@hypothesis.given(st.one_of(st.sampled_from(NASTY).map(str.encode), st.binary(max_size=20)), st.text(max_size=8))
def test_no_token_and_no_source_gets_out_of_its_place(byte_tokenizer, make_output, data, source):
    tokens = list(data)
    reader = read(show(make_output(tokens, [source, *[None] * len(tokens)][: len(tokens)]), byte_tokenizer))
    assert set(reader.tags) == {"div", "span"} if tokens else {"div"}
    assert reader.tags.count("span") == len(tokens)
    assert reader.text.startswith(printable(byte_tokenizer.decode(tokens)))


def test_hovering_tells_the_probability_where_it_is_known(byte_tokenizer, make_output):
    with_scores = make_output(list(b"ab"), [None, "request"], logprobs=[-0.6931472, 0.0])
    assert read(show(with_scores, byte_tokenizer)).titles == [
        "token 97, probability 0.5",
        "token 98, drafted from request, probability 1",
    ]
    assert read(show(make_output([97]), byte_tokenizer)).titles == ["token 97, margin 0.5"]


@pytest.mark.parametrize("text", NASTY)
def test_terminals_get_text_only(byte_tokenizer, make_output, text):
    shown = show(make_output(list(text.encode()), ["shared"] * len(text.encode())), byte_tokenizer)
    console = Console(file=io.StringIO(), force_terminal=True, width=200, color_system="truecolor")
    console.print(shown, soft_wrap=True)
    written = console.file.getvalue()
    # Nothing but colours: every escape sequence is `ESC [ numbers m`.
    assert all(part.split("m")[0].replace(";", "").isdigit() for part in written.split("\x1b[")[1:])
    assert written.count("\x1b") == written.count("\x1b[")
    plain = repr(shown)
    assert "\x1b" not in plain and "shared" in plain


def test_show_takes_a_run_of_one_response(byte_tokenizer, make_output):
    output = make_output([97])
    assert show(Generation([output], Stats()), byte_tokenizer).output is output
    with pytest.raises(ValueError, match="2 responses"):
        show(Generation([output, output], Stats()), byte_tokenizer)


def test_an_empty_response_is_shown(byte_tokenizer, make_output):
    assert "0 tokens" in read(show(make_output([]), byte_tokenizer)).text
