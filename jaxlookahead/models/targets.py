"""Where the tensors of a checkpoint go in the built-in decoder's parameters."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from jaxlookahead.models.config import DecoderConfig
from jaxlookahead.models.families import FAMILIES, Family
from jaxlookahead.models.layers import PROJECTION_BLOCKS, VOCABULARY_BLOCKS, part_sizes

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows of a checkpoint tensor that go to one parameter.

    Attributes:
      path: of the parameter.
      source: the tensor's first row.
      rows: how many.
      start: the parameter's first output, which the first row becomes.
      expert: which expert's part of the parameter, or None.
    """

    path: Path
    source: int
    rows: int
    start: int = 0
    expert: int | None = None


@dataclasses.dataclass(frozen=True)
class Target:
    """Where one checkpoint tensor goes.

    Attributes:
      shape: of the tensor, as the checkpoint holds it.
      pieces: that it falls into.
      more_rows: whether the checkpoint may hold more rows (a padded vocabulary); they are left out.
      transposed: whether the checkpoint holds columns where the pieces say rows.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    more_rows: bool = False
    transposed: bool = False


# Buffers that older checkpoints hold: frequencies, and causal masks.
_IGNORED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|h\.\d+\.attn\.(masked_)?bias|attention\.(masked_)?bias)")


def unused(config: DecoderConfig, name: str) -> bool:
    """Whether checkpoints may hold a tensor `name` that the model has no use for."""
    return bool(_IGNORED.fullmatch(name)) or (config.tied and name == f"{FAMILIES[config.family].name('head')}.weight")


def full_name(config: DecoderConfig, name: str) -> str:
    """The name of a tensor in a checkpoint that leaves out no prefix."""
    prefix = FAMILIES[config.family].name("prefix")
    return name if name.startswith(prefix) else prefix + name


def targets(config: DecoderConfig) -> dict[str, Target]:
    """Every tensor of a complete checkpoint, by name."""
    c, family, block = config, FAMILIES[config.family], config.block or 0
    name, found = family.name, dict[str, Target]()
    found[f"{name('embed')}.weight"] = _vocabulary(c, "embed", block if c.tied else 0)
    if c.learned_positions:
        shape = (c.learned_positions, c.hidden_size)
        found[f"{name('positions')}.weight"] = _whole(shape, ("positions", "weight"))
    for module, out, into in (
        ("project_in", c.hidden_size, c.embed_width),
        ("project_out", c.embed_width, c.hidden_size),
    ):
        if c.embed_width != c.hidden_size:
            found |= _product(c, name(module), (module,), out, into, False, [Piece((), 0, out)])
    for i in range(c.num_layers):
        prefix = name("layer").format(i)
        found |= {prefix + key: target for key, target in _layer_targets(c, family, i).items()}
    if c.final_norm:
        found |= _norm(c, name("norm"), ("norm",), c.hidden_size)
    if not c.tied:
        found[f"{name('head')}.weight"] = _vocabulary(c, "head", block)
    return found


def _whole(shape: tuple[int, ...], path: Path) -> Target:
    return Target(shape, (Piece(path, 0, shape[0]),))


def _norm(c: DecoderConfig, name: str, path: Path, size: int) -> dict[str, Target]:
    found = {f"{name}.weight": _whole((size,), (*path, "scale"))}
    if c.norm == "layer":
        found[f"{name}.bias"] = _whole((size,), (*path, "bias"))
    return found


def _vocabulary(c: DecoderConfig, name: str, block: int) -> Target:
    pieces = _in_parts((name,), Piece((), 0, c.vocab_size), part_sizes(c.vocab_size, block, VOCABULARY_BLOCKS), block)
    return Target((c.vocab_size, c.embed_width), pieces, more_rows=True)


def _in_parts(module: Path, piece: Piece, sizes: list[int], block: int) -> tuple[Piece, ...]:
    """Cuts a piece of a weight at the borders of the weight's parts."""
    if not sizes:
        return (dataclasses.replace(piece, path=(*module, "weight")),)
    cut, border = [], 0
    for i, blocks in enumerate(sizes):
        first, last = max(piece.start, border), min(piece.start + piece.rows, border + blocks * block)
        if first < last:
            source = piece.source + first - piece.start
            cut.append(Piece((*module, f"part_{i}"), source, last - first, first - border))
        border += blocks * block
    return tuple(cut)


def _product(
    c: DecoderConfig,
    name: str,
    module: Path,
    out: int,
    into: int,
    bias: bool,
    pieces: Sequence[Piece],
    transposed: bool = False,
) -> dict[str, Target]:
    """The tensors of a projection, or of the part of it that `pieces` describe.

    Args:
      c: the configuration.
      name: of the tensors, without the ending.
      module: path of the projection.
      out: its outputs.
      into: its inputs.
      bias: whether it has a bias.
      pieces: without paths.
      transposed: whether the tensor is `[in, out]`.
    """
    rows = sum(piece.rows for piece in pieces)
    shape = (into, rows) if transposed else (rows, into)
    block = c.block if c.block and out % c.block == 0 else 0
    sizes = part_sizes(out, block, PROJECTION_BLOCKS)
    weight = tuple(part for piece in pieces for part in _in_parts(module, piece, sizes, block))
    found = {f"{name}.weight": Target(shape, weight, transposed=transposed)}
    if bias:
        whole = tuple(dataclasses.replace(piece, path=(*module, "bias")) for piece in pieces)
        found[f"{name}.bias"] = Target((rows,), whole)
    return found


