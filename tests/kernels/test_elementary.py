"""Logarithms and powers against those of float64, over all that transforms may ask for."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.kernels import single_values

F32 = np.float32


def numbers() -> np.ndarray:
    rng = np.random.default_rng(5)
    wide, near = np.exp(rng.uniform(-13.8, 88.0, 50_000)), 1 + rng.normal(size=50_000) * 1e-3
    powers = 2.0 ** np.arange(-19, 127)
    edges = [1.0, 1e-6, np.sqrt(0.5), np.sqrt(2.0), np.finfo(F32).max]
    return np.concatenate([wide, near, powers, np.nextafter(powers.astype(F32), F32(0)), edges]).astype(F32)


def off_by(made: np.ndarray, exact: np.ndarray) -> float:
    """Return by how many units in the last place something is off, at most."""
    with np.errstate(over="ignore"):
        unit = np.spacing(np.maximum(np.abs(exact.astype(F32)), np.finfo(F32).tiny))
    there = np.isfinite(exact.astype(F32))
    return float(np.max(np.abs(made[there] - exact[there]) / unit[there]))


def test_a_logarithm_is_off_by_less_than_its_last_place():
    given = numbers()
    assert off_by(single_values.boxcox(given, 0.0, 0.0), np.log(given.astype(np.float64))) < 1


@pytest.mark.parametrize("power", [0.3, 0.5, 2.0, -1.5, 7.0, 0.01, -0.25])
@pytest.mark.filterwarnings("ignore:overflow")
def test_a_power_is_the_nearest_number_or_next_to_it(power):
    given, exact_power = numbers(), float(F32(power))
    exact = (given.astype(np.float64) ** exact_power - 1) / exact_power
    assert off_by(single_values.boxcox(given, power, 0.0), exact) < 1


def test_what_has_no_number_stays_what_it_is():
    given = np.array([np.nan, np.inf, -np.inf, 0.0], F32)
    assert single_values.boxcox(given, 0.0, 0.0).tolist()[1:] == [np.inf, *[F32(np.log(1e-6))] * 2]
    assert single_values.boxcox(given, 0.5, 0.0).tolist()[1] == np.inf
    assert single_values.boxcox(given, -0.5, 0.0).tolist()[1] == 2.0
    for made in (single_values.boxcox(given, power, 0.0) for power in (0.0, 0.5, -0.5)):
        assert np.isnan(made[0])
    assert np.isnan(single_values.logit(given, 1e-6)[0])


def test_what_is_too_large_for_a_float_is_infinite():
    given = np.array([1e30, 1e-6], F32)
    assert single_values.boxcox(given, 3.0, 0.0).tolist() == [np.inf, pytest.approx(-1 / 3)]
    assert single_values.boxcox(given, 1e-42, 0.0).tolist() == pytest.approx([np.log(1e30), np.log(1e-6)], rel=1e-6)


@pytest.mark.parametrize("divisor", [3, 97, 1_000_003, 2**31 - 1, 2**62 + 1, 2**63 - 1])
def test_a_remainder_is_that_of_whole_numbers(divisor):
    rng = np.random.default_rng(7)
    edges = [0, 1, -1, divisor, -divisor, divisor - 1, 1 - divisor, 2**63 - 1, -(2**63), -(2**63) + 1]
    given = np.concatenate([rng.integers(-(2**63), 2**63 - 1, 5000), np.array(edges)])
    made = single_values.positive_modulus(given, divisor)
    assert made.tolist() == [number % divisor for number in given.tolist()]
