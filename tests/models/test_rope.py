"""Rotary scalings against values worked out by hand from their definitions."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlookahead.models.rope import RopeConfig, inverse_frequencies, rotation

THETA = 10000.0
PLAIN = THETA ** (-np.arange(0, 16, 2) / 16)


def test_default_and_linear():
    frequencies, factor = inverse_frequencies(RopeConfig(), 16)
    np.testing.assert_allclose(frequencies, PLAIN, rtol=1e-6)
    scaled, _ = inverse_frequencies(RopeConfig(kind="linear", factor=4.0), 16)
    np.testing.assert_allclose(scaled, PLAIN / 4, rtol=1e-6)
    assert factor == 1.0


def test_llama3_keeps_short_wavelengths_divides_long_ones_and_blends_between():
    rope = RopeConfig(kind="llama3", factor=8.0, original_length=64, low_freq_factor=1.0, high_freq_factor=4.0)
    frequencies, factor = inverse_frequencies(rope, 16)
    assert factor == 1.0
    for frequency, plain in zip(frequencies, PLAIN, strict=True):
        wavelength = 2 * math.pi / plain
        if wavelength < 64 / 4:
            expected = plain
        elif wavelength > 64:
            expected = plain / 8
        else:
            smooth = (64 / wavelength - 1) / 3
            expected = (1 - smooth) * plain / 8 + smooth * plain
        assert frequency == pytest.approx(expected, rel=1e-5)
    assert 0 < sum(16 < 2 * math.pi / plain < 64 for plain in PLAIN) < 8


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_blends_by_rotations(truncate):
    rope = RopeConfig(kind="yarn", factor=4.0, original_length=256, truncate=truncate)
    frequencies, factor = inverse_frequencies(rope, 16)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    ends = [16 * math.log(256 / (turns * 2 * math.pi)) / (2 * math.log(THETA)) for turns in (32, 1)]
    low, high = (math.floor(ends[0]), math.ceil(ends[1])) if truncate else ends
    for i, (frequency, plain) in enumerate(zip(frequencies, PLAIN, strict=True)):
        share = min(max((i - max(low, 0)) / (high - max(low, 0)), 0), 1)
        assert frequency == pytest.approx(plain / 4 * share + plain * (1 - share), rel=1e-5)
    assert frequencies[0] == pytest.approx(1) and frequencies[-1] == pytest.approx(PLAIN[-1] / 4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
        ({"mscale": 1.0}, 0.1 * math.log(4) + 1),
    ],
)
def test_yarn_attention_factor(options, expected):
    rope = RopeConfig(kind="yarn", factor=4.0, original_length=64, **options)
    assert inverse_frequencies(rope, 16)[1] == pytest.approx(expected)
    cos, _ = rotation(rope, 16, jnp.zeros((1, 1), jnp.int32))
    np.testing.assert_allclose(cos, expected, rtol=1e-6)


def test_rotation_of_positions():
    cos, sin = rotation(RopeConfig(), 16, jnp.array([[0, 3], [500, 7]]))
    assert cos.shape == sin.shape == (2, 2, 8)
    np.testing.assert_allclose(cos[1, 0], np.cos(500 * PLAIN), atol=1e-4)
    np.testing.assert_allclose(sin[0, 1], np.sin(3 * PLAIN), atol=1e-6)


def test_from_hf_reads_both_spellings():
    old = {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    inner = {"rope_type": "llama3", **old["rope_scaling"], "rope_theta": 500000.0}
    read = RopeConfig.from_hf(old)
    assert read == RopeConfig.from_hf({"rope_parameters": inner})
    assert (read.kind, read.theta, read.factor, read.original_length) == ("llama3", 500000.0, 8.0, 8192)
    assert RopeConfig.from_hf({}) == RopeConfig.from_hf({"rope_scaling": None, "rope_theta": 10000.0}) == RopeConfig()


def test_from_hf_takes_the_original_length_from_the_context_length():
    read = RopeConfig.from_hf({"max_position_embeddings": 77, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}})
    assert read.original_length == 77


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling of type 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters of type 'longrope' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' lacks 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "slope": 1}}, "not supported: slope"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn' needs original_length"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "must be at least 1, got 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one set of values for all layers"),
    ],
)
def test_what_is_not_supported_is_named(config, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_hf(config)
