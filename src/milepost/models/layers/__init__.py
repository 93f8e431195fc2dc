"""Layers that families are built from: weights in, arrays through, no policy. Everything here imports torch."""
