"""The configuration of the built-in decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxlookahead.models.rope import RopeConfig

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
NORMS = ("rms", "rms_offset", "layer")
ORDERS = ("before", "after", "both", "parallel", "residual")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shapes and options of a decoder. Hashable; every field is static: a change recompiles.

    Attributes:
      vocab_size: `V`.
      hidden_size: width of the residual stream, `E`.
      num_layers: blocks of attention and feed-forward.
      num_heads: query heads, `K * G`.
      num_kv_heads: key and value heads, `K`; divides `num_heads`.
      head_size: `H`, even; need not be `hidden_size / num_heads`.
      intermediate_size: width of the gated feed-forward, `F`.
      max_length: the most positions, or None where there is no limit.
      family: whose names checkpoints use, a `model_type` of `families.FAMILIES`.
      norm: `rms` (root mean square), `rms_offset` (the same, scaled by 1 + the parameter) or `layer` (mean and
        variance, scale and bias).
      norm_eps: added to the mean square, or to the variance, in norms.
      norm_order: where norms stand: `before` attention and feed-forward; `after` them, before the sum with the
        residual stream; `both`; `parallel`: before, and both see the same stream; `residual`: after the sum.
      final_norm: whether there is a norm before the output projection.
      embed_size: width of the token embedding, or None for `hidden_size`; where it differs, projections without
        bias lead to the residual stream and back.
      embed_scale: multiplies the token embedding.
      learned_positions: rows of a table of position vectors added to the embedding; 0: no table.
      position_offset: row of that table that position 0 takes.
      rope: rotary position embedding, or None.
      rope_local: the same for layers with a window, where it differs.
      rotary_size: leading dimensions of a head that rotate, or None for all.
      qkv_bias: whether the query, key and value projections have biases.
      out_bias: whether the attention's output projection has a bias.
      mlp_bias: whether the feed-forward projections have biases.
      gated: whether the feed-forward has a gate.
      qk_norm: norm over `H` of each query and key head before rotation.
      qk_norm_whole: the norm is over all query heads together, and all key heads together.
      attention_scale: multiplies queries, or None for `H ** -0.5`.
      attention_cap: attention scores `s` become `cap * tanh(s / cap)`; None: they stay.
      logit_cap: the same for logits.
      num_experts: feed-forwards among which a router chooses in each layer; 0: one for all.
      experts_per_token: experts that each token goes through.
      expert_size: width of each expert's feed-forward.
      normalize_experts: whether the weights of a token's experts sum to 1.
      dense_layers: layers with one feed-forward in spite of `num_experts`.
      tied: whether the output projection is the token embedding.
      windows: for each layer the number of most recent positions attended to (the token's own included), or
        None for all; an empty tuple stands for None in every layer.
      activation: of the gate, or of the feed-forward without one: `silu`, `gelu`, `gelu_tanh` (its approximation)
        or `relu`.
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
    family: str = "llama"
    norm: str = "rms"
    norm_eps: float = 1e-6
    norm_order: str = "before"
    final_norm: bool = True
    embed_size: int | None = None
    embed_scale: float = 1.0
    learned_positions: int = 0
    position_offset: int = 0
    rope: RopeConfig | None = dataclasses.field(default_factory=RopeConfig)
    rope_local: RopeConfig | None = None
    rotary_size: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    gated: bool = True
    qk_norm: bool = False
    qk_norm_whole: bool = False
    attention_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normalize_experts: bool = True
    dense_layers: tuple[int, ...] = ()
    tied: bool = False
    windows: tuple[int | None, ...] = ()
    activation: str = "silu"
    dtype: str = "float32"
    block: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_size",
                     "intermediate_size"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}")
        if self.rope is not None and self.rotated % 2:
            field = "head_size" if self.rotary_size is None else "rotary_size"
            raise ValueError(f"{field} must be even for rotary embedding, got {self.rotated}")
        if self.rotated > self.head_size:
            raise ValueError(f"rotary_size={self.rotary_size} must be at most head_size={self.head_size}")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} must be 1 to num_experts={self.num_experts}")
        if self.num_experts and self.expert_size < 1:
            raise ValueError(f"expert_size must be a positive integer, got {self.expert_size!r}")
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"windows has {len(self.windows)} entries for {self.num_layers} layers")
        if any(w is not None and w < 1 for w in self.windows):
            raise ValueError(f"windows must be positive or None, got {self.windows!r}")
        if self.block is not None and (not isinstance(self.block, int) or self.block < 0):
            raise ValueError(f"block must be None, 0 or a positive integer, got {self.block!r}")
        for name, known in (("activation", ACTIVATIONS), ("norm", NORMS), ("norm_order", ORDERS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is not supported; supported: {', '.join(known)}")

    @property
    def rotated(self) -> int:
        """Dimensions of a head that rotate."""
        return self.head_size if self.rotary_size is None else self.rotary_size

    @property
    def embed_width(self) -> int:
        """Width of the token embedding."""
        return self.hidden_size if self.embed_size is None else self.embed_size

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

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
