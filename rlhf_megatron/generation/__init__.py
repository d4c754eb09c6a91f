"""Generation engines: what they promise (engine.py) and the embedded one, which runs transformers' models in the trainer's process."""
