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
# # Lookahead decoding with your own model
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/jaxlookahead/blob/main/colab/your_own_model.ipynb)
#
# Any decoder that takes tokens, positions, a mask and a cache can be decoded. Here is a complete one in Flax, the
# check that finds out whether a model keeps the contract, and what the check says about one that doesn't.

# %%
# %pip install -q "jaxlookahead[plots] @ git+https://github.com/OWNER/jaxlookahead"

# %%
import jax

import jaxlookahead as jl

if jax.default_backend() != "tpu":
    print("Warning: no TPU here (Runtime > Change runtime type). All of this runs, but slower, on:", jax.devices()[0])

# %% [markdown]
# ## A transformer in Flax
#
# The contract: write the new cache entries at slots `[start, start + T)`, attend where `mask[b, t, s]` is True, and
# take positions from `positions`, which in a tree of guesses are not consecutive. Nothing else. `jl.Model` has the
# details.

# %%
import jax.numpy as jnp
from flax import nnx
from jax import lax

# Small first, then as large as you like.
SIZE = 64
LAYERS = 2
HEADS = 4
VOCABULARY = 96


class Block(nnx.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.qkv = nnx.Linear(SIZE, 3 * SIZE, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(SIZE, SIZE, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(SIZE, 4 * SIZE, rngs=rngs)
        self.down = nnx.Linear(4 * SIZE, SIZE, rngs=rngs)
        self.norm1 = nnx.RMSNorm(SIZE, rngs=rngs)
        self.norm2 = nnx.RMSNorm(SIZE, rngs=rngs)

    def __call__(self, x, mask, cache, start):
        batch, length, _ = x.shape
        q, k, v = jnp.split(self.qkv(self.norm1(x)).reshape(batch, length, HEADS, -1), 3, axis=-1)
        keys = lax.dynamic_update_slice(cache["k"], k, (0, start, 0, 0))
        values = lax.dynamic_update_slice(cache["v"], v, (0, start, 0, 0))
        scores = jnp.einsum("bthd,bshd->bhts", q, keys) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e9), axis=-1)
        x = x + self.out(jnp.einsum("bhts,bshd->bthd", weights, values).reshape(x.shape))
        x = x + self.down(jax.nn.gelu(self.up(self.norm2(x))))
        return x, {"k": keys, "v": values}


class Transformer(nnx.Module):
    """A decoder with learnt positions."""

    vocab_size = VOCABULARY
    max_length = 512

    def __init__(self, *, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(VOCABULARY, SIZE, rngs=rngs)
        self.positions = nnx.Embed(self.max_length, SIZE, rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(SIZE, VOCABULARY, rngs=rngs)

    def init_cache(self, batch, slots):
        shape = (batch, slots, HEADS, SIZE // HEADS)
        return [{"k": jnp.zeros(shape), "v": jnp.zeros(shape)} for _ in range(LAYERS)]

    def __call__(self, tokens, positions, mask, cache, start):
        x = 3 * (self.tokens(tokens) + self.positions(positions))
        new_cache = []
        for block, entries in zip(self.blocks, cache, strict=True):
            x, entries = block(x, mask, entries, start)
            new_cache.append(entries)
        return 8 * self.head(x), new_cache


# %% [markdown]
# ## The check
#
# `from_nnx` splits the module into a model and its parameters. `check_model` scores a random tree, compares every
# node with its own path run alone, then commits a path and compares the next step with a fresh prefill.

# %%
from jaxlookahead.models.flax_nnx import from_nnx

model, params = from_nnx(Transformer(rngs=nnx.Rngs(0)))
print(jl.check_model(model, params))

# %% [markdown]
# A model that ignores the mask, as many do that build a causal one of their own, is found out before it decodes
# nonsense:


# %%
class Careless(Transformer):
    """Makes a causal mask by slot in place of the given one."""

    def __call__(self, tokens, positions, mask, cache, start):
        slots = jnp.arange(mask.shape[-1])
        mask = jnp.broadcast_to(slots <= start + jnp.arange(mask.shape[1])[:, None], mask.shape)
        return super().__call__(tokens, positions, mask, cache, start)


from jaxlookahead.testing import ModelCheckError

try:
    jl.check_model(*from_nnx(Careless(rngs=nnx.Rngs(0))))
except ModelCheckError as error:
    print(error)
else:
    raise AssertionError("the check let a careless model pass")

# %% [markdown]
# ## Decode
#
# Token ids in, token ids out. Drafts are right more often than one would think of a random model, because it soon
# repeats itself.

# %%
prompts = [[1, 2, 3, 4] * 4, [50, 40, 30]]
plain = jl.generate(model, params, prompts, max_new_tokens=64, drafter=None)
result = jl.generate(model, params, prompts, max_new_tokens=64)
print("identical:", plain.tokens == result.tokens)
print(result.stats)

# %% [markdown]
# ## A model that is not yours to change
#
# Wrap it: any hashable object with `vocab_size`, `max_length`, `init_cache` and `forward` is a model. A frozen
# dataclass is a good one. The module of the wrapped model may come from any codebase: translate the arguments into
# its own, and let `check_model` tell whether that is right.

# %%
import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """Calls a function of another codebase."""

    inner: Any
    vocab_size: int
    max_length: int | None

    def init_cache(self, batch, slots):
        # Their layout may differ from layer to layer: the axes are found by comparing shapes.
        return [{"v": entry["v"], "k": entry["k"]} for entry in self.inner.init_cache(batch, slots)]

    def forward(self, params, tokens, positions, mask, cache, start):
        return self.inner.forward(params, tokens, positions, mask, cache, start)


wrapped = Wrapped(model, model.vocab_size, model.max_length)
print(jl.check_model(wrapped, params))
print("identical:", jl.generate(wrapped, params, prompts, max_new_tokens=64).tokens == plain.tokens)

# %% [markdown]
# ## Models of tunix
#
# For `google-tunix` there is an adapter. It takes the modules as they are, here a small random one of the Qwen3 family.

# %%
try:
    from tunix.models.qwen3 import model as qwen3
except ImportError:
    print("tunix is not installed here: install google-tunix, then run this cell again")
else:
    from jaxlookahead.adapters.tunix import from_tunix

    config = qwen3.ModelConfig(
        num_layers=2,
        vocab_size=64,
        embed_dim=32,
        hidden_dim=48,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-6,
    )
    tunix_model, tunix_params = from_tunix(qwen3.Qwen3(config, rngs=nnx.Rngs(0)))
    print(jl.check_model(tunix_model, tunix_params))

# %% [markdown]
# ## With drafts that try to break it
#
# The strongest test is equality under bad drafts.

# %%
from jaxlookahead.testing import ATTACKS, AdversarialDrafter

for attack in ATTACKS:
    drafter = AdversarialDrafter(attack, model.vocab_size)
    broken = jl.generate(model, params, prompts, max_new_tokens=32, drafter=drafter, adapt=False)
    print(f"{attack:14}", [a == b[:32] for a, b in zip(broken.tokens, plain.tokens, strict=True)])
