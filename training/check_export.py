"""Compare an exported model with transformers: ``python training/check_export.py DIR``.

Loads it through ``AutoModelForCausalLM`` and ``AutoTokenizer`` and checks the tokenizer, the chat template, the
logits and a generated answer against the code in this folder.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import data
from model import ClerkConfig, ClerkModel


def main() -> None:
    """Print the largest difference of the logits and fail if it's above 3e-5 of the largest logit."""
    folder = Path(sys.argv[1])
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for layer in reference.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = (0.0, float("inf"))
    config = reference.config
    ours = ClerkModel(ClerkConfig(pattern=config.hybrid_override_pattern, hidden_size=config.hidden_size))
    ours.load_state_dict(load_file(folder / "model.safetensors"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    made = data.make_conversation(random.Random(5), 32, 4, "test")
    ids, _ = data.encode_conversation(made)
    messages = [{"role": "system", "content": made.system}]
    for turn in made.turns:
        messages += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
    assert tokenizer.apply_chat_template(messages, return_dict=False) == ids
    text = "naïve 数字 \U0001f600\n\ttab"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    batch = torch.tensor([ids])
    with torch.no_grad():
        expected = reference(batch).logits
        difference = (expected - ours(batch)).abs().max().item()
    largest = expected.abs().max().item()
    print(f"largest difference of the logits {difference:.2e} over {len(ids)} tokens; largest logit {largest:.1f}")
    prompt = tokenizer.apply_chat_template(messages[:2], add_generation_prompt=True, return_dict=False)
    reply = reference.generate(torch.tensor([prompt]), max_new_tokens=48, do_sample=False)[0, len(prompt) :]
    print(f"{made.turns[0].question!r} -> {tokenizer.decode(reply)!r}, expected {made.turns[0].answer!r}")
    assert difference < 3e-5 * largest


if __name__ == "__main__":
    main()
