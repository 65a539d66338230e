"""Numbers with suffixes, such as 128k.

Knows: vLLM's rule for them. Does not know: what is measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType


def parse_size(text: str) -> int:
    """A whole number with an optional suffix, by vLLM's rule: small is decimal, large is binary.

    `128k` is 128,000 and `128K` is 131,072; `1m` is 1,000,000 and `1M` is 1,048,576; `g`, `G`
    likewise. A fraction needs a decimal suffix (`1.5k` is 1,500). Raises ValueError otherwise.
    """
    match = _SIZE.fullmatch(text.strip().replace("_", ""))
    if match is None:
        raise ValueError(f"not a size: {text!r}")
    number, suffix = match.groups()
    size = Fraction(number) * _SUFFIXES[suffix]
    if size.denominator != 1 or ("." in number and not suffix.islower()):
        raise ValueError(f"not a whole number: {text!r}")
    return size.numerator


_SUFFIXES: Mapping[str, int] = MappingProxyType(
    {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
)
_SIZE = re.compile(r"(-?\d+(?:\.\d+)?)([kmgKMG]?)")
