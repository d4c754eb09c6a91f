"""Generation engines: what they promise (engine.py), and the embedded one, transformers in the trainer's process."""
