"""Families built on Mamba-2 against transformers' uncut forward: logits, every state, 64 greedy tokens, odd sizes included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from milepost.kernels.torch_backend import TorchBackend
from milepost.models import load_spec
from milepost.models.loading import load_model
from tests.models.pools import Sequence
from tests.models.test_parity_nemotron_h import check

transformers = pytest.importorskip("transformers")

_MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 32}
_BODY: dict[str, Any] = {
    "vocab_size": 83, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, **_MAMBA,
}  # fmt: skip
_GRANITE: dict[str, Any] = {
    **_BODY, "shared_intermediate_size": 40, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
    "attention_multiplier": 0.11, "logits_scaling": 3.0,
}  # fmt: skip
_PURE: dict[str, Any] = {
    "vocab_size": 83, "hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 16, "chunk_size": 32,
}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("Bamba", {**_BODY, "num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "bamba-groups": (
        "Bamba",
        {**_BODY, "num_hidden_layers": 4, "attn_layer_indices": [0, 2], "mamba_n_groups": 2, "mamba_proj_bias": True,
         "mlp_bias": True, "attention_bias": True, "num_key_value_heads": 4},
    ),
    "bamba-odd": (
        "Bamba",
        {**_BODY, "num_hidden_layers": 2, "attn_layer_indices": [1], "hidden_size": 60, "num_attention_heads": 5,
         "num_key_value_heads": 1, "mamba_n_heads": 6, "mamba_d_head": 20, "mamba_d_state": 24, "mamba_d_conv": 3,
         "vocab_size": 61, "tie_word_embeddings": True},
    ),
    "granite-moe": (
        "GraniteMoeHybrid",
        {**_GRANITE, "layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3, "num_local_experts": 6,
         "num_experts_per_tok": 2, "tie_word_embeddings": True},
    ),
    "granite-dense": (
        "GraniteMoeHybrid",
        {**_GRANITE, "layer_types": ["attention", "mamba"], "num_hidden_layers": 2, "num_local_experts": 0,
         "num_experts_per_tok": 0, "mamba_n_groups": 2},
    ),
    "granite-rope": (
        "GraniteMoeHybrid",
        {**_GRANITE, "layer_types": ["mamba", "attention"], "num_hidden_layers": 2, "num_local_experts": 3,
         "num_experts_per_tok": 3, "position_embedding_type": "rope", "num_key_value_heads": 1, "vocab_size": 61,
         "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
    ),
    "mamba2": ("Mamba2", {**_PURE, "num_hidden_layers": 3, "n_groups": 1}),
    "mamba2-groups": ("Mamba2", {**_PURE, "num_hidden_layers": 2, "n_groups": 2, "use_bias": True, "residual_in_fp32": False}),
    "mamba2-odd": (
        "Mamba2",
        {**_PURE, "num_hidden_layers": 2, "n_groups": 1, "num_heads": 3, "head_dim": 20, "hidden_size": 30, "state_size": 24,
         "conv_kernel": 3, "use_conv_bias": False, "tie_word_embeddings": True},
    ),
}  # fmt: skip


class Theirs:
    """transformers' model with weights that make every part matter."""

    def __init__(self, architecture: str, settings: dict[str, Any], *, config: str = "Config") -> None:
        config = getattr(transformers, f"{architecture}{config}")(eos_token_id=None, **settings)
        torch.manual_seed(11)
        self.model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
        self.model.set_experts_implementation("eager")  # the fused ones want widths that are multiples of 16 bytes
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                self._stir(name.rsplit(".", 2), value)

    @staticmethod
    def _stir(name: list[str], value: Tensor) -> None:
        match name[-1], value.dim():
            case "A_log", _:
                value.uniform_(-1.0, 2.0)
            case "dt_bias", _:
                value.uniform_(-4.0, 0.0)
            case ("D" | "bias"), _:
                value.normal_(0.0, 0.5)
            case _, 1:
                value.uniform_(0.5, 1.5)
            case _:
                value.normal_(0.0, value.shape[-1] ** -0.5)

    @torch.no_grad()
    def uncut(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits of every row, and the states after the last."""
        result = self.model(tokens.unsqueeze(0), use_cache=True)
        cache = getattr(result, "cache", None)
        cache = result.past_key_values if cache is None else cache
        states: dict[str, Tensor] = {}
        for index, layer in enumerate(cache.layers):
            matrix, window = (getattr(layer, f"{name}_states", None) or [None] for name in ("recurrent", "conv"))
            if matrix[0] is not None:
                states[f"{index}.recurrent"] = matrix[0][0]
            if window[0] is not None:
                states[f"{index}.window"] = window[0][0][:, 1:]
        return result.logits[0], states


def agree(theirs: Theirs, path: Path, tolerance: float = 1e-4) -> None:
    """What ours, loaded from what theirs saves to `path`, computes whole, in pieces, at captures and token by token."""
    theirs.model.save_pretrained(path)
    backend = TorchBackend()
    model = load_model(path, load_spec(path), dtype=torch.float32, recurrent=backend, attention=backend)
    tokens = torch.randint(model.spec.vocab_size, (75,), generator=torch.Generator().manual_seed(7))
    logits, states = theirs.uncut(tokens)
    assert len(states) == sum(len(layer.components) for layer in model.spec.layers)
    whole, pieces = Sequence(model), Sequence(model)
    check({"logits": whole.feed(tokens), **whole.states()}, {"logits": logits, **states}, tolerance)
    parts = [pieces.feed(tokens[:31], ((2, 1), (30, 2))), pieces.feed(tokens[31:32]), pieces.feed(tokens[32:])]
    check({"logits": torch.cat(parts), **pieces.states()}, {"logits": logits, **states}, tolerance)
    for offset, slot in ((2, 1), (30, 2)):
        check(pieces.states(slot), theirs.uncut(tokens[:offset])[1], tolerance)
    answer = tokens[:5]
    sequence = Sequence(model)
    rows = sequence.feed(answer)
    for _ in range(64):
        picked = rows[-1].argmax().view(1)
        answer = torch.cat([answer, picked])
        rows = sequence.feed(picked)
    assert answer[5:].tolist() == theirs.uncut(answer)[0].argmax(1)[4:-1].tolist()


@pytest.mark.parametrize("case", CASES)
def test_logits_states_and_greedy_tokens(case: str, tmp_path: Path) -> None:
    agree(Theirs(*CASES[case]), tmp_path)
