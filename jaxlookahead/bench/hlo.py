"""Reads a compiled TPU program: bytes to and from main memory, collectives, copies, each by scope.

XLA's own count of bytes accessed takes every operand of every instruction as read from memory. On TPU that counts a
weight three times where it is fetched ahead into the core's memory, and a whole embedding where some rows of it are
looked up. Here only what crosses main memory counts, once.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")

_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^{}]*\})?")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
# Names and groups of values, which move nothing; `-done` ends what its `-start` is counted for.
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota", "partition-id",
         "replica-id", "opt-barrier", "add-dependency")  # fmt: skip
_PARTIAL = ("dynamic-slice", "slice", "gather")


@dataclasses.dataclass(frozen=True)
class Array:
    """A value's place: its shape, bytes, and whether it lies in main memory."""

    shape: tuple[int, ...]
    size: int
    main: bool


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]  # of its result
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @property
    def scope(self) -> str:
        """The `jax.named_scope`s it came from, joined by slashes; empty where XLA made it up."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    @property
    def called(self) -> list[str]:
        """Computations that it runs, but for those of an elementwise reduction."""
        return re.findall(r"(?:calls|body|condition|true_computation|false_computation)=%?([\w.\-]+)", self.attributes)

    @property
    def trips(self) -> int:
        """How often a loop runs; 1 where that is not known."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(found.group(1)) if found else 1


