"""`jaxlookahead generate`: decode prompts from the command line, a file or standard input."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from jaxlookahead.cli import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    common.add_model_arguments(parser)
    common.add_draft_arguments(parser)
    parser.add_argument("prompt", nargs="*", help="prompts; without any, --file")
    parser.add_argument("--file", metavar="FILE", help="one prompt a line, or JSONL with a field `text`; - is stdin")
    parser.add_argument("--raw", action="store_true", help="continue the text itself, without a chat template")
    parser.add_argument("--max-new-tokens", type=common.positive, default=128, metavar="N", help="%(default)s")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end there too; may be repeated")
    parser.add_argument("--rows", type=common.positive, default=8, help="prompts decoded together (%(default)s)")
    parser.add_argument("--plain", action="store_true", help="draft nothing")
    parser.add_argument("--json", action="store_true", help="print one object for each prompt")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from rich.console import Console

    from jaxlookahead import generate, show
    from jaxlookahead.checkpoints.tokenizer import chat_ids

    texts = read_prompts(arguments)
    loaded = common.load_model(arguments)
    tokenizer: Any = loaded.tokenizer
    if arguments.raw:
        prompts = [list(tokenizer.encode(text)) for text in texts]
    else:
        prompts = [chat_ids(tokenizer, [{"role": "user", "content": text}]) for text in texts]
    result = generate(
        loaded.model,
        loaded.params,
        prompts,
        max_new_tokens=arguments.max_new_tokens,
        drafter=None if arguments.plain else arguments.drafter,
        width=arguments.width,
        adapt=not arguments.no_adapt,
        eos_ids=loaded.eos_ids,
        stop=[tokenizer.encode(text, add_special_tokens=False) for text in arguments.stop],
        rows=arguments.rows,
    )
    console = Console()
    for text, output in zip(texts, result, strict=True):
        if arguments.json:
            row = {
                "prompt": text,
                "text": tokenizer.decode(output.tokens.tolist(), skip_special_tokens=True),
                "tokens": output.tokens.tolist(),
                "from_draft": output.from_draft.tolist(),
                "finish_reason": output.finish_reason,
                "calls": output.stats.steps,
                "drafted": output.stats.drafted,
                "accepted": output.stats.accepted,
            }
            print(json.dumps(row))
        else:
            console.print(show.coloured(output, tokenizer), soft_wrap=True)
    stats = result.stats
    print(
        f"{stats.tokens} tokens, {stats.tokens_per_call:.2f} per call; seconds: prefill {stats.prefill_seconds:.2f}, "
        f"draft {stats.draft_seconds:.2f}, steps {stats.step_seconds:.2f} (compilation included)",
        file=sys.stderr,
    )
    return 0


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """The prompts that the command line names."""
    texts = list(arguments.prompt)
    if arguments.file is not None:
        if arguments.file == "-":
            lines = sys.stdin.read().splitlines()
        else:
            with open(arguments.file, encoding="utf-8") as file:
                lines = file.read().splitlines()
        texts += [_prompt(line, number, arguments.file) for number, line in enumerate(lines, 1) if line.strip()]
    if not texts:
        raise ValueError("no prompt: give one on the command line, or a file of them with --file")
    return texts


def _prompt(line: str, number: int, file: str) -> str:
    if not line.lstrip().startswith("{"):
        return line
    try:
        text = json.loads(line)["text"]
    except (json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"{file}, line {number}: neither plain text nor a JSON object with a field `text`") from error
    if not isinstance(text, str):
        raise ValueError(f"{file}, line {number}: field `text` must be a string, got {type(text).__name__}")
    return text
