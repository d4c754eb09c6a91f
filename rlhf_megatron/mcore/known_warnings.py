"""Warnings of other libraries that say nothing to our user, each with its reason. Everything else is shown.

Every rank would print them, so that a run on many ranks begins with pages of them.
"""

from __future__ import annotations

import warnings

# start of the message (a regular expression), module that is blamed: why it does not matter here
EVERYWHERE: dict[tuple[str, str], str] = {
    (r"full scope is deprecated", r"megatron\.core\."): "a default of megatron-core's own config",
    (r"The \.grad attribute of a Tensor that is not a leaf", r"megatron\.core\.optimizer"):
        "megatron-core asks whether there is a gradient where DDP keeps it elsewhere",
    (r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated", r"torch\.distributed\."):
        "called by megatron-core, not by us",
}
ON_CPU: dict[tuple[str, str], str] = {
    (r"Transformer Engine and Apex are not installed", r"megatron\.core\."): "they need CUDA; adam.py stands in",
    (r"Apex is not installed", r"megatron\.core\."): "it needs CUDA; norms.py stands in",
    (r"When using async grad allreduce", r"megatron\.core\."): "advice about CUDA's queues",
}


def silence(cuda: bool) -> None:
    """Leave the known warnings out, those about missing CUDA packages only where there is no CUDA."""
    for message, module in [*EVERYWHERE, *({} if cuda else ON_CPU)]:
        warnings.filterwarnings("ignore", message=message, module=module)
