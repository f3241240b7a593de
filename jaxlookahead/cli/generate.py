"""`jaxlookahead generate`: decode prompts from the command line, a file or standard input."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from jaxlookahead.cli import common, memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    common.add_model_arguments(parser)
    common.add_draft_arguments(parser)
    parser.add_argument("prompt", nargs="*", help="the text of a prompt; may be repeated (a file of prompts: --file)")
    parser.add_argument("--file", metavar="FILE", help="one prompt a line, or JSONL with a field `text`; - is stdin")
    parser.add_argument("--raw", action="store_true", help="continue the text itself, without a chat template")
    parser.add_argument("--max-new-tokens", type=common.positive, default=128, metavar="N", help="%(default)s")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end there too; may be repeated")
    parser.add_argument("--rows", type=common.positive, default=8, help="prompts decoded together (%(default)s)")
    parser.add_argument("--plain", action="store_true", help="draft nothing")
    common.add_sampling_arguments(parser)
    memory.add_arguments(parser)
    parser.add_argument("--stream", action="store_true", help="print text as it comes, one response after the other")
    parser.add_argument("--json", action="store_true", help="print one object for each response, or chunk of a stream")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    sampling = common.sampling(arguments)
    memory.check(arguments)
    texts = read_prompts(arguments)
    loaded = common.load_model(arguments)
    drafter: Any = None if arguments.plain else arguments.drafter
    if arguments.memory is not None or arguments.save_memory is not None:
        drafter = memory.open_drafter(arguments, loaded)
    tokenizer: Any = loaded.tokenizer
    prompts = encode_prompts(texts, tokenizer, arguments.raw)
    options = {
        "max_new_tokens": arguments.max_new_tokens,
        "drafter": drafter,
        "width": arguments.width,
        "adapt": not arguments.no_adapt,
        "eos_ids": loaded.eos_ids,
        "stop": [tokenizer.encode(text, add_special_tokens=False) for text in arguments.stop],
        "rows": arguments.rows,
        "sampling": sampling,
    }
    (_stream if arguments.stream else _whole)(loaded, texts, prompts, options, arguments.json)
    if arguments.save_memory is not None:
        drafter.save(arguments.save_memory)
    return 0


def _whole(
    loaded: Any, texts: Sequence[str], prompts: Sequence[list[int]], options: dict[str, Any], as_json: bool
) -> None:
    """Decodes all prompts, then prints all responses."""
    from rich.console import Console

    from jaxlookahead import generate, show

    result = generate(loaded.model, loaded.params, prompts, **options)
    console = Console()
    for output in result:
        if as_json:
            row = {
                "prompt": texts[output.request],
                "sample": output.sample,
                "text": loaded.tokenizer.decode(output.tokens.tolist(), skip_special_tokens=True),
                "tokens": output.tokens.tolist(),
                "from_draft": output.from_draft.tolist(),
                "finish_reason": output.finish_reason,
                "calls": output.stats.steps,
                "drafted": output.stats.drafted,
                "accepted": output.stats.accepted,
            }
            print(json.dumps(row))
        else:
            if len(result) > 1:
                console.rule(_title(texts[output.request], output.sample))
            console.print(show.coloured(common.without_end(output), loaded.tokenizer), soft_wrap=True)
    stats = result.stats
    print(
        f"{stats.tokens} tokens, {stats.tokens_per_call:.2f} per call; seconds: prefill {stats.prefill_seconds:.2f}, "
        f"draft {stats.draft_seconds:.2f}, steps {stats.step_seconds:.2f} (compilation included)",
        file=sys.stderr,
    )


def _stream(
    loaded: Any, texts: Sequence[str], prompts: Sequence[list[int]], options: dict[str, Any], as_json: bool
) -> None:
    """Prints tokens as they come: as text, one response after the other, or chunks of `rows` prompts as JSON."""
    from rich.console import Console
    from rich.text import Text

    from jaxlookahead import show, stream

    if not as_json:
        options = options | {"rows": 1}
    console = Console()
    detokenizer = show.Detokenizer(loaded.tokenizer)
    tokens = calls = 0
    samples = options["sampling"].num_samples if options["sampling"] is not None else 1
    begun: tuple[int, int] | None = None
    for chunk in stream(loaded.model, loaded.params, prompts, **options):
        tokens += len(chunk.tokens)
        calls += 1
        if as_json:
            row = {
                "prompt": texts[chunk.request],
                "sample": chunk.sample,
                "tokens": chunk.tokens.tolist(),
                "from_draft": chunk.from_draft.tolist(),
                "finish_reason": chunk.finish_reason,
            }
            print(json.dumps(row), flush=True)
            continue
        text = Text()
        if (chunk.request, chunk.sample) != begun:
            begun = chunk.request, chunk.sample
            if len(prompts) * samples > 1:
                console.rule(_title(texts[chunk.request], chunk.sample))
        ends = chunk.finish_reason == "eos"
        for token, drafted in zip(chunk.tokens.tolist()[: -1 if ends else None], chunk.from_draft, strict=not ends):
            text.append(show.printable(detokenizer.add(token)), "bold green" if drafted else "")
        if chunk.finish_reason is not None:
            text.append(show.printable(detokenizer.finish()) + "\n")
            detokenizer = show.Detokenizer(loaded.tokenizer)
        console.print(text, end="", soft_wrap=True)
        console.file.flush()
    print(f"{tokens} tokens, {tokens / max(calls, 1):.2f} per call", file=sys.stderr)


def _title(prompt: str, sample: int) -> Any:
    """What stands above a response where there are several: the prompt's beginning, and which sample it is."""
    from rich.text import Text

    words = " ".join(prompt.split())
    return Text((words if len(words) <= 50 else words[:49] + "…") + (f" ({sample + 1})" if sample else ""))


