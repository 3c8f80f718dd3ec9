"""Pretraining, as a story of named steps."""
