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
# # Lookahead decoding: quick start
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/jaxlookahead/blob/main/colab/quickstart.ipynb)
#
# Faster decoding with the same tokens: a trie remembers text, drafts a tree of likely continuations before each model
# call, and one call checks the whole tree.

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
# ## Decode
#
# Twice: plainly, and with drafts. The tokens are the same.

# %%
MAX_NEW_TOKENS = 32 if MODEL == "tiny" else 192
prompt = chat(
    "Write a Python class `Stack` with the methods push, pop, peek, is_empty and size, and then a class `Queue` with "
    "the methods enqueue, dequeue, peek, is_empty and size. Give only the code."
)
options = {"max_new_tokens": MAX_NEW_TOKENS, "eos_ids": loaded.eos_ids, "logprobs": True}
drafter = jl.TrieDrafter(labels=True, eos_ids=loaded.eos_ids)
plain = jl.generate(model, params, [prompt], drafter=None, **options)
result = jl.generate(model, params, [prompt], drafter=drafter, **options)
assert jl.first_difference(plain[0], result[0]) is None or jl.first_difference(plain[0], result[0]).margin < 0.1
print(result.stats)

# %% [markdown]
# ## See it
#
# In colour: tokens that a draft had proposed, by where the draft came from (`request`: the prompt and the response
# itself, `shared`: responses before). Point at a token to see its probability.

# %%
from jaxlookahead.show import Recorder, plot_acceptance, plot_stats, plot_tree, show, text_tree

show(result[0], tokenizer)

# %% [markdown]
# ## How much faster?
#
# The first call of each kind compiles, so both are run again. The drafter has seen the response by now, which is the
# case of a repeated question; a fresh `TrieDrafter()` is the case of a new one.

# %%
import time


def tokens_per_second(make_drafter):
    """The best of three runs."""
    best = 0.0
    for _ in range(3):
        drafter = make_drafter()
        start = time.perf_counter()
        tokens = jl.generate(model, params, [prompt], drafter=drafter, **options).stats.tokens
        best = max(best, tokens / (time.perf_counter() - start))
    return best


speeds = {
    "plain": tokens_per_second(lambda: None),
    "new question": tokens_per_second(jl.TrieDrafter),
    "repeated question": tokens_per_second(lambda: drafter),
}
for name, speed in speeds.items():
    print(f"{name:18} {speed:8.1f} tokens/s   {speed / speeds['plain']:.2f} x")

# %% [markdown]
# ## What a draft looks like
#
# `Recorder` keeps every tree that was verified. Here is the one of which most was accepted; green is what the model
# confirmed.

# %%
recorder = Recorder(drafter)
result = jl.generate(model, params, [prompt], drafter=recorder, adapt=False, **options)
step = max(recorder.steps, key=lambda step: (len(step.accepted), -len(step.draft)))

import rich

rich.print(text_tree(step.draft, tokenizer, accepted=step.accepted, root=step.root))

# %%
plot_tree(step.draft, tokenizer, accepted=step.accepted, root=step.root)

# %%
plot_acceptance(recorder.steps)

# %%
plot_stats(result.stats)

# %% [markdown]
# ## Sampling
#
# The noise of a token depends on seed, request and position alone, so sampled text is the same with and without
# drafts, too.

# %%
from jaxlookahead.sampling import Sampling

sampling = Sampling(temperature=0.8, top_p=0.95, seed=1, num_samples=2)
with_drafts = jl.generate(model, params, [prompt], drafter=drafter, sampling=sampling, **options)
without = jl.generate(model, params, [prompt], drafter=None, sampling=sampling, **options)
print("identical:", with_drafts.tokens == without.tokens)
show(with_drafts[1], tokenizer)

# %% [markdown]
# ## Keep the memory
#
# `drafter.save(path)` writes what the trie has learnt; `load` reads it, in a later session.

# %%
import pathlib
import tempfile

path = pathlib.Path(tempfile.mkdtemp()) / "memory.trie"
drafter.save(path)
again = jl.TrieDrafter()
again.load(path)
print(f"{path.stat().st_size:,} bytes", again.stats())
