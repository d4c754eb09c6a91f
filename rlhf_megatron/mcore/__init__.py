"""The only place that imports megatron.core: models, the engine that trains and scores with them, checkpoints."""
