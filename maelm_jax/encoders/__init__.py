"""Pretrained encoders: reading, writing, converting and applying them."""
