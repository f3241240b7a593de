"""`google-tunix`'s rollout interface: an engine for its `RLCluster` that drafts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate import utils as generate_utils
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl import common, reshard
from tunix.rl import utils as rl_utils
from tunix.rl.rollout import base_rollout

from jaxlookahead.adapters.tunix import from_tunix
from jaxlookahead.drafters.protocol import Drafter
from jaxlookahead.drafters.registry import make_drafter
from jaxlookahead.models.protocol import Params
from jaxlookahead.rollout import Rollout, rollout
from jaxlookahead.sampling.params import Sampling


class LookaheadRollout(base_rollout.BaseRollout):  # type: ignore[misc, unused-ignore]
    """A rollout engine for `ClusterConfig(rollout_engine=LookaheadRollout, ...)`.

    For options use `functools.partial(LookaheadRollout, rows=32)`. As in tunix's own engine `top_p=None` is greedy and
    responses come without their end token. The drafter lives as long as the engine and remembers each prompt's
    responses. Weights are read from the module at every call, so what updates the module updates the rollouts.

    Attributes:
      last: the `Rollout` of the latest call, with its statistics.
    """

    last: Rollout | None = None

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: base_rollout.RolloutConfig | None = None,
        *,
        drafter: Drafter | str | None = "trie",
        keep_eos: bool = False,
        **options: Any,
    ):
        """The first four arguments are those that `RLCluster` passes.

        Args:
          rollout_actor: a `Llama3`, `Qwen2` or `Qwen3` of tunix.
          tokenizer: of a kind that tunix's `TokenizerAdapter` takes.
          mesh: where to decode; where the module lies on another one it is copied, and `update_params` feeds the copy.
          rollout_config: not needed: each call brings its own.

        Other Args:
          drafter: see `jaxlookahead.generate`.
          keep_eos: whether the end token stays in the responses, so that a loss sees it.
          **options: further options of `jaxlookahead.generate`, such as `rows` and `width`.

        Raises:
          TypeError, ValueError: the model is of another kind; see `from_tunix`.
        """
        del rollout_config
        from_tunix(rollout_actor)
        if mesh is not None and not mesh.empty:
            rollout_actor = reshard.reshard_model_to_mesh(rollout_actor, mesh)
        self._model = rollout_actor
        self._tokenizer = tokenizer if isinstance(tokenizer, TokenizerAdapter) else TokenizerAdapter(tokenizer)
        self._drafter, self._keep_eos, self._options = make_drafter(drafter), keep_eos, options
        self._calls = 0

    def generate(
        self, prompts: list[str], rollout_config: base_rollout.RolloutConfig, **kwargs: Any
    ) -> base_rollout.RolloutOutput:
        """Draws a response for each prompt; equal prompts are prefilled once, and each has noise of its own.

        Without a `seed` in the configuration every call draws anew; with one, equal calls give equal tokens.
        `logits` stays empty. `logprobs` are those of the distribution that the tokens were sampled from.

        Raises:
          TypeError: an argument that this engine has no use for.
        """
        if kwargs:
            raise TypeError(f"LookaheadRollout.generate does not support {', '.join(sorted(kwargs))}")
        config, pad = rollout_config, self.pad_id()
        eos = list(config.eos_tokens or [self.eos_id()])
        tokens = [self._tokenize(prompt) for prompt in prompts]
        places: dict[tuple[int, ...], list[int]] = {}
        for i, each in enumerate(tokens):
            places.setdefault(tuple(each), []).append(i)
        counts = set(map(len, places.values()))
        # Groups of one size, as GRPO asks for, are samples of one prompt.
        samples = counts.pop() if len(counts) == 1 else 1
        order = [i for group in places.values() for i in group] if samples > 1 else list(range(len(tokens)))
        model, params = from_tunix(self._model)
        drawn = rollout(
            model,
            params,
            [tokens[i] for i in order[::samples]],
            samples,
            max_new_tokens=config.max_tokens_to_generate,
            sampling=self._sampling(config),
            drafter=self._drafter,
            pad_id=pad,
            eos_ids=eos,
            **self._options,
        )
        self.last, self._calls = drawn, self._calls + 1
        outputs: list[Any] = [None] * len(tokens)
        for i, output in zip(order, drawn.generation, strict=True):
            kept = len(output.tokens) - (output.finish_reason == "eos" and not self._keep_eos)
            outputs[i] = (output.tokens[:kept], output.scores["logprob"][:kept])
        width = config.max_prompt_length
        longest = max(map(len, tokens))
        if width is None or width < longest:
            width = generate_utils.next_power_of_2(longest)
        padded = np.full((len(tokens), width), pad, np.int32)
        for row, each in zip(padded, tokens, strict=True):
            row[width - len(each) :] = each
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(response.tolist()) for response, _ in outputs],
            logits=[],
            tokens=[response for response, _ in outputs],
            left_padded_prompt_tokens=padded,
            logprobs=[scores for _, scores in outputs] if config.return_logprobs else None,
        )

    def _tokenize(self, text: str) -> list[int]:
        ids = [int(token) for token in self._tokenizer.encode(text)]
        bos = self._tokenizer.bos_id()
        return self._tokenizer.dedup_bos_ids([bos, *ids] if bos else ids)

    def _sampling(self, config: base_rollout.RolloutConfig) -> Sampling:
        seed = self._calls if config.seed is None else _integer(config.seed)
        if config.top_p is None or config.temperature == 0:
            return Sampling(seed=seed)
        top_k = config.top_k if config.top_k is not None and config.top_k > 0 else 0
        return Sampling(temperature=config.temperature, top_p=config.top_p, top_k=top_k, seed=seed)

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Log-probabilities `[B, M]` of responses `[B, M]` to left padded prompts `[B, P]` under the model's logits."""
        graphdef, state = nnx.split(self._model)
        return common.compute_per_token_logps(
            graphdef,
            state,
            prompt_tokens=jnp.asarray(prompt_tokens),
            completion_tokens=jnp.asarray(completion_tokens),
            pad_id=self.pad_id(),
            eos_id=self.eos_id(),
        )

    def update_params(self, params: Params, filter_types: tuple[Any, ...] | None = None) -> None:
        """Puts new weights, all or some, in the place, the sharding and the dtype of the old ones.

        Args:
          params: an `nnx.State`, or nested dicts of arrays; they may lie on another mesh.
          filter_types: which kinds of variables `params` holds.

        Raises:
          ValueError: an array that the model has no place for.
        """
        old = nnx.to_pure_dict(nnx.state(self._model, filter_types or True))
        new = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
        held, given = (rl_utils.to_flat_dict(tree)[0] for tree in (old, new))
        unknown = sorted(".".join(map(str, path)) for path in given.keys() - held.keys())
        if unknown:
            raise ValueError(f"params holds {unknown[0]}, which the rollout model has no place for")
        if rl_utils.get_pytree_mesh_info(old) is not None:
            given = reshard.reshard_pytree(given, {path: held[path] for path in given})
        nested: dict[Any, Any] = {}
        for path, leaf in given.items():
            inner = nested
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
            inner[path[-1]] = leaf.astype(held[path].dtype)
        nnx.update(self._model, nested)

    def pad_id(self) -> int:
        """The tokenizer's id for padding."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The tokenizer's end token."""
        return self._tokenizer.eos_id()

    def model(self) -> nnx.Module:
        """The module that decodes."""
        return self._model


def _integer(seed: Any) -> int:
    """A seed below 2^64 from an integer or a jax key, old or new."""
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    number = 0
    for word in np.asarray(seed).ravel().tolist():
        number = number << 32 | word
    return number % 2**64
