import jax
import jax.numpy as jnp
import numpy as np

from jaxlookahead.sampling import Stream, gumbel, stream_key, token_noise, uniform
from jaxlookahead.sampling.noise import bits, threefry2x32


def test_threefry_known_answers():
    # The vectors of Random123, file kat_vectors, threefry2x32 with 20 rounds.
    cases = [
        ((0, 0, 0, 0), (0x6B200159, 0x99BA4EFE)),
        ((2**32 - 1,) * 4, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344, 0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ]
    for words, want in cases:
        got = threefry2x32(*(jnp.uint32(word) for word in words))
        assert tuple(int(word) for word in got) == want


def test_bits_depend_on_their_names_alone():
    seed = np.array([[1, 0], [1, 0], [2, 0]], np.uint32)
    keys = stream_key(seed, np.array([5, 6, 5]), np.array([3, 3, 4]), Stream.TOKEN)
    together = np.asarray(bits(keys, 64))
    for row in range(3):
        np.testing.assert_array_equal(jax.jit(bits, static_argnums=1)(keys[row], 50), together[row, :50])


def test_noise_depends_on_seed_request_and_position_alone():
    seed = np.array([[1, 0], [1, 0], [2, 0], [1, 7]], np.uint32)
    request, position = np.array([5, 6, 5, 5]), np.array([3, 3, 3, 3])
    batch = np.asarray(token_noise(seed, request, position, 64))
    for row in range(4):
        alone = np.asarray(token_noise(seed[row], request[row], position[row], 64))
        # Logarithms may be rounded otherwise in another program; the bits below them are the same.
        np.testing.assert_allclose(batch[row], alone, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            alone[:40], token_noise(seed[row], request[row], position[row], 40), rtol=1e-5, atol=1e-6
        )
    later = np.asarray(token_noise(seed, request, position + 1, 64))
    drawn = np.concatenate([batch, later]).reshape(8, -1)
    assert len(np.unique(drawn, axis=0)) == 8


def test_noise_ignores_the_flags_of_the_user():
    want = np.asarray(token_noise(np.array([1, 2], np.uint32), 3, 4, 32))
    partitionable = jax.config.jax_threefry_partitionable
    implementation = jax.config.jax_default_prng_impl
    try:
        jax.config.update("jax_threefry_partitionable", not partitionable)
        jax.config.update("jax_default_prng_impl", "rbg")
        np.testing.assert_array_equal(token_noise(np.array([1, 2], np.uint32), 3, 4, 32), want)
    finally:
        jax.config.update("jax_threefry_partitionable", partitionable)
        jax.config.update("jax_default_prng_impl", implementation)


def test_streams_differ():
    keys = [stream_key(np.array([1, 0], np.uint32), 0, 0, stream) for stream in Stream]
    assert len({tuple(np.asarray(key).tolist()) for key in keys}) == len(Stream)


def test_uniform_and_gumbel_follow_their_laws():
    key = jnp.array([3, 4], jnp.uint32)
    u = np.sort(np.asarray(uniform(key, 200_000), np.float64))
    assert u[0] >= 0
    assert u[-1] < 1
    grid = (np.arange(len(u)) + 0.5) / len(u)
    # 1.95 / sqrt(n) is the Kolmogorov-Smirnov bound for 1 in 1000; the seed is fixed.
    assert abs(u - grid).max() < 1.95 / len(u) ** 0.5
    g = np.sort(np.asarray(gumbel(key, 200_000, offset=200_000), np.float64))
    assert np.isfinite(g).all()
    assert abs(np.exp(-np.exp(-g)) - grid).max() < 1.95 / len(g) ** 0.5


def test_offsets_continue_a_draw():
    key = jnp.array([3, 4], jnp.uint32)
    np.testing.assert_array_equal(uniform(key, 10)[4:], uniform(key, 6, offset=4))
