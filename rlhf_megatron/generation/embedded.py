"""The embedded engine: transformers' model in the trainer's process, with a KV cache. Runs anywhere torch runs."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.initialization import no_init_weights

from rlhf_megatron import devices
from rlhf_megatron.generation.engine import Completion, Sampling
from rlhf_megatron.generation.sampling import draw, uniforms
from rlhf_megatron.generation.stopping import Stopper, special_ids, stop_token_ids


class EmbeddedEngine:
    """Generates with transformers' model class of an HF directory.

    The engine reads the directory's config and tokenizer, not its weights: those are written into `tensors()`, under
    their published names; a tied lm_head is the embedding and has no name of its own. No code of the directory is run.

    Args:
        model_dir: HF directory.
        dtype: "float32" or "bfloat16".
        batch_size: rows generated at once; more rows are done in turns, rows of similar length together.
    """

    def __init__(self, model_dir: str | Path, dtype: str = "float32", batch_size: int = 64) -> None:
        if batch_size < 1:
            raise ValueError(f"generation.batch_size={batch_size}: must be at least 1")
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False, local_files_only=True)
        with torch.device(devices.device()), no_init_weights():  # drawing weights that are written anyway takes minutes
            model = AutoModelForCausalLM.from_config(config, dtype=devices.dtype(dtype), attn_implementation="sdpa",
                                                     trust_remote_code=False)
        model.tie_weights()  # belongs to the drawing that was left out
        self.model = model.eval().requires_grad_(False)
        self.batch_size = batch_size
        self.tokenizer: Any = None
        if (Path(model_dir) / "tokenizer_config.json").is_file():
            self.tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False, local_files_only=True)
        self.stop_ids = stop_token_ids(model_dir, self.tokenizer)
        self.pad_id = 0  # what stands under padding does not matter: it is masked and has no position
        self.weights_version = 0
        self.awake = True

    def tensors(self) -> dict[str, Tensor]:
        """Parameters by published name (shared ones once). Written in place by a reshard."""
        return {name: parameter.data for name, parameter in self.model.named_parameters()}

    def finish_weights(self, changed: list[str]) -> None:
        """Nothing is derived from the weights here."""
        self.weights_version += 1

    def reset_cache(self) -> None:
        """No cache outlives a call of `generate`."""

    def sleep(self) -> None:
        self.awake = False

    def wake(self) -> None:
        self.awake = True

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], sample_ids: list[int], sampling: Sampling) -> list[Completion]:
        """One completion per prompt, in the prompts' order.

        Raises:
            ValueError: an empty prompt, a number of sample ids unlike that of prompts.
            RuntimeError: the engine sleeps; the model's logits are not numbers.
        """
        if not self.awake:
            raise RuntimeError("the generation engine sleeps; enter the generation session (wake) before generating")
        if len(prompts) != len(sample_ids):
            raise ValueError(f"{len(prompts)} prompts but {len(sample_ids)} sample ids: one for each prompt is needed")
        for row, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {row} is empty: a model needs at least one token to continue")
        decode = None if self.tokenizer is None else partial(self.tokenizer.decode, skip_special_tokens=True,
                                                             clean_up_tokenization_spaces=False)
        stop_ids = self.stop_ids | special_ids(self.tokenizer, sampling.stop)
        stopper = Stopper(stop_ids, sampling.stop, decode, sampling.max_tokens)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        done: dict[int, Completion] = {}
        for first in range(0, len(order), self.batch_size):
            rows = order[first : first + self.batch_size]
            made = self._batch([prompts[i] for i in rows], [sample_ids[i] for i in rows], sampling, stopper)
            done.update(zip(rows, made, strict=True))
        return [done[i] for i in range(len(prompts))]

    def _batch(self, prompts: list[list[int]], sample_ids: list[int], sampling: Sampling,
               stopper: Stopper) -> list[Completion]:
        device = devices.device()
        longest = max(len(p) for p in prompts)
        tokens = torch.tensor([[self.pad_id] * (longest - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        cache = DynamicCache(config=self.model.config)
        made: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
        reasons: list[str | None] = [None] * len(prompts)
        active = list(range(len(prompts)))  # row of the batch -> row of the prompts; done ones stay until compaction
        # the position of a token is the number of real tokens before it
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        for position in range(sampling.max_tokens):
            hidden = self.model.base_model(input_ids=tokens, attention_mask=mask, position_ids=positions,
                                           past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
            # on [B, H]: a product with the view [B, 1, H] copies the head's weight for every row
            logits = self.model.get_output_embeddings()(hidden.contiguous()).float()
            noise = uniforms(sampling.seed, sampling.step, [sample_ids[i] for i in active], [position] * len(active))
            drawn, log_probs = draw(logits, noise, sampling)
            for i, token, log_prob in zip(active, drawn.tolist(), log_probs.tolist(), strict=True):
                if reasons[i] is None:
                    if math.isnan(log_prob):
                        raise RuntimeError(
                            f"sample {sample_ids[i]}, response token {position}: the model's logits are NaN or inf; "
                            "look at the weights that were written into the engine, and at its dtype")
                    made[i][0].append(token)
                    made[i][1].append(log_prob)
                    reasons[i] = stopper(made[i][0])
            going = [row for row, i in enumerate(active) if reasons[i] is None]
            if not going:
                break
            if len(going) <= 0.75 * len(active):  # rows that are done cost as much as others: leave them out
                keep = torch.tensor(going, device=device)
                cache.batch_select_indices(keep)
                mask, positions, drawn = mask[keep], positions[keep], drawn[keep]
                active = [active[row] for row in going]
            tokens = drawn.unsqueeze(-1)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=-1)
            positions = positions[:, -1:] + 1
        return [Completion(ids, probs, reason or "length")  # type: ignore[arg-type]
                for (ids, probs), reason in zip(made, reasons, strict=True)]
