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
        scoring = {"old_log_prob": (actor, "log_probs")}
        if reference is not None:
            scoring["reference"] = (reference, "log_probs")
        if critic is not None:
            scoring["values"] = (critic, "values")
        for scores in run.together(scoring, batch):
            batch = batch.union(scores)
        with timer("advantages"):
            batch = run.advantages(batch)
        for mini in run.mini_batches(batch, step):
            updates = {}
            if critic is not None:
                updates["update_critic"] = (critic, "update")
            if run.trains_actor(step):
                updates["update_actor"] = (actor, "update")
            for metrics in run.together(updates, mini):
                run.metrics.add(metrics)
        run.end_step(step, batch)
