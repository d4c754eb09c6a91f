"""Reward functions: `score` calls the configured one on a batch and puts the result on the last response token.

A reward function takes lists and gives a list, one item a row:

    def my_reward(prompts, responses, rows, **arguments) -> list[float] | list[dict[str, float]]

- `prompts`: what the model saw, as text without control tokens (after the chat template);
- `responses`: what the model wrote, as text without control tokens;
- `rows`: the data-set rows as dicts (a copy: changing them has no effect);
- `arguments`: `reward.arguments` of the config, as keywords;
- a function that names the parameter `lengths` gets the response lengths in tokens, and one that names `finish_reasons`
  gets "stop" or "length" for each row.

An item is a finite number, or a dict with "reward" and further numbers: components, logged as `reward/<component>`.
"""

from __future__ import annotations

from typing import Any

import torch

from rlhf_megatron.data.proto import DataProto, Ragged
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.rewards import demo_tasks, format_length, gsm8k, sums  # noqa: F401  registers the built-in ones
from rlhf_megatron.rewards.registry import RewardError, get_reward, names, register
from rlhf_megatron.rewards.user import call_reward, find_reward

__all__ = ["RewardError", "find_reward", "get_reward", "names", "register", "score"]


def score(config: Any, batch: DataProto, tokenizer: Tokenizer) -> DataProto:
    """Rewards of a batch with `prompts` and `responses` (and, where there are, `row` and `finish_reason`).

    Args:
        config: the config's `reward` section: `function` (a registered name or "module:function") and `arguments`.

    Returns a batch with
        token_level_scores: ragged float32 over the response, 0 but on the last token, which holds the row's reward
            (a response without any token has no place for it; generation always makes at least one);
        reward_components: per row a dict of the components that the function named (empty when it gave plain numbers).

    Raises:
        RewardError: the function fails, or gives something else than one finite reward a row; names function and row.
    """
    batch.require(("prompts", "responses"), "reward")
    responses = batch["responses"]
    lengths = responses.lengths
    rewards, components = call_reward(
        config.function,
        dict(config.arguments),
        prompts=_texts(tokenizer, batch["prompts"]),
        responses=_texts(tokenizer, responses),
        rows=batch.get("row") or [{} for _ in range(len(batch))],
        extras={"lengths": lengths.tolist(), "finish_reasons": list(batch.get("finish_reason") or [None] * len(batch))},
    )
    scores = torch.zeros(len(responses.values), dtype=torch.float32)
    written = lengths > 0
    scores[responses.offsets[1:][written] - 1] = torch.tensor(rewards, dtype=torch.float32)[written]
    return DataProto({"token_level_scores": Ragged(scores, lengths)}, {"reward_components": components})


def _texts(tokenizer: Tokenizer, tokens: Ragged) -> list[str]:
    return tokenizer.batch_decode(tokens.to_list(), skip_special_tokens=True)
