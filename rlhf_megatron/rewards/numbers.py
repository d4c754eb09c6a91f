"""Numbers in a model's text, read by a small grammar. Nothing is ever evaluated.

    number   := [sign] [currency] magnitude [percent]  |  [sign] fraction
    magnitude:= digits, with or without thousands commas, with or without a decimal part, with or without e+-NN
    fraction := integer "/" integer  |  \\frac{integer}{integer}
    wrapped  := number in (), {}, [], $...$, **...** or \\boxed{...}, up to MAX_DEPTH deep; a final full stop is ignored

What is longer than MAX_CHARACTERS or deeper than MAX_DEPTH is not a number. Cost: linear in MAX_CHARACTERS.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARACTERS = 64
MAX_DEPTH = 4

_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
_DIGITS = rf"{_WHOLE}|\.[0-9]+"
_NUMBER = re.compile(rf"([+-]?)\s*[$€£]?\s*([+-]?)\s*({_DIGITS})(?:[eE]([+-]?[0-9]{{1,2}}))?\s*(\\?%)?\Z")
_FRACTION = re.compile(r"([+-]?)\s*(?:\\d?frac\{([0-9]+)\}\{([0-9]+)\}|([0-9]+)\s*/\s*([0-9]+))\Z")
_IN_TEXT = re.compile(rf"(?:(?<![0-9A-Za-z)\]])-)?{_WHOLE}")  # "3-8" ends with 8, "= -8" with -8
_WRAPPERS = (("\\boxed{", "}"), ("\\text{", "}"), ("(", ")"), ("{", "}"), ("[", "]"), ("**", "**"), ("$", "$"))


def parse_number(text: str) -> Fraction | None:
    """The exact value of `text` when all of it is one number of the grammar above, else None. `50%` is 1/2."""
    if len(text) > MAX_CHARACTERS:
        return None
    text = text.replace("\u2212", "-").strip()
    for _ in range(MAX_DEPTH + 1):
        text = text.removesuffix(".").strip()
        for opening, closing in _WRAPPERS:
            if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
                text = text[len(opening): -len(closing)].strip()
                break
        else:
            return _unwrapped(text)
    return None


def _unwrapped(text: str) -> Fraction | None:
    if found := _NUMBER.match(text):
        sign, inner_sign, digits, exponent, percent = found.groups()
        if sign and inner_sign:
            return None
        value = Fraction(digits.replace(",", ""))
        if exponent:
            value *= Fraction(10) ** int(exponent)  # two digits at most: no huge number can be written
        if percent:
            value /= 100
        return -value if "-" in sign + inner_sign else value
    if found := _FRACTION.match(text):
        sign, top, bottom, plain_top, plain_bottom = found.groups()
        denominator = int(bottom or plain_bottom)
        if not denominator:
            return None
        return Fraction(int(top or plain_top), denominator) * (-1 if sign == "-" else 1)
    return None


def last_number(text: str, within: int = 4096) -> Fraction | None:
    """The last number in the final `within` characters of `text`, or None (also when its digits are too many)."""
    found = _IN_TEXT.findall(text[-within:])
    return parse_number(found[-1]) if found else None
