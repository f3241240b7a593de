"""Constraints computed on the host: grammars, schemas, lists of allowed words.

The walk over a draft tree asks for a mask once per visited node, and it visits only nodes whose tokens were
all emitted. So a constraint is a function of emitted tokens: no draft ever reaches it, and a rejected draft
leaves no trace.
"""

from __future__ import annotations

import collections
import threading
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np


@runtime_checkable
class Constraint(Protocol):
    """Says which tokens may come next. Must be hashable: steps are compiled once per constraint object."""

    def __hash__(self) -> int: ...

    def allowed(self, request: int, emitted: tuple[int, ...]) -> np.ndarray | None:
        """Returns a `[V]` bool mask of the tokens that may follow, or None where all may.

        Args:
          request: the request id, as passed to `pack`.
          emitted: the tokens that the request has emitted so far, the prompt not included.

        Called any number of times for the same arguments, in any order of requests; the answer must depend on
        the arguments alone. At least one token must be allowed (EOS where the constraint is fulfilled).
        """


@runtime_checkable
class Matcher(Protocol):
    """A grammar matcher with explicit states, for `MatcherConstraint`. No call changes a state."""

    def start(self, request: int) -> Any:
        """Returns the state before the first token."""

    def step(self, state: Any, token: int) -> Any:
        """Returns the state after `token`, leaving `state` as it was."""

    def mask(self, state: Any) -> np.ndarray | None:
        """Returns the `[V]` bool mask of tokens allowed in `state`, or None where all are."""


class MatcherConstraint:
    """A `Constraint` that steps a `Matcher` once per emitted token and remembers the states it passed."""

    def __init__(self, matcher: Matcher, *, max_states: int = 4096):
        """Wraps `matcher`; the `max_states` most recently used states are kept, others are computed again."""
        if max_states < 1:
            raise ValueError(f"max_states = {max_states}: keep at least one state")
        self._matcher = matcher
        self._max_states = max_states
        self._states: collections.OrderedDict[tuple[int, tuple[int, ...]], Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def allowed(self, request: int, emitted: tuple[int, ...]) -> np.ndarray | None:
        """See `Constraint.allowed`."""
        with self._lock:
            known = len(emitted)
            while known and (request, emitted[:known]) not in self._states:
                known -= 1
            state = self._remember(request, emitted[:known], None)
            for i in range(known, len(emitted)):
                state = self._remember(request, emitted[: i + 1], self._matcher.step(state, emitted[i]))
            return self._matcher.mask(state)

    def _remember(self, request: int, emitted: tuple[int, ...], state: Any) -> Any:
        key = (request, emitted)
        if key not in self._states:
            self._states[key] = state if emitted else self._matcher.start(request)
        self._states.move_to_end(key)
        while len(self._states) > self._max_states:
            self._states.popitem(last=False)
        return self._states[key]


def constraint_mask(
    constraint: Constraint,
    request: jax.Array,
    history: jax.Array,
    prompt_length: jax.Array,
    length: jax.Array,
    shape: tuple[int, int],
) -> jax.Array:
    """Asks `constraint` for the masks of all rows with a request, through one host callback.

    Args:
      constraint: static.
      request: `[B]` int32; rows below 0 are left unconstrained.
      history: `[B, L]` int32.
      prompt_length: `[B]` int32.
      length: `[B]` int32.
      shape: `(B, V)`.

    Returns:
      `[B, V]` bool.
    """

    def ask(request: Any, history: Any, prompt_length: Any, length: Any) -> np.ndarray:
        masks = np.ones(shape, bool)
        history = np.asarray(history)
        for row, number in enumerate(np.asarray(request).tolist()):
            if number < 0:
                continue
            emitted = tuple(history[row, int(prompt_length[row]) : int(length[row])].tolist())
            mask = constraint.allowed(number, emitted)
            if mask is None:
                continue
            mask = np.asarray(mask)
            if mask.shape != shape[1:] or mask.dtype != bool:
                raise ValueError(
                    f"constraint.allowed returned {mask.dtype}{list(mask.shape)} for request {number}, "
                    f"it must return bool[{shape[1]}] or None"
                )
            masks[row] = mask
        return masks

    result = jax.ShapeDtypeStruct(shape, jnp.bool_)
    return jax.pure_callback(ask, result, request, history, prompt_length, length, vmap_method="sequential")
