"""Beside the path: sizes and limits of a model, from the same layout that the pools are built from. Never imports torch."""
