"""Every key of a config, its type, its default and the values it may take. Defaults live here and nowhere else.

A section is a frozen dataclass; `Config` is the root. A field without a default must be given. Rules of one value
stand beside it (`key(default, low=1)`); rules between values, or with the job's ranks, are in `checks`.

Units: a *prompt* is one row of the data; a *response* is one sampled answer, so a step has
`trainer.prompts_per_step x generation.samples_per_prompt` responses; a *mini-batch* is the responses of one optimizer
update over all replicas; a *micro-batch* is the responses of one forward on one replica.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Any

# A name that becomes a folder: no separators and no leading dot, so it cannot leave the runs folder.
PLAIN_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"


def key(default: Any = MISSING, *, factory: Any = MISSING, **rules: Any) -> Any:
    """A field with rules: low (>=), above (>), high (<=), below (<), choices, pattern with pattern_says."""
    if factory is not MISSING:
        return field(default_factory=factory, metadata=rules)
    return field(default=default, metadata=rules)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What the run is called and on what it computes."""

    name: str = key(pattern=PLAIN_NAME, pattern_says="letters, digits and . _ - with a letter or digit first")
    folder: str = key("runs")  # the run writes into folder/name
    device: str = key("auto", choices=("auto", "cpu", "cuda"))
    dtype: str = key("float32", choices=("float32", "bfloat16"))  # of the models; optimizers keep float32 masters
    deterministic: bool = key(False)  # only kernels that give the same bits every time; slower on GPUs
    peak_tflops: float = key(0.0, low=0)  # of one device, for perf/mfu; 0 = known for the GPU; unknown (CPU): no mfu


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Which processes there are and how calls reach them. Times in seconds."""

    transport: str = key("torchrun", choices=("torchrun", "inline"))
    pools: dict[str, int] = key(factory=lambda: {"main": 0}, low=0)  # name -> ranks; 0 = all remaining
    call_timeout: float = key(1800.0, above=0)  # one call of the loop to a worker group
    heartbeat_timeout: float = key(30.0, above=0)  # silence after which a rank counts as gone
    collective_timeout: float = key(600.0, above=0)  # one collective inside a process group


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the prompts come from and what is done with rows that do not fit."""

    train: str | tuple[str, ...] = key()  # .jsonl or .parquet
    prompt_key: str = key("prompt")
    chat: bool = key(True)  # put the prompt through the tokenizer's chat template
    system: str | None = key(None)
    shots: tuple[str, ...] = key(factory=tuple)  # worked examples before the prompt: question, answer, question, answer
    max_prompt_tokens: int = key(512, low=1)
    overlong: str = key("error", choices=("drop", "left", "right", "error"))  # left, right: cut on that side
    shuffle: bool = key(True)
    drop_last: bool = key(True)
    bad_rows: str = key("stop", choices=("stop", "skip"))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How many ranks share one copy of the role's model; what is left of the pool is data-parallel."""

    tp: int = key(1, low=1)
    pp: int = key(1, low=1)
    cp: int = key(1, low=1)  # context parallel: every sequence is cut over that many ranks
    sp: bool = key(False)  # sequence parallel: norms and residuals, too, are split over the tp ranks
    vpp: int = key(1, low=1)  # virtual stages of each pipeline stage: a shorter bubble, more messages
    layers: tuple[int, ...] = key(factory=tuple, low=1)  # of every (virtual) stage by depth; empty: equal shares


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """One optimizer; schedules run over the updates of the whole run."""

    name: str = key("adam", choices=("adam", "sgd"))
    lr: float = key(1e-6, low=0)
    min_lr: float = key(0.0, low=0)
    schedule: str = key("constant", choices=("constant", "linear", "cosine"))
    warmup_steps: int = key(0, low=0)
    weight_decay: float = key(0.0, low=0)
    beta1: float = key(0.9, low=0, below=1)
    beta2: float = key(0.95, low=0, below=1)
    eps: float = key(1e-8, above=0)
    clip_grad: float = key(1.0, low=0)  # the gradient's global norm; 0 = off


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """The frozen starting policy. Built only when a KL term asks for it."""

    model: str | None = key(None)  # HF folder; None: the actor's
    pool: str = key("main")
    micro_batch_size: int = key(4, low=1)  # responses per forward on one replica, if micro_batch_tokens is 0
    micro_batch_tokens: int = key(0, low=0)  # tokens per forward on one replica, never more; rows as they fit
    packing: bool = key(False)  # the rows of a micro-batch one behind the other instead of padded
    parallel: ParallelConfig = key(factory=ParallelConfig)
    # kept in host memory while another phase or role computes; gradients and optimizer: of trained roles only
    offload: tuple[str, ...] = key(factory=tuple, choices=("parameters", "gradients", "optimizer"))


