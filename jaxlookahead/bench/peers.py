"""Other decoders, on the same prompts and the same weights, for `jaxlookahead bench --against`.

All decode greedily, one prompt at a time, on the CPU.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

PEERS = ("transformers", "xllamacpp")


class Response(NamedTuple):
    """What a peer decoded: how many tokens, and their ids where it tells them."""

    size: int
    tokens: list[int] | None


class Peer(Protocol):
    """A decoder of token ids."""

    def __call__(self, prompt: Sequence[int], max_new_tokens: int) -> Response:
        """Decodes one prompt."""
        ...


def threads() -> int:
    """CPUs that this process may use; as many threads as jax takes."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_peers(name: str, loaded: Any) -> dict[str, Peer]:
    """The decoders of one of `PEERS`, by a name for tables.

    Args:
      name: of `PEERS`.
      loaded: from `load`; its file or directory is read again.

    Raises:
      ImportError: what it needs is not installed.
      ValueError: it can't read the checkpoint.
    """
    if name not in PEERS:
        raise ValueError(f"peer {name!r} is unknown; choose {', '.join(PEERS)}")
    needed = {"transformers": ("torch", "transformers"), "xllamacpp": ("xllamacpp",)}[name]
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(f"--against {name} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    if loaded.source is None:
        raise ValueError(f"--against {name} needs a model that comes from a file or directory")
    return (_transformers if name == "transformers" else _llama_cpp)(loaded)


def _transformers(loaded: Any) -> dict[str, Peer]:
    """Plain greedy decoding, and with prompt lookup of 10 tokens; float32."""
    import torch
    import transformers

    torch.set_num_threads(threads())
    transformers.logging.set_verbosity_error()
    # Else the progress of reading a file ends up in the middle of a table.
    transformers.utils.logging.disable_progress_bar()
    source = loaded.source
    where = {"gguf_file": source.name} if source.is_file() else {}
    directory = source.parent if source.is_file() else source
    model = transformers.AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32, **where).eval()
    eos = list(loaded.eos_ids) or None
    pad = eos[0] if eos else 0

    def peer(lookup: int | None) -> Peer:
        # A configuration of its own: the checkpoint's may ask for sampling.
        config = transformers.GenerationConfig(do_sample=False, eos_token_id=eos, pad_token_id=pad)
        options = {} if lookup is None else {"prompt_lookup_num_tokens": lookup}

        def decode(prompt: Sequence[int], max_new_tokens: int) -> Response:
            ids = torch.tensor([list(prompt)])
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=config,
                    max_new_tokens=max_new_tokens,
                    **options,
                )
            tokens = out[0, len(prompt) :].tolist()
            return Response(len(tokens), tokens)

        return decode

    return {"transformers": peer(None), "transformers, prompt lookup": peer(10)}


def _llama_cpp(loaded: Any) -> dict[str, Peer]:
    """Plain greedy decoding, and with drafts from n-grams of the text; the weights stay as the file holds them."""
    import xllamacpp

    if not loaded.source.is_file():
        raise ValueError(f"--against xllamacpp reads GGUF files; {loaded.source} is a directory")

    def peer(kind: Any) -> Peer:
        params = xllamacpp.CommonParams()
        params.model.path = str(loaded.source)
        params.n_gpu_layers = 0
        params.n_parallel = 1
        params.n_ctx = min(loaded.model.max_length or 8192, 8192)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads()
        params.speculative.types = [kind]
        params.verbosity = -1
        server = xllamacpp.Server(params)

        def decode(prompt: Sequence[int], max_new_tokens: int) -> Response:
            answer = server.handle_completions(
                {
                    "prompt": list(prompt),
                    "n_predict": max_new_tokens,
                    "temperature": 0.0,
                    "cache_prompt": False,
                }
            )
            if "usage" not in answer:
                raise RuntimeError(f"llama.cpp refused a prompt: {answer}")
            return Response(answer["usage"]["completion_tokens"], None)

        return decode

    kinds = xllamacpp.common_speculative_type
    return {
        "llama.cpp": peer(kinds.COMMON_SPECULATIVE_TYPE_NONE),
        "llama.cpp, n-grams": peer(kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE),
    }
