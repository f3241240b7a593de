"""Weights and corrections learnt online."""

import random

import pytest

from jaxlookahead.drafters.calibration import (
    BINS,
    LENGTH_BUCKET,
    LENGTHS,
    MISS_BUCKET,
    MISSES,
    TOTAL_BUCKET,
    TOTALS,
    Calibration,
    rarity_bucket,
    success_bucket,
    uniqueness_bucket,
)


def test_buckets_rise_and_fill_their_range():
    for buckets, count in ((LENGTH_BUCKET, LENGTHS), (TOTAL_BUCKET, TOTALS), (MISS_BUCKET, MISSES)):
        assert buckets == sorted(buckets) and set(buckets) == set(range(count))
    assert [success_bucket(rate) for rate in (0.0, 0.3, 0.6, 0.9)] == [0, 1, 2, 3]
    assert [uniqueness_bucket(n, False) for n in (0, 1, 2, 3, 5, 6)] == [0, 0, 1, 2, 2, 3]
    assert uniqueness_bucket(2, True) == 4
    assert [rarity_bucket(n, 100_000) for n in (0, 10, 100, 1000)] == [1, 2, 3, 4]


def test_weights_become_the_share_of_right_predictions():
    rng = random.Random(0)
    calibration = Calibration()
    # Two predictions of different tokens: right in 60 %, and in half of what is left.
    for _ in range(20000):
        first = rng.random() < 0.6
        second = not first and rng.random() < 0.5
        weights = calibration.copy[500], calibration.context[9]
        parts = [
            (calibration.copy, calibration.copy_seen, 500, weights[0] * first),
            (calibration.context, calibration.context_seen, 9, (1 - weights[0]) * weights[1] * second),
        ]
        calibration.learn(parts, (1 - weights[0]) * (1 - weights[1]) * 0.01)
    assert calibration.copy[500] == pytest.approx(0.6, abs=0.08)
    assert calibration.context[9] == pytest.approx(0.5, abs=0.08)
    assert calibration.copy_seen[500] == 20000


def test_path_probabilities_are_corrected():
    rng = random.Random(0)
    calibration = Calibration()
    assert calibration.corrected([0.5, 0.01, 1.0], [-1] * 3) == pytest.approx([0.5, 0.01, 1.0])
    for _ in range(3000):
        calibration.verified([0.8, 0.4], [0] if rng.random() < 0.4 else [])
    high, low = calibration.corrected([0.8, 0.4], [-1, -1])
    assert high == pytest.approx(0.4, abs=0.08) and low < 0.05
    assert all(0 <= prob <= 1 for prob in calibration.corrected([i / 100 for i in range(101)], [-1] * 101))
    for _ in range(3000):
        calibration.verified([0.99, 0.5], [0, 1])
    assert max(calibration.corrected([0.99, 1.0], [-1, -1])) <= 1.0
    # What would turn out likelier than its parent gets what that gets.
    assert calibration.corrected([0.4, 0.5], [-1, 0])[0] == calibration.corrected([0.4, 0.5], [-1, 0])[1]
    assert len(calibration.estimated) == BINS + 1


def test_namespaces_do_not_share_calibrations():
    one, two = Calibration(), Calibration()
    one.copy[3] = 0.9
    one.extra_weight("x")[0][0] = 0.8
    assert two.copy[3] != 0.9 and two.extra_weight("x")[0][0] == 0.3
