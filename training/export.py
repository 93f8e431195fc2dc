"""Write a checkpoint as a Hugging Face model directory: ``python training/export.py CHECKPOINT --out DIR``.

The weights keep the names of a Nemotron-H checkpoint. Files are written to a temporary name and renamed, so a
reader never sees half a file. The model card is kept as it is: this writes weights, configuration and tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import data
from model import ClerkConfig, ClerkModel

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MAX_POSITIONS = 4096


def write(path: Path, text: str) -> None:
    """Replace a text file at once."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, content: object) -> None:
    """Replace a JSON file at once."""
    write(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary, in the order of the bytes."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = iter(range(0x100, 0x200))
    return [chr(byte) if byte in kept else chr(next(moved)) for byte in range(256)]


def make_tokenizer() -> Tokenizer:
    """One token per UTF-8 byte, its id the byte; the special tokens follow."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in data.SPECIAL_TOKENS])
    assert tokenizer.get_vocab_size() == data.VOCAB_SIZE
    return tokenizer


def model_config(cfg: ClerkConfig) -> dict[str, object]:
    """config.json of a Nemotron-H model."""
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": cfg.pattern,
        "num_hidden_layers": len(cfg.pattern),
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "mamba_num_heads": cfg.mamba_heads,
        "mamba_head_dim": cfg.mamba_head_dim,
        "mamba_hidden_act": "silu",
        "mamba_proj_bias": False,
        "ssm_state_size": cfg.state_size,
        "n_groups": cfg.groups,
        "expand": 2,
        "conv_kernel": cfg.conv_kernel,
        "use_conv_bias": True,
        "use_bias": False,
        "chunk_size": 64,
        "time_step_min": 0.001,
        "time_step_max": 0.1,
        "time_step_floor": 0.0001,
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "layer_norm_epsilon": cfg.eps,
        "residual_in_fp32": False,
        "rescale_prenorm_residual": True,
        "initializer_range": 0.02,
        "max_position_embeddings": MAX_POSITIONS,
        "vocab_size": cfg.vocab_size,
        "tie_word_embeddings": False,
        "use_cache": True,
        "num_logits_to_keep": 1,
        "pad_token_id": data.PAD,
        "bos_token_id": None,
        "eos_token_id": data.END,
        "torch_dtype": "float32",
    }


def tokenizer_config() -> dict[str, object]:
    """tokenizer_config.json, the chat template with it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|pad|>",
        "eos_token": "<|end|>",
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }


def load_checkpoint(path: Path, average: bool = True) -> ClerkModel:
    """The model of a checkpoint of `train.py`, its averaged weights unless told otherwise."""
    stored = torch.load(path, weights_only=True)
    model = ClerkModel(ClerkConfig(**stored["config"]))
    model.load_state_dict(stored["average" if average else "model"])
    return model.eval()


def export(model: ClerkModel, out: Path) -> None:
    """Write all files but the model card."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().float().contiguous() for name, weight in model.state_dict().items()}
    temporary = out / "model.safetensors.tmp"
    save_file(weights, temporary, metadata={"format": "pt"})
    os.chmod(temporary, 0o644)
    os.replace(temporary, out / "model.safetensors")
    write_json(out / "config.json", model_config(model.cfg))
    write_json(
        out / "generation_config.json",
        {"do_sample": False, "eos_token_id": data.END, "pad_token_id": data.PAD, "max_new_tokens": 64},
    )
    write(out / "tokenizer.json", make_tokenizer().to_str(pretty=True) + "\n")
    write_json(out / "tokenizer_config.json", tokenizer_config())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--raw", action="store_true", help="the last weights, not their running average")
    args = parser.parse_args()
    export(load_checkpoint(args.checkpoint, not args.raw), args.out)


if __name__ == "__main__":
    main()
