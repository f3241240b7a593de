"""`jaxlookahead aot`: compiles the decoding step for a TPU that isn't there."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from typing import TYPE_CHECKING

from jaxlookahead.bench.shapes import CONFIGS
from jaxlookahead.cli import common

if TYPE_CHECKING:
    from jaxlookahead.bench.aot import Compilation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--topology", default="v5e:2x2", help="kind and shape of the TPUs (%(default)s)")
    parser.add_argument(
        "--models", default=",".join(CONFIGS), help="shapes, separated by commas (%(default)s)", metavar="NAMES"
    )
    parser.add_argument(
        "--widths",
        type=common.positives,
        default=[1, 2, 4, 8, 16, 32, 64],
        help="tree widths (1,2,4,...,64)",
        metavar="N,...",
    )
    parser.add_argument("--slots", type=common.positive, default=1024, help="cache slots (%(default)s)")
    parser.add_argument("--rows", type=common.positive, default=1, help="rows decoded together (%(default)s)")
    parser.add_argument(
        "--devices", type=common.positive, default=1, help="devices that share the model, tensor parallel (%(default)s)"
    )
    parser.add_argument("--layers", type=common.positive, metavar="N", help="only so many layers of each model")
    parser.add_argument("--json", action="store_true", help="print one object for each compilation")
    parser.add_argument("--hlo", metavar="DIRECTORY", help="keep the compiled programs' texts there")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    # Else jax looks for TPUs, asks a server that only Google's machines have, and locks them for this process.
    for name, value in (("JAX_PLATFORMS", "cpu"), ("TPU_SKIP_MDS_QUERY", "1"), ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")):
        os.environ.setdefault(name, value)
    from jaxlookahead.bench import aot

    def keep(done: Compilation, text: str) -> None:
        os.makedirs(arguments.hlo, exist_ok=True)
        name = f"{done.topology.replace(':', '-')}_{done.model}_{done.devices}_{done.rows}_{done.width}.hlo"
        with open(os.path.join(arguments.hlo, name), "w", encoding="utf-8") as file:
            file.write(text)

    found = []
    for done in aot.measure(
        arguments.topology,
        arguments.models.split(","),
        widths=arguments.widths,
        slots=arguments.slots,
        rows=arguments.rows,
        devices=arguments.devices,
        layers=arguments.layers,
        keep=keep if arguments.hlo else None,
    ):
        found.append(done)
        if arguments.json:
            print(json.dumps(dataclasses.asdict(done) | {"cache_aliased": done.cache_aliased}), flush=True)
    if not arguments.json:
        _print_table(found)
    return 0


def _print_table(found: list[Compilation]) -> None:
    from rich.console import Console
    from rich.table import Table

    first = found[0]
    table = Table(
        title=f"{first.topology}, {first.devices} device{'s' * (first.devices > 1)}, {first.rows} "
        f"row{'s' * (first.rows > 1)}, {first.slots} slots; MB a device"
    )
    table.add_column("model")
    for title in ("width", "compile s", "accessed", "to narrowest", "weights", "cache", "temporary", "cache aliased"):
        table.add_column(title, justify="right")
    table.add_column("collectives")
    for model in dict.fromkeys(done.model for done in found):
        mine = [done for done in found if done.model == model]
        for done in mine:
            sizes = (f"{size / 1e6:.1f}" for size in (done.params, done.cache, done.temporary))
            table.add_row(
                model,
                str(done.width),
                f"{done.seconds:.1f}",
                f"{done.bytes / 1e6:.1f}",
                f"{done.bytes / mine[0].bytes:.3f}",
                *sizes,
                "yes" if done.cache_aliased else f"no, {done.cache_copies} copies",
                ", ".join(f"{count} {name}" for name, count in done.collectives.items()) or "none",
            )
        table.add_section()
    Console(width=max(Console().width, 120)).print(table)
