"""Division of a tensor by a number, in the cheapest way that gives the same bits."""

from __future__ import annotations

import math

from torch import Tensor

__all__ = ["divide_"]


def divide_(tensor: Tensor, divisor: float) -> Tensor:
    """`tensor.div_(divisor)`; as a product, several times cheaper, where the reciprocal is exact.

    That of a power of two is, and then quotient and product are one real number, rounded once.
    By 1 nothing is divided. Complex numbers are: torch's quotient of an infinite one is another.
    """
    if divisor == 1:
        return tensor
    if tensor.is_complex():
        return tensor.div_(divisor)
    mantissa, exponent = math.frexp(divisor)
    if mantissa == 0.5 and abs(exponent) < _SAFE:
        return tensor.mul_(1 / divisor)
    return tensor.div_(divisor)


_SAFE = 14
"""Powers of two below this, and their reciprocals, are normal numbers in every floating type."""
