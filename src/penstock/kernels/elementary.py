"""Logarithms and powers of float32 that a compiler computes for many numbers at once.

A call of the C library takes one number at a time, and numpy's own vectors are slower than these and off by more. Here
all is sums, products, one division and the bits of numbers: no branches, no tables, no conversion that a processor has
no vectors of. A number is a power of two times a fraction from sqrt(1/2) to sqrt(2), and 1 + f is such a fraction. With
s = f / (2 + f) its logarithm is log(1 + f) = 2 (s + s**3 / 3 + s**5 / 5 + ...), in which s is less than 0.172.

Numbers are above 1e-37, inf or NaN; inf and NaN come out as they should.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from penstock.kernels.compiling import inlined

I32, I64, F32, F64 = np.int32, np.int64, np.float32, np.float64
HALF_ROOT, TO_HALF_ROOT = I32(0x3F3504F3), I32(0x3F800000 - 0x3F3504F3)  # the bits of sqrt(1/2), and up to those of 1
FRACTION_BITS, FRACTION, BIAS = I32(23), I32(0x7FFFFF), I32(127)
SERIES = tuple(map(F32, (0.66666662693, 0.40000972152, 0.28498786688, 0.24279078841)))
LN2_HIGH, LN2_LOW = F32(6.9313812256e-01), F32(9.0580006145e-06)  # the first has so few bits that products are exact
HALF, ONE, TWO, INFINITE = F32(0.5), F32(1), F32(2), F32(np.inf)
LN2, PER_LN2 = 0.6931471805599453, 1.4426950408889634
LEAST_EXPONENT, MOST_EXPONENT = -708.0, 709.0  # e to these are doubles, and beyond what a float32 holds
ROUNDING = 6755399441055744.0  # 3 * 2**51: a double near it has no bits for a fraction, and the whole number lowest
DOUBLE_FRACTION_BITS, DOUBLE_ONE = I64(52), I64(0x3FF0000000000000)


def _multiply_add(_: Any, __: Any, ___: Any, ____: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, numbers: Any) -> Any:
        return builder.fma(*numbers)

    return types.float64(types.float64, types.float64, types.float64), generate


multiply_add: Any = intrinsic(_multiply_add)
"""A float64 times another plus a third, rounded once: one instruction, and no compiler makes it of two by itself."""


def _taken_as(given: Any, made: Any, bits: Any) -> Any:
    """Return what takes the bits of one number as another: `bits` is the type that LLVM has for it."""

    def typed(_: Any, number: Any) -> Any:
        return made(given), lambda _, builder, __, arguments: builder.bitcast(arguments[0], bits)

    return intrinsic(typed)


bits_of: Any = _taken_as(types.float32, types.int32, ir.IntType(32))
float_of: Any = _taken_as(types.int32, types.float32, ir.FloatType())
bits_of_double: Any = _taken_as(types.float64, types.int64, ir.IntType(64))
double_of: Any = _taken_as(types.int64, types.float64, ir.DoubleType())


@inlined
def logarithm(number: Any) -> Any:
    """Return the natural logarithm of a float32, off by less than its last bit."""
    bits = I32(bits_of(number) + TO_HALF_ROOT)
    power = F32(I32(I32(bits >> FRACTION_BITS) - BIAS))
    f = float_of(I32(I32(bits & FRACTION) + HALF_ROOT)) - ONE
    s = f / (TWO + f)
    z = s * s
    w = z * z
    rest = z * (SERIES[0] + w * SERIES[2]) + w * (SERIES[1] + w * SERIES[3])
    half = HALF * f * f
    found = s * (half + rest) + power * LN2_LOW - half + f + power * LN2_HIGH
    return found if number < INFINITE else number


@inlined
def precise_logarithm(number: Any) -> Any:
    """Return the natural logarithm of a float32 as a float64 with some eleven digits."""
    bits = I32(bits_of(number) + TO_HALF_ROOT)
    power = F64(I32(I32(bits >> FRACTION_BITS) - BIAS))
    f = F64(float_of(I32(I32(bits & FRACTION) + HALF_ROOT))) - 1.0
    s = f / (2.0 + f)
    z = s * s
    rest = multiply_add(z, multiply_add(z, multiply_add(z, 1 / 11, 1 / 9), 1 / 7), 1 / 5)
    found = multiply_add(2.0 * s, multiply_add(z, multiply_add(z, rest, 1 / 3), 1.0), power * LN2)
    return found if number < INFINITE else F64(number)


@inlined
def exponential(number: Any) -> Any:
    """Return e to the power of a float64, with some nine digits."""
    number = LEAST_EXPONENT if number < LEAST_EXPONENT else number
    number = MOST_EXPONENT if number > MOST_EXPONENT else number
    power = multiply_add(number, PER_LN2, ROUNDING)
    r = multiply_add(ROUNDING - power, LN2, number)
    tail = multiply_add(r, multiply_add(r, multiply_add(r, 1 / 40320, 1 / 5040), 1 / 720), 1 / 120)
    found = multiply_add(r, multiply_add(r, multiply_add(r, tail, 1 / 24), 1 / 6), 0.5)
    found = multiply_add(r, multiply_add(r, found, 1.0), 1.0)
    return found * double_of((bits_of_double(power) << DOUBLE_FRACTION_BITS) + DOUBLE_ONE)
