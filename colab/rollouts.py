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
# # Rollouts for reinforcement learning, with drafts
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/jaxlookahead/blob/main/colab/rollouts.ipynb)
#
# In GRPO every prompt is answered several times, again and again, while the parameters change a little. Most of the
# answers look like earlier ones: the best case for drafts. They change no token, so the samples are those of the
# policy, and so are the log-probabilities.

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
# ## Prompts and a reward
#
# A toy: the reward is the share of letters among the characters of the answer. Put your own in its place.

# %%
ROUNDS = 3 if MODEL == "tiny" else 10
GROUP = 4  # answers to each prompt
MAX_NEW_TOKENS = 24 if MODEL == "tiny" else 64
LEARNING_RATE = 0.02 if MODEL == "tiny" else 1e-4

prompts = [chat("Name a river."), chat("Name a city.")]


def reward(text):
    """From 0 to 1."""
    return sum(c.isalpha() for c in text) / max(len(text), 1)


# %% [markdown]
# ## Rollouts
#
# One drafter for the whole of training: answers of earlier rounds draft those of later ones. Each prompt has a memory of
# its own. `rollout` returns arrays: tokens, their mask, and the policy's log-probability of every token, as sampled.

# %%
from jaxlookahead.rollout import rollout
from jaxlookahead.sampling import Sampling

drafter = jl.TrieDrafter(eos_ids=loaded.eos_ids)


def roll_out(params, seed, drafter):
    """`GROUP` answers to each prompt."""
    return rollout(
        model,
        params,
        prompts,
        GROUP,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_ids=loaded.eos_ids,
        sampling=Sampling(temperature=1.0, seed=seed),
        drafter=drafter,
    )


print(roll_out(params, 0, drafter).generation.stats)

# %% [markdown]
# ## The update
#
# Advantages within each group, one step of plain gradient ascent (use your optimizer). The gradient runs through the
# same `forward` that decodes.

# %%
import jax.numpy as jnp
import numpy as np

from jaxlookahead.step import prefill

LENGTH = max(len(prompt) for prompt in prompts) + MAX_NEW_TOKENS


def batch(rollouts, rewards):
    """Tokens `[B, LENGTH]`, padded alike in every round, a mask of the answers' tokens, and advantages `[B]`."""
    tokens = np.zeros((len(rewards), LENGTH), np.int32)
    answers = np.zeros((len(rewards), LENGTH), bool)
    for row, output in enumerate(rollouts.generation):
        start = len(prompts[output.request])
        end = start + len(output.tokens)
        tokens[row, :start] = prompts[output.request]
        tokens[row, start:end] = output.tokens
        answers[row, start:end] = True
    groups = np.array(rewards).reshape(-1, GROUP)
    advantages = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-6)
    return tokens, answers, advantages.reshape(-1).astype(np.float32)


def log_probabilities(params, tokens):
    """Of each token but the first, given those before it: `[B, LENGTH - 1]`."""
    logits, _ = prefill(model, params, model.init_cache(*tokens.shape), tokens, jnp.int32(0))
    logits = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    return jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]


@jax.jit
def update(params, tokens, answers, advantages):
    """One step of policy gradient."""

    def objective(params):
        logprobs = log_probabilities(params, tokens)
        weights = answers[:, 1:] * advantages[:, None]
        return jnp.sum(weights * logprobs) / jnp.sum(answers)

    gradient = jax.grad(objective)(params)
    return jax.tree.map(lambda p, g: (p + LEARNING_RATE * g).astype(p.dtype), params, gradient)


# %% [markdown]
# The log-probabilities of the rollouts are those that training computes, so nothing has to be scored twice:

# %%
rollouts = roll_out(params, 0, drafter)
tokens, answers, _ = batch(rollouts, [0.0] * len(rollouts.tokens))
scored = np.asarray(jax.jit(log_probabilities)(params, tokens))[0][answers[0, 1:]]
print("largest difference:", np.abs(scored - rollouts.logprobs[0][rollouts.mask[0]]).max())

# %% [markdown]
# ## Training
#
# Parameters change, nothing is compiled again, and the memory follows the policy.

# %%
policy = params
history = []
for turn in range(ROUNDS):
    rollouts = roll_out(policy, turn, drafter)
    rewards = [reward(tokenizer.decode(output.tokens.tolist())) for output in rollouts.generation]
    policy = update(policy, *batch(rollouts, rewards))
    history.append((float(np.mean(rewards)), rollouts.generation.stats.tokens_per_call))
    print(f"round {turn}: reward {history[-1][0]:.3f}, {history[-1][1]:.2f} tokens per call")

# %%
from jaxlookahead.show import new_figure

figure = new_figure(8, 3)
left, right = figure.subplots(1, 2)
left.plot([row[0] for row in history], marker=".")
left.set_xlabel("round")
left.set_ylabel("mean reward")
right.plot([row[1] for row in history], marker=".")
right.set_xlabel("round")
right.set_ylabel("tokens per call")
figure

# %% [markdown]
# ## The same samples without drafts
#
# Training with drafts and without is the same training.

# %%
plain = roll_out(policy, 1, None)
drafted = roll_out(policy, 1, drafter)
print("identical:", np.array_equal(plain.tokens, drafted.tokens))
