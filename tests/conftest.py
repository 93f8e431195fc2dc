"""Settings of the whole suite: small models gain nothing from threads, and lose much where the cores are busy."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