@dataclasses.dataclass(frozen=True)
class Program:
    """The text of a compiled program, taken apart."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

    @classmethod
    def parse(cls, text: str) -> Program:
        """Takes the text that `Compiled.as_text` returns."""
        computations: dict[str, dict[str, Instruction]] = {}
        entry, current = "", None
        for line in text.splitlines():
            header = _HEADER.match(line)
            if header and not line.startswith(" "):
                current = computations.setdefault(header.group(2), {})
                entry = header.group(2) if header.group(1) else entry
            elif current is not None and (found := _INSTRUCTION.match(line)):
                instruction = _instruction(found.group(2), line[found.end() :], bool(found.group(1)))
                current[instruction.name] = instruction
        if not entry:
            raise ValueError("the text is no compiled program: it has no ENTRY")
        return cls(computations, entry)

    def running(self) -> Iterator[tuple[Instruction, dict[str, Instruction], int]]:
        """Instructions that run, with their computation and how often; those inside fusions are part of the fusion."""

        def walk(name: str, times: int) -> Iterator[tuple[Instruction, dict[str, Instruction], int]]:
            body = self.computations[name]
            for x in body.values():
                yield x, body, times
                if x.opcode in ("while", "call", "conditional"):
                    for called in x.called:
                        yield from walk(called, times * x.trips)

        yield from walk(self.entry, 1)

    def traffic(self) -> float:
        """Bytes read from and written to main memory. A loop of unknown length counts once."""
        return sum(times * self._bytes(x, body) for x, body, times in self.running())

    def collectives(self) -> collections.Counter[tuple[str, str]]:
        """How many collectives of each kind run in each scope."""
        found: collections.Counter[tuple[str, str]] = collections.Counter()
        for x, _, times in self.running():
            inside = [x, *(y for name in x.called for y in self.computations[name].values())]
            for y in inside if x.opcode in ("fusion", "async-start") else [x]:
                kind = y.opcode.removesuffix("-start")
                if kind in COLLECTIVES:
                    found[kind, y.scope or x.scope] += times
        return found

    def copies(self, shapes: set[tuple[int, ...]]) -> list[Instruction]:
        """Instructions that copy a whole array of one of the shapes within main memory."""
        found = []
        for x, body, _ in self.running():
            plain = x.opcode == "copy" or (x.opcode == "copy-start" and x.arrays[1].main)
            if plain and x.arrays[0].main and x.arrays[0].shape in shapes:
                source = body.get(x.operands[0])
                if x.opcode == "copy-start" or (source is not None and source.arrays[0].shape in shapes):
                    found.append(x)
        return found

    def _bytes(self, x: Instruction, body: dict[str, Instruction]) -> float:
        if x.opcode in _FREE or x.opcode.endswith("-done") or x.opcode in ("while", "call", "conditional"):
            return 0
        if x.opcode in ("copy-start", "slice-start"):
            source, target = (x.arrays[1], x.arrays[0]) if x.opcode == "copy-start" else x.arrays[:2]
            return target.size * (source.main + target.main)
        if x.opcode == "custom-call" and "ConcatBitcast" in x.attributes:
            return 0
        operands = [body[name].arrays for name in x.operands if name in body]
        if x.opcode == "dynamic-update-slice":
            update = operands[1][0]
            return update.size * (update.main + x.arrays[0].main)
        if x.opcode in _PARTIAL:
            return x.arrays[0].size * (operands[0][0].main + x.arrays[0].main)
        read: list[float] = [sum(a.size for a in arrays if a.main) for arrays in operands]
        written: list[float] = [a.size if a.main else 0 for a in x.arrays]
        if x.opcode == "fusion":
            inner = self.computations[x.called[0]]
            read = [min(r, self._read(inner, i)) for i, r in enumerate(read)]
            written = [min(w, u) for w, u in zip(written, _updated(inner, x.arrays), strict=True)]
        return sum(read) + sum(written)

    def _read(self, inner: dict[str, Instruction], index: int) -> float:
        """The most bytes that a fused computation reads of its argument `index`."""
        names = [n for n, x in inner.items() if x.opcode == "parameter" and x.attributes.startswith(f"({index})")]
        return sum(self._read_of(inner, name) for name in names)

    def _read_of(self, inner: dict[str, Instruction], name: str) -> float:
        if inner[name].root:
            return math.inf
        total = 0.0
        for x in inner.values():
            if name not in x.operands:
                continue
            places = [i for i, operand in enumerate(x.operands) if operand == name]
            if x.opcode in _PARTIAL and places == [0]:
                total += sum(a.size for a in x.arrays)
            elif x.opcode == "dynamic-update-slice" and places == [0]:
                continue
            elif x.opcode == "bitcast" or (x.opcode == "fusion" and _renames(self.computations[x.called[0]])):
                total += self._read_of(inner, x.name)
            elif x.opcode == "fusion":
                total += sum(self._read(self.computations[x.called[0]], i) for i in places)
            else:
                return math.inf
        return total


def _renames(inner: dict[str, Instruction]) -> bool:
    """Whether a fused computation only gives its argument another shape."""
    return all(x.opcode in ("parameter", "bitcast") for x in inner.values())


def _updated(inner: dict[str, Instruction], arrays: Sequence[Array]) -> list[float]:
    """Bytes that a fused computation writes to each of its results: of one written in place, the new part."""
    root = next(x for x in inner.values() if x.root)
    roots = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
    if len(roots) != len(arrays):
        return [a.size for a in arrays]
    sizes: list[float] = []
    for x, array in zip(roots, arrays, strict=True):
        while x.opcode == "bitcast":
            x = inner[x.operands[0]]
        in_place = x.opcode == "dynamic-update-slice"
        sizes.append(inner[x.operands[1]].arrays[0].size if in_place else array.size)
    return sizes


def _instruction(name: str, text: str, root: bool) -> Instruction:
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    opening = text.index("(", end)
    closing = _closing(text, opening)
    opcode, inside, rest = text[end:opening].strip(), text[opening + 1 : closing - 1], text[closing:]
    if opcode == "parameter":
        rest = f"({inside}){rest}"
    operands = tuple(re.findall(r"%([\w.\-]+)", inside)) if opcode != "constant" else ()
    return Instruction(name, opcode, tuple(_arrays(text[:end])), operands, rest, root)


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"brackets do not close in {text[:80]!r}")


def _arrays(text: str) -> Iterator[Array]:
    for kind, sizes, layout in _ARRAY.findall(text):
        shape = tuple(int(size) for size in sizes.split(",") if size)
        bits = _BITS.get(kind, 0) or int("0" + "".join(filter(str.isdigit, kind)))
        yield Array(shape, math.prod(shape) * bits // 8, "S(" not in layout)