@dataclass(frozen=True, kw_only=True)
class CriticConfig(ReferenceConfig):
    """The value model. Built only when the algorithm wants values."""

    optimizer: OptimizerConfig = key(factory=OptimizerConfig)
    recompute: str = key("none", choices=("none", "selective", "full"))  # activations made anew in backward
    overlap: bool = key(False)  # reduce gradients during backward, gather parameters during forward


@dataclass(frozen=True, kw_only=True)
class ActorConfig(CriticConfig):
    """The trained policy."""

    model: str = key()  # HF folder


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How responses are sampled."""

    engine: str = key("embedded", choices=("embedded",))
    tp: int = key(1, low=1)
    samples_per_prompt: int = key(1, low=1)
    max_response_tokens: int = key(low=1)
    temperature: float = key(1.0, above=0)
    top_p: float = key(1.0, above=0, high=1)
    top_k: int = key(0, low=0)  # 0 = off
    stop: tuple[str, ...] = key(factory=tuple)
    log_probs: str = key("processed", choices=("raw", "processed"))  # after or before temperature, top_p, top_k
    batch_size: int = key(64, low=1)  # responses sampled at once on one replica


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """The divergence from the reference: where it enters, how it is estimated, how hard it pulls."""

    place: str = key("none", choices=("none", "reward", "loss"))
    estimator: str = key("k3", choices=("k1", "k2", "k3"))
    coefficient: float = key(0.0, low=0)
    controller: str = key("fixed", choices=("fixed", "adaptive"))
    target: float = key(0.1, above=0)  # adaptive: the divergence to hold
    horizon: int = key(1000, low=1)  # adaptive: responses over which the coefficient moves


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """How advantages and losses are made."""

    name: str = key("grpo", choices=("ppo", "grpo"))
    gamma: float = key(1.0, low=0, high=1)
    lam: float = key(1.0, low=0, high=1)
    clip_low: float = key(0.2, low=0, high=1)  # the ratio is held above 1 - clip_low ...
    clip_high: float = key(0.2, low=0)  # ... and below 1 + clip_high
    value_clip: float = key(0.2, low=0)
    entropy_coefficient: float = key(0.0, low=0)
    normalize_by_std: bool = key(True)
    whiten_advantages: bool = key(True)
    loss_aggregation: str = key(
        "token_mean", choices=("token_mean", "seq_mean_token_mean", "seq_mean_token_sum")
    )
    kl: KLConfig = key(factory=KLConfig)


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """The reward: a registered name or `module:function`, and keyword arguments for it (plain data)."""

    function: str = key()
    arguments: dict[str, Any] = key(factory=dict)


@dataclass(frozen=True, kw_only=True)
class RolloutsConfig:
    """Keep the rollouts, or use kept ones instead of sampling."""

    save: bool = key(False)
    replay: str | None = key(None)  # a folder of step_NNNNNN


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How long, in which batches, and what is kept."""

    steps: int = key(low=1)
    seed: int = key(1, low=0, high=2**31 - 1)
    prompts_per_step: int = key(low=1)
    mini_batch_size: int = key(0, low=0)  # responses per optimizer update, over all replicas; 0 = all of the step
    epochs: int = key(1, low=1)
    critic_warmup_steps: int = key(0, low=0)
    resume: str = key("never")  # auto, never, or the folder of a checkpoint
    save_every: int = key(0, low=0)  # steps; 0 = never
    keep: int = key(0, low=0)  # checkpoints; 0 = all
    save_hf: str = key("end", choices=("end", "save", "never"))
    stop_reward: float | None = key(None)
    stop_patience: int = key(3, low=1)  # steps that the mean reward has to stay at stop_reward
    log_prob_gap_limit: float = key(0.05, low=0)  # nats; a larger gap between sampler and trainer is warned about
    rollouts: RolloutsConfig = key(factory=RolloutsConfig)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole config of one run."""

    run: RunConfig = key()
    cluster: ClusterConfig = key(factory=ClusterConfig)
    data: DataConfig = key()
    actor: ActorConfig = key()
    critic: CriticConfig = key(factory=CriticConfig)
    reference: ReferenceConfig = key(factory=ReferenceConfig)
    generation: GenerationConfig = key()
    algorithm: AlgorithmConfig = key(factory=AlgorithmConfig)
    reward: RewardConfig = key()
    trainer: TrainerConfig = key()
