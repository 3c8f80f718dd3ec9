"""Pretrain text encoders in JAX whose encoder never reads [MASK] (MAE-LM)."""
