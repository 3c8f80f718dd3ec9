"""Masking, the model and its loss: pure functions of arrays."""