def _layer_targets(c: DecoderConfig, family: Family, index: int) -> dict[str, Target]:
    layer, name, found = f"layer_{index}", family.name, dict[str, Target]()
    before, after = c.norm_order != "after", c.norm_order in ("after", "both")
    for norm in ("attention_norm", "mlp_norm") if before else ():
        found |= _norm(c, name(norm), (layer, norm), c.hidden_size)
    for norm in ("attention_post_norm", "mlp_post_norm") if after else ():
        found |= _norm(c, name(norm), (layer, norm), c.hidden_size)
    found |= _attention(c, family, (layer, "attention"))
    if c.has_experts(index):
        return found | _experts(c, family, (layer, "mlp"))
    return found | _mlp(c, family, (layer, "mlp"))


def _attention(c: DecoderConfig, family: Family, module: Path) -> dict[str, Target]:
    group, size, name = c.queries_per_kv, c.head_size, family.name
    fused = c.num_kv_heads * (group + 2) * size
    # The parameter holds for each kv head its queries, its key and its value.
    parts, done = dict[str, list[Piece]](), 0
    for part, first, count in (("q", 0, group), ("k", group, 1), ("v", group + 1, 1)):
        rows = count * size
        starts = [(k * (group + 2) + first) * size for k in range(c.num_kv_heads)]
        parts[part] = [Piece((), k * rows, rows, start) for k, start in enumerate(starts)]
    found: dict[str, Target] = {}
    if not name("qkv"):
        for part, some in parts.items():
            found |= _product(c, name(part), (*module, "qkv"), fused, c.hidden_size, c.qkv_bias, some)
    else:
        pieces = []
        for some in parts.values():
            pieces += [dataclasses.replace(piece, source=piece.source + done) for piece in some]
            done += sum(piece.rows for piece in some)
        pieces = [Piece((), 0, fused)] if family.by_head else pieces
        common = (fused, c.hidden_size, c.qkv_bias, pieces, family.transposed)
        found |= _product(c, name("qkv"), (*module, "qkv"), *common)
    inputs, whole = c.num_heads * size, [Piece((), 0, c.hidden_size)]
    found |= _product(c, name("out"), (*module, "out"), c.hidden_size, inputs, c.out_bias, whole, family.transposed)
    for norm, heads in (("q_norm", c.num_heads), ("k_norm", c.num_kv_heads)) if c.qk_norm else ():
        found |= _norm(c, name(norm), (*module, norm), size * (heads if c.qk_norm_whole else 1))
    return found


def _mlp(c: DecoderConfig, family: Family, module: Path) -> dict[str, Target]:
    name, ffn, into = family.name, c.intermediate_size, c.hidden_size
    down = (into, ffn, c.mlp_bias, [Piece((), 0, into)], family.transposed)
    found = _product(c, name("down"), (*module, "down"), *down)
    if not c.gated:
        up = (ffn, into, c.mlp_bias, [Piece((), 0, ffn)], family.transposed)
        return found | _product(c, name("up"), (*module, "up"), *up)
    both = (2 * ffn, into, c.mlp_bias)
    if name("gate_up"):
        return found | _product(c, name("gate_up"), (*module, "gate_up"), *both, [Piece((), 0, 2 * ffn)])
    for part, start in (("gate", 0), ("up", ffn)):
        found |= _product(c, name(part), (*module, "gate_up"), *both, [Piece((), 0, ffn, start)])
    return found


def _experts(c: DecoderConfig, family: Family, module: Path) -> dict[str, Target]:
    name, ffn, into = family.name, c.expert_size, c.hidden_size
    found = {f"{name('router')}.weight": _whole((c.num_experts, into), (*module, "router", "weight"))}
    gate_up, down = (*module, "gate_up"), (*module, "down")
    for i in range(c.num_experts):
        for part, start in (("expert_gate", 0), ("expert_up", ffn)):
            piece = Piece(gate_up, 0, ffn, start, expert=i)
            found[f"{name(part).format(i)}.weight"] = Target((ffn, into), (piece,))
        found[f"{name('expert_down').format(i)}.weight"] = Target((into, ffn), (Piece(down, 0, into, expert=i),))
    return found


def fill(leaf: np.ndarray, piece: Piece, array: np.ndarray) -> None:
    """Writes a piece of a checkpoint tensor into a parameter, cast to the parameter's dtype.

    Args:
      leaf: the parameter, `[out]`, `[out, in]`, in blocks `[out / block, in, block]`, or `[experts, out, in]`.
      piece: which rows go where.
      array: the tensor, with its rows in front.
    """
    rows = array[piece.source : piece.source + piece.rows]
    if piece.expert is not None:
        leaf = leaf[piece.expert]
    if leaf.ndim < 3:
        leaf[piece.start : piece.start + piece.rows] = rows
    else:
        row = np.arange(piece.start, piece.start + piece.rows)
        leaf[row // leaf.shape[2], :, row % leaf.shape[2]] = rows
