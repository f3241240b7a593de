"""The configuration of the built-in decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxlookahead.models.rope import RopeConfig

ACTIVATIONS = ("silu",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shapes and options of a decoder of the Llama family. Hashable; every field is static: a change recompiles.

    Attributes:
      vocab_size: `V`.
      hidden_size: width of the residual stream, `E`.
      num_layers: blocks of attention and feed-forward.
      num_heads: query heads, `K * G`.
      num_kv_heads: key and value heads, `K`; divides `num_heads`.
      head_size: `H`, even; need not be `hidden_size / num_heads`.
      intermediate_size: width of the gated feed-forward, `F`.
      max_length: the most positions, or None where there is no limit.
      norm_eps: added to the mean square in RMS norms.
      rope: rotary position embedding.
      qkv_bias: whether the query, key and value projections have biases.
      out_bias: whether the attention's output projection has a bias.
      mlp_bias: whether the feed-forward projections have biases.
      qk_norm: RMS norm over `H` of each query and key head before rotation.
      tied: whether the output projection is the token embedding.
      windows: for each layer the number of most recent positions attended to (the token's own included), or
        None for all; an empty tuple stands for None in every layer.
      activation: of the gate; `silu`.
      dtype: of the parameters and the cache; norms, softmax and logits are float32 always.
      block: outputs per block of the projections' weights, see `layers.Projection`; None: whoever makes the
        parameters chooses, 0 is the plain layout.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    max_length: int | None = None
    norm_eps: float = 1e-6
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    windows: tuple[int | None, ...] = ()
    activation: str = "silu"
    dtype: str = "float32"
    block: int | None = None

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_size",
                     "intermediate_size"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}")
        if self.head_size % 2:
            raise ValueError(f"head_size must be even for rotary embedding, got {self.head_size}")
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"windows has {len(self.windows)} entries for {self.num_layers} layers")
        if any(w is not None and w < 1 for w in self.windows):
            raise ValueError(f"windows must be positive or None, got {self.windows!r}")
        if self.block is not None and (not isinstance(self.block, int) or self.block < 0):
            raise ValueError(f"block must be None, 0 or a positive integer, got {self.block!r}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")

    @property
    def queries_per_kv(self) -> int:
        """`G`."""
        return self.num_heads // self.num_kv_heads

    def window(self, layer: int) -> int | None:
        """The sliding window of one layer, in positions."""
        return self.windows[layer] if self.windows else None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: str = "float32") -> DecoderConfig:
        """Translates the content of a Hugging Face `config.json`.

        Raises:
          ValueError: a model type or a field's value that is not supported, named.
        """
        from jaxlookahead.models.hf import decoder_config

        return decoder_config(config, dtype=dtype)
