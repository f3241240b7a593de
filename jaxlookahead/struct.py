"""Dataclasses that are pytrees, as type checkers see them."""

from __future__ import annotations

from typing import TypeVar, cast, dataclass_transform

import chex

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def struct(cls: type[T]) -> type[T]:
    """A frozen `chex.dataclass`: a pytree of its fields, made with keywords only.

    Type checkers do not know that `chex.dataclass` makes dataclasses.
    """
    return cast(type[T], chex.dataclass(frozen=True)(cls))
