"""Every form of weights that comes in or goes out."""
