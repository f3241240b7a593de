"""Sampling: settings, processors, keyed noise, and the choice of the next token."""

from jaxlookahead.accept import Decision
from jaxlookahead.sampling.arrays import SamplingArrays, Sizes, pack
from jaxlookahead.sampling.constraints import Constraint, Matcher, MatcherConstraint
from jaxlookahead.sampling.decide import decide, decide_greedy, is_plain, process, top_logprobs
from jaxlookahead.sampling.noise import Stream, gumbel, stream_key, token_noise, uniform
from jaxlookahead.sampling.params import Sampling
from jaxlookahead.sampling.processors import Context, Processor, advance, init_context

__all__ = [
    "Constraint",
    "Context",
    "Decision",
    "Matcher",
    "MatcherConstraint",
    "Processor",
    "Sampling",
    "SamplingArrays",
    "Sizes",
    "Stream",
    "advance",
    "decide",
    "decide_greedy",
    "gumbel",
    "init_context",
    "is_plain",
    "pack",
    "process",
    "stream_key",
    "token_noise",
    "top_logprobs",
    "uniform",
]
