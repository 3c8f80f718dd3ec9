"""Pretraining: where a run starts from, its training, its evaluations and its summary."""
