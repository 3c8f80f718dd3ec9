"""A training step compiled for devices that are not at hand: its memory, bytes sent and time."""
