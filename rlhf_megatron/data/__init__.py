"""Batches (DataProto), prompts (RLHFDataset) and tokenizers. Nothing of ours above config/ is imported here."""
