"""Moments, ranks and spectra of hidden states, with and without [MASK]."""