def encode_prompts(texts: Sequence[str], tokenizer: Any, raw: bool) -> list[list[int]]:
    """Token ids of prompts, as a chat's first turn or, with `raw`, as they are.

    Raises:
      ValueError: there is no chat template, or a prompt is empty.
    """
    from jaxlookahead.checkpoints.tokenizer import chat_ids

    if not raw and not getattr(tokenizer, "chat_template", None):
        raise ValueError("the model's tokenizer has no chat template: continue the prompt's text itself with --raw")
    if raw:
        prompts = [list(tokenizer.encode(text)) for text in texts]
    else:
        prompts = [chat_ids(tokenizer, [{"role": "user", "content": text}]) for text in texts]
    for text, prompt in zip(texts, prompts, strict=True):
        if not prompt:
            raise ValueError(f"the prompt {text!r} has no tokens: give it some text")
    return prompts


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """The prompts that the command line names."""
    texts = list(arguments.prompt)
    for text in texts:
        if os.path.isfile(text):
            print(f"{text} is decoded as a prompt; to read prompts from the file, use --file {text}", file=sys.stderr)
    if arguments.file is not None:
        try:
            if arguments.file == "-":
                lines = sys.stdin.read().splitlines()
            else:
                with open(arguments.file, encoding="utf-8") as file:
                    lines = file.read().splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"{arguments.file} is no UTF-8 text: {error.reason} at byte {error.start}") from None
        texts += [_prompt(line, number, arguments.file) for number, line in enumerate(lines, 1) if line.strip()]
    if not texts:
        raise ValueError("no prompt: give one on the command line, or a file of them with --file")
    return texts


def _prompt(line: str, number: int, file: str) -> str:
    if not line.lstrip().startswith("{"):
        return line
    try:
        text = json.loads(line)["text"]
    except (json.JSONDecodeError, KeyError, RecursionError) as error:
        raise ValueError(f"{file}, line {number}: neither plain text nor a JSON object with a field `text`") from error
    if not isinstance(text, str):
        raise ValueError(f"{file}, line {number}: field `text` must be a string, got {type(text).__name__}")
    return text
