"""Mixture-of-experts networks: a block of our own, those of `transformers`, and what their layers have in common."""
