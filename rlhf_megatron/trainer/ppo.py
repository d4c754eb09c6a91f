"""The loop. It runs in one place, sees the whole global batch, and calls worker groups; the rest is one call down."""

from __future__ import annotations

from rlhf_megatron.controller.worker_group import WorkerGroup
from rlhf_megatron.trainer.run import Run


def train(run: Run, actor: WorkerGroup, critic: WorkerGroup | None, reference: WorkerGroup | None) -> None:
    """PPO and its family: generate, reward, score, make advantages, update.

    Args:
        run: what surrounds the loop: prompts, rewards, algorithm, metrics, checkpoints.
        actor: the trained policy.
        critic: None when the algorithm wants no values.
        reference: None when no term of the algorithm compares with the starting policy.
    """
    timer = run.timers
    for step in run.steps():
        with timer("generate"):
            batch = run.rollout(actor, step)
        with timer("reward"):
            batch = run.score(batch)
        with timer("old_log_prob"):
            batch = batch.union(actor.log_probs(batch))
        if reference is not None:
            with timer("reference"):
                batch = batch.union(reference.log_probs(batch))
        if critic is not None:
            with timer("values"):
                batch = batch.union(critic.values(batch))
        with timer("advantages"):
            batch = run.advantages(batch)
        for mini in run.mini_batches(batch, step):
            if critic is not None:
                with timer("update_critic"):
                    run.metrics.add(critic.update(mini))
            if run.trains_actor(step):
                with timer("update_actor"):
                    run.metrics.add(actor.update(mini))
        run.end_step(step, batch)
