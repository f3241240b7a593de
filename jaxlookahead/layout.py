"""Memory layouts on TPU."""

from __future__ import annotations

import jax
from jax.experimental.layout import Layout, with_layout_constraint

TPU_LANES = 128


def lies_swapped(x: jax.Array) -> bool:
    """Whether TPUs hold an array with its last two axes swapped: the last leaves lanes empty, the other fills them."""
    return x.ndim > 1 and x.shape[-1] % TPU_LANES != 0 and x.shape[-2] % TPU_LANES == 0


def as_it_lies(x: jax.Array, whole: jax.Array | None = None) -> jax.Array:
    """Keeps an array in the layout in which TPUs hold it, or hold `whole`, that it is a part of. For TPUs alone.

    XLA prefers another one for reads and writes at an unknown place of the last axis. It gives that to the whole array
    and copies it, and for what is written in place copies it back, in every call.
    """
    order = list(range(x.ndim))
    if lies_swapped(x if whole is None else whole):
        order[-2:] = order[-1], order[-2]
    return with_layout_constraint(x, Layout(tuple(order)))
