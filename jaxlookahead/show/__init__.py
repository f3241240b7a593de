"""Pictures of what drafting did: responses in colour, draft trees, plots. For terminals and notebooks."""

from jaxlookahead.show.html import Shown, show
from jaxlookahead.show.plots import new_figure, plot_acceptance, plot_run, plot_stats
from jaxlookahead.show.record import Recorder, Step
from jaxlookahead.show.text import Detokenizer, coloured, pieces, printable, styles
from jaxlookahead.show.trees import plot_tree, text_tree

__all__ = [
    "Detokenizer",
    "Recorder",
    "Shown",
    "Step",
    "coloured",
    "new_figure",
    "pieces",
    "plot_acceptance",
    "plot_run",
    "plot_stats",
    "plot_tree",
    "printable",
    "show",
    "styles",
    "text_tree",
]
