"""Positions and masks from lengths: never from token ids.

A pad id may equal an end-of-sequence id, a prompt may hold one, and there may be several: so what is valid follows from
the length that the sampler reports, and whether a response ended by itself from its finish reason.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Position ids [B, T] int64 of a batch padded on either side (or inside).

    A valid token's position is the number of valid tokens before it: [0, 0, 1, 1, 1] -> [_, _, 0, 1, 2]. Padding gets
    0, which every position table has.
    """
    valid = mask.bool()
    return ((valid.cumsum(-1) - 1) * valid).clamp_(min=0)


def packed_positions(lengths: torch.Tensor) -> torch.Tensor:
    """Position ids [sum of lengths] int64 of sequences laid one behind the other: they restart at every sequence."""
    lengths = torch.as_tensor(lengths, dtype=torch.int64)
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum()), device=lengths.device) - torch.repeat_interleave(starts, lengths)


def response_mask(lengths: torch.Tensor, width: int | None = None) -> torch.Tensor:
    """[B, R] bool: the first `length` positions of every response, the token that ended it included.

    Args:
        lengths: [B] tokens as reported by the sampler.
        width: R; default the longest response.

    Raises:
        ValueError: a length is above `width`.
    """
    lengths = torch.as_tensor(lengths, dtype=torch.int64)
    longest = int(lengths.max()) if len(lengths) else 0
    if width is not None and width < longest:
        raise ValueError(f"response_mask: a response of {longest} tokens does not fit into a width of {width}")
    return torch.arange(longest if width is None else width, device=lengths.device) < lengths[:, None]


def truncated(finish_reasons: Sequence[str]) -> torch.Tensor:
    """[B] bool: responses that did not end by themselves (an end token or a stop string), but at the token limit.

    Raises:
        ValueError: a finish reason is neither "stop" nor "length".
    """
    for row, reason in enumerate(finish_reasons):
        if reason not in ("stop", "length"):
            raise ValueError(f"finish_reason of row {row} is {reason!r}; it must be 'stop' or 'length'")
    return torch.tensor([reason == "length" for reason in finish_reasons], dtype=torch.bool)
