"""Trees, plots and the recorder that feeds them."""

from __future__ import annotations

import io
import warnings

import hypothesis
import hypothesis.strategies as st
import matplotlib.figure
import pytest
from rich.console import Console

from jaxlookahead import Draft, TrieDrafter, generate
from jaxlookahead.results import Stats
from jaxlookahead.show import Recorder, Step, plot_acceptance, plot_run, plot_stats, plot_tree, text_tree
from jaxlookahead.show.trees import _layout

DRAFT = Draft(
    tokens=[ord("a"), ord("$"), 10, 0xE4, ord("b")],
    parents=[-1, 0, 0, 1, -1],
    probs=[0.9, 0.5, 0.25, 0.125, 0.1],
    sources=["request", "shared", "shared", "request", "[red]x"],
)


@pytest.fixture(scope="module")
def recorded(tiny):
    """A recorder after two requests, and the run's statistics."""
    recorder = Recorder(TrieDrafter(labels=True))
    result = generate(*tiny, [[1, 2, 3, 1, 2, 3, 1], [4, 5]] * 2, max_new_tokens=24, drafter=recorder, rows=2, width=4)
    return recorder, result


def rendered(tree) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(tree)
    return console.file.getvalue()


def test_a_tree_as_text(byte_tokenizer):
    lines = rendered(text_tree(DRAFT, byte_tokenizer, accepted=[0, 1], root=ord("z"))).splitlines()
    assert [line.strip(" │├└─") for line in lines] == [
        "z",
        "a  0.90  request",
        "$  0.50  shared",
        "#228  0.12  request",
        "\u240a  0.25  shared",
        "b  0.10  [red]x",
    ]
    assert rendered(text_tree(Draft(), byte_tokenizer)) == "(newest token)\n"


@st.composite
def drafts(draw):
    size = draw(st.integers(0, 12))
    return Draft(tokens=[0] * size, parents=[draw(st.integers(-1, i - 1)) for i in range(size)])


@hypothesis.given(drafts())
def test_no_two_nodes_of_a_drawn_tree_lie_on_each_other(draft):
    places = _layout(draft)
    assert len(set(places)) == len(places)
    for (x, y), parent in zip(places, draft.parents, strict=True):
        above = places[parent] if parent >= 0 else (0.0, 0.0)
        assert x == above[0] + 1 and y >= above[1]


def test_trees_are_drawn_without_warnings(byte_tokenizer, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_tree(DRAFT, byte_tokenizer, accepted=[0, 1], root=ord("z"), path=tmp_path / "tree.png")
        plot_tree(Draft(), byte_tokenizer, path=tmp_path / "empty.svg")
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "empty.svg").read_bytes()


def test_the_recorder_changes_nothing_and_keeps_every_step(tiny, recorded):
    recorder, result = recorded
    prompts = [[1, 2, 3, 1, 2, 3, 1], [4, 5]] * 2
    alone = generate(*tiny, prompts, max_new_tokens=24, drafter=None, rows=2)
    assert result.tokens == alone.tokens
    assert len(recorder.steps) == result.stats.row_steps
    assert sum(len(step.draft) for step in recorder.steps) == result.stats.drafted
    assert sum(len(step.accepted) for step in recorder.steps) == result.stats.accepted
    for request, output in enumerate(result):
        steps = [step for step in recorder.steps if step.request == request]
        assert [token for step in steps for token in step.tokens] == output.tokens.tolist()
        assert [step.root for step in steps] == [prompts[request][-1], *(step.tokens[-1] for step in steps[:-1])]
    for step in recorder.steps:
        assert [step.draft.tokens[i] for i in step.accepted] == step.tokens[: len(step.accepted)]
        assert [step.depths()[i] for i in step.accepted] == list(range(1, len(step.accepted) + 1))
    assert recorder.stats()["tokens"] > 0  # the drafter's own


def test_the_recorder_stops_at_its_limit_and_refuses_no_drafter(tiny):
    recorder = Recorder("prompt_lookup", max_steps=3)
    generate(*tiny, [[1, 2, 3, 1, 2, 3, 1], [4, 5]] * 2, max_new_tokens=24, drafter=recorder, rows=2, width=4)
    assert len(recorder.steps) == 3
    with pytest.raises(ValueError, match="nothing"):
        Recorder(None)


def test_plots_are_saved(recorded, tmp_path):
    recorder, result = recorded
    plot_stats(result.stats, path=tmp_path / "stats.png")
    plot_acceptance(recorder.steps, path=tmp_path / "acceptance.pdf")
    plot_run(recorder.steps, path=tmp_path / "run.png")
    plot_stats(Stats(), path=tmp_path / "no_stats.png")
    plot_acceptance([], path=tmp_path / "no_acceptance.png")
    plot_run([], path=tmp_path / "no_run.png")
    assert all(path.stat().st_size > 1000 for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 6


def test_notebooks_display_figures_by_themselves(recorded):
    figure = plot_stats(recorded[1].stats)
    assert isinstance(figure, matplotlib.figure.Figure)
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_picture_shows_the_numbers(recorded):
    recorder, result = recorded
    bars = plot_stats(result.stats).axes[0].patches
    assert [bar.get_height() for bar in bars] == result.stats.histogram
    depths = [depth for step in recorder.steps for depth in step.depths()]
    assert len(plot_acceptance(recorder.steps).axes[0].patches) == len(set(depths))


def test_speed_is_that_of_the_steps_between_two_points():
    steps = [Step(0, 1, Draft(), [], [5] * (1 + i % 2), seconds) for i, seconds in enumerate([1.0, 2.0, 4.0, 4.0, 5.0])]
    _, speed, warmth = plot_run(steps).axes
    assert speed.lines[0].get_xydata().tolist() == [[1, 2.0], [2, 0.5], [4, 1.0]]
    assert warmth.lines[0].get_xydata().tolist() == [[0, 7 / 5]]


def test_statistics_are_readable(recorded):
    stats = recorded[1].stats
    text = str(stats)
    assert f"{stats.tokens_per_call:.2f}" in text and f"{stats.accepted} accepted" in text
    assert "tokens per call" in str(Stats())
    assert stats._repr_html_() == f"<pre>{text}</pre>"
