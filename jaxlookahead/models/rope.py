"""Rotary position embedding and its scalings (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

KINDS = ("default", "linear", "llama3", "yarn")

_FIELDS = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_length",
    },
    "yarn": {
        "factor": "factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "truncate": "truncate",
        "original_max_position_embeddings": "original_length",
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """How positions turn into rotation angles.

    Attributes:
      theta: base of the wavelengths, `theta ** (2 i / H)`.
      kind: one of `default`, `linear` (positions divided by `factor`), `llama3` (long wavelengths divided by
        `factor`, short ones kept, a ramp between), `yarn` (the same by number of rotations, and a factor on cos
        and sin; Peng et al. 2023, https://arxiv.org/abs/2309.00071).
      factor: ratio of the new context length to the one trained on; `linear`, `llama3`, `yarn`.
      original_length: context length trained on, in tokens; `llama3`, `yarn`.
      low_freq_factor: wavelengths over `original_length / low_freq_factor` are divided by `factor`; `llama3`.
      high_freq_factor: wavelengths under `original_length / high_freq_factor` are kept; `llama3`.
      beta_fast: dimensions that rotate more often than this over `original_length` are kept; `yarn`.
      beta_slow: dimensions that rotate less often than this are divided by `factor`; `yarn`.
      attention_factor: multiplies cos and sin; None: from `factor`, `mscale` and `mscale_all_dim`; `yarn`.
      mscale: numerator's coefficient of the attention factor; `yarn`.
      mscale_all_dim: denominator's coefficient of the attention factor; `yarn`.
      truncate: whether the ends of the ramp are rounded to whole dimensions; `yarn`.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_length: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"rope kind {self.kind!r} is not supported; supported: {', '.join(KINDS)}")
        if self.kind != "default" and not self.factor >= 1:
            raise ValueError(f"rope factor of {self.kind!r} must be at least 1, got {self.factor!r}")
        if self.kind in ("llama3", "yarn") and not self.original_length:
            raise ValueError(f"rope kind {self.kind!r} needs original_length, the context length trained on")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Reads `rope_theta` with `rope_scaling`, or `rope_parameters`, of a Hugging Face configuration.

        Raises:
          ValueError: a kind or a field that is not supported, named.
        """
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        if not isinstance(scaling, Mapping) or any(isinstance(v, Mapping) for v in scaling.values()):
            raise ValueError(f"{key}={scaling!r} is not supported: it must be one set of values for all layers")
        scaling = {k: v for k, v in scaling.items() if v is not None}
        theta = scaling.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
        kind = scaling.pop("rope_type", None)
        kind = scaling.pop("type", None) if kind is None else (scaling.pop("type", None), kind)[1]
        kind = kind or "default"
        if kind in ("dynamic", "longrope", "su"):
            raise ValueError(
                f"{key} of type {kind!r} is not supported: its angles change with the length of the sequence, so "
                "cached keys would go stale; use a 'linear' or 'yarn' scaling"
            )
        if kind not in KINDS:
            raise ValueError(f"{key} of type {kind!r} is not supported; supported: {', '.join(KINDS)}")
        # A share of each head's dimensions, which the decoder's `rotary_size` tells.
        scaling.pop("partial_rotary_factor", None)
        unknown = sorted(set(scaling) - set(_FIELDS[kind]) - {"original_max_position_embeddings", "factor"})
        if unknown:
            raise ValueError(f"{key} of type {kind!r} has fields that are not supported: {', '.join(unknown)}")
        fields = {ours: scaling[theirs] for theirs, ours in _FIELDS[kind].items() if theirs in scaling}
        if kind in ("llama3", "yarn") and "original_length" not in fields:
            fields["original_length"] = config.get("max_position_embeddings")
        if kind != "default" and "factor" not in fields:
            raise ValueError(f"{key} of type {kind!r} lacks 'factor'")
        return cls(theta=float(theta), kind=kind, **fields)


def inverse_frequencies(rope: RopeConfig, size: int) -> tuple[np.ndarray, float]:
    """Angles per position and the factor on cos and sin.

    Args:
      rope: the configuration.
      size: dimensions rotated, `H`.

    Returns:
      `[H / 2]` float32 radians per position, and a factor.
    """
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    plain = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.kind == "default":
        return plain, 1.0
    scaled = plain / np.float32(rope.factor)
    if rope.kind == "linear":
        return scaled, 1.0
    keep = (_llama3_keep if rope.kind == "llama3" else _yarn_keep)(rope, plain, size)
    mixed = (1 - keep) * scaled + keep * plain
    return mixed.astype(np.float32), _yarn_attention_factor(rope) if rope.kind == "yarn" else 1.0


def _llama3_keep(rope: RopeConfig, plain: np.ndarray, size: int) -> np.ndarray:
    """Share of each frequency left unscaled, by wavelength, `[H / 2]`."""
    assert rope.original_length is not None
    rotations = rope.original_length * plain / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    return np.clip((rotations - rope.low_freq_factor) / span, 0.0, 1.0)


def _yarn_keep(rope: RopeConfig, plain: np.ndarray, size: int) -> np.ndarray:
    """Share of each frequency left unscaled, by dimension, `[H / 2]`."""
    trained = rope.original_length
    assert trained is not None

    def dimension(rotations: float) -> float:
        return size * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high = high + 0.001 if low == high else high
    return 1 - np.clip((np.arange(size // 2, dtype=np.float32) - low) / (high - low), 0.0, 1.0)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return float(rope.attention_factor)

    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def rotation(rope: RopeConfig, size: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines for `positions`.

    Args:
      rope: the configuration.
      size: dimensions rotated, `H`.
      positions: `[...]` int32.

    Returns:
      Two float32 arrays `[..., H / 2]`.
    """
    frequencies, factor = inverse_frequencies(rope, size)
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor
