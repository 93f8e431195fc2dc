"""Model families: a parser from `config.json` to `ModelSpec`, the weights that it names, and the forward pass.

The law kept here: a checkpoint that asks for something that no code here does is refused by the names of its fields.
Importing this package doesn't import torch.
"""

from milepost.models.registry import families, load_spec

__all__ = ["families", "load_spec"]
