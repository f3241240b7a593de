# ---
# jupyter:
#   accelerator: TPU
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Lookahead decoding: measure it on your prompts
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/jaxlookahead/blob/main/colab/benchmark.ipynb)
#
# Drafts pay where text repeats: its prompt, itself, or earlier responses. How much they pay depends on task, model
# and machine, so measure. Everything here is end to end: wall time of `generate`, prefill included.

# %%
# %pip install -q "jaxlookahead[plots] @ git+https://github.com/OWNER/jaxlookahead"

# %%
import jax

import jaxlookahead as jl

if jax.default_backend() != "tpu":
    print("Warning: no TPU here (Runtime > Change runtime type). All of this runs, but slower, on:", jax.devices()[0])

# %% [markdown]
# ## A model
#
# Small first: `tiny` is a random model with two layers that needs no download. Its text means nothing, but
# everything below works the same. Then take a real one: `smollm2-135m-instruct` (98 MB), a hub id such as
# `Qwen/Qwen3-0.6B`, a Hugging Face directory or a GGUF file.

# %%
MODEL = "tiny"

if MODEL == "tiny":
    from jaxlookahead.models.dummy import tiny_decoder
    from jaxlookahead.models.dummy_tokenizer import TinyTokenizer

    loaded = jl.Loaded(*tiny_decoder(), TinyTokenizer(), (), {}, None)
else:
    try:
        loaded = jl.load(MODEL)
    except RuntimeError as error:
        print(f"{error}\nTaking the default model instead.")
        loaded = jl.load()
model, params, tokenizer = loaded


def chat(text):
    """Token ids of a question, with the model's turn opened."""
    from jaxlookahead.checkpoints.tokenizer import chat_ids

    return chat_ids(tokenizer, [{"role": "user", "content": text}])


# %% [markdown]
# ## Your prompts
#
# By task, since tasks differ most.

# %%
PROMPTS = {
    "editing": ["Rename `d` to `total`: def f(lines): d = 0; for x in lines: d += x; return d"],
    "chat": ["Give me a list of ten things to do on a rainy Saturday, one line each."],
}
MAX_NEW_TOKENS = 24 if MODEL == "tiny" else 160
REPEATS = 1 if MODEL == "tiny" else 3

from jaxlookahead.bench import decode

requests = [
    decode.Request(f"{task} {i}", task, chat(text), MAX_NEW_TOKENS)
    for task, texts in PROMPTS.items()
    for i, text in enumerate(texts)
]

# %% [markdown]
# ## Drafters
#
# `cold` drafters know the request's own text only; `self` ones also the responses before it in the task. All methods
# take turns, so that a busy machine disturbs them alike. `differ` counts responses that part from plain decoding, and
# in brackets those that a floating-point near-tie does not explain: 0.

# %%
methods = [
    decode.Method("plain"),
    decode.Method("trie", "trie", "cold"),
    decode.Method("trie, self", "trie", "self"),
    decode.Method("prompt lookup", "prompt_lookup", "cold"),
]
runs = decode.measure(loaded, requests, methods, repeats=REPEATS)
table = decode.summarize(runs, "plain")
for row in table:
    if "tokens" in row:
        print(
            f"{row['task']:10} {row['method']:14} {row['tokens_per_call']:.2f} tokens per call, "
            f"speed-up {row['speedup']:.2f}, differ {row['different']} ({row['unexplained']})"
        )

# %%
from jaxlookahead.show import Recorder, new_figure, plot_run, plot_stats


def bars(table, what):
    """One group of bars for each task."""
    rows = [row for row in table if "tokens" in row]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    names = list(dict.fromkeys(row["method"] for row in rows))
    figure = new_figure(8, 3)
    axes = figure.subplots()
    for i, name in enumerate(names):
        mine = [row for row in rows if row["method"] == name]
        axes.bar([tasks.index(row["task"]) + 0.2 * i for row in mine], [row[what] for row in mine], 0.2, label=name)
    axes.set_xticks([i + 0.1 * (len(names) - 1) for i in range(len(tasks))], tasks)
    axes.set_ylabel(what.replace("_", " "))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


bars(table, "speedup")

# %%
bars(table, "tokens_per_call")

# %% [markdown]
# ## Width
#
# The width is the most tokens that a step scores. `generate` measures what steps cost and verifies only what pays, up
# to `width`; with `adapt=False` it verifies all. Steps over more tokens cost nearly nothing on a TPU, and soon
# something on a CPU.

# %%
WIDTHS = (1, 4) if MODEL == "tiny" else (1, 2, 4, 8, 16, 32, 64)

speeds = {}
for adapt in (False, True):
    for width in WIDTHS:
        found = decode.measure(loaded, requests, [decode.Method("trie", "trie", "self")], width=width, adapt=adapt)
        all_runs = [run for task in found.values() for run in task["trie"]]
        speeds[adapt, width] = sum(run.tokens for run in all_runs) / sum(run.seconds for run in all_runs)
        print(f"width {width:3}, {'measured cost' if adapt else 'whole drafts '}: {speeds[adapt, width]:.1f} tokens/s")

# %%
figure = new_figure(6, 3)
axes = figure.subplots()
for adapt, name in ((False, "whole drafts"), (True, "by measured cost")):
    axes.plot(WIDTHS, [speeds[adapt, width] for width in WIDTHS], marker=".", label=name)
axes.set_xscale("log", base=2)
axes.set_xlabel("width")
axes.set_ylabel("tokens per second")
axes.legend()
figure

# %% [markdown]
# ## Where the time went, and from cold to warm

# %%
recorder = Recorder("trie")
prompts = [request.prompt for request in requests] * 2
result = jl.generate(
    model, params, prompts, max_new_tokens=MAX_NEW_TOKENS, eos_ids=loaded.eos_ids, drafter=recorder, rows=1
)
print(result.stats)
plot_stats(result.stats)

# %%
plot_run(recorder.steps)
