"""Memory layouts on TPU."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

TPU_LANES = 128

_on_one_device = contextvars.ContextVar("on_one_device", default=False)


@contextlib.contextmanager
def on_one_device(really: bool = True) -> Iterator[None]:
    """What is traced inside runs on a single device: `as_it_lies` has an effect.

    XLA does not know how to divide a layout constraint among devices: it would gather the whole array on each.
    """
    token = _on_one_device.set(really)
    try:
        yield
    finally:
        _on_one_device.reset(token)


def one_device() -> bool:
    """Whether this is inside `on_one_device`."""
    return _on_one_device.get()


def lies_swapped(x: jax.Array) -> bool:
    """Whether TPUs hold an array with its last two axes swapped: the last leaves lanes empty, the other fills them."""
    return x.ndim > 1 and x.shape[-1] % TPU_LANES != 0 and x.shape[-2] % TPU_LANES == 0


def as_it_lies(x: jax.Array, whole: jax.Array | None = None) -> jax.Array:
    """Keeps an array in the layout in which TPUs hold it, or hold `whole`, that it is a part of.

    XLA prefers another one for reads and writes at an unknown place of the last axis. It gives that to the whole array
    and copies it, and for what is written in place copies it back, in every call. Only inside `on_one_device`.
    """
    order = list(range(x.ndim))
    if lies_swapped(x if whole is None else whole):
        order[-2:] = order[-1], order[-2]

    def keep(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, Layout(tuple(order)))

    return lax.platform_dependent(x, tpu=keep, default=lambda x: x) if one_device() else x
