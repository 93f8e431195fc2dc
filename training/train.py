"""Train the directory clerk on two CPU cores: ``python training/train.py --out DIR --minutes 75``.

Directories grow from four entries to `MAX_ENTRIES` as the running accuracy allows (and by the clock at the
latest); the learning rate is constant, then falls linearly to zero. Checkpoints are written as the run goes,
so that `export.py` can be used at any moment.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import sys
import time
from pathlib import Path

import torch

import data
from model import ClerkConfig, ClerkModel
from optim import make_optimisers
from scoring import Batch, make_batch, pointing_loss, quick_check, recall_and_missing, score

MAX_ENTRIES = 72


@dataclasses.dataclass
class Progress:
    """Where the run stands."""

    step: int = 0
    limit: float = 4.0
    accuracy: float = 0.0


def learning_rate(done: float, step: int, warmup: int, decay_from: float) -> float:
    """Factor of the learning rate: warm-up by steps, constant, then linear to zero by the clock."""
    factor = min(1.0, (step + 1) / warmup)
    return factor * (1.0 if done < decay_from else max(0.0, (1 - done) / (1 - decay_from)))


def grow(progress: Progress, accuracy: float, done: float, decay_from: float) -> None:
    """Follow the accuracy and let the directories grow with it."""
    progress.accuracy += 0.1 * (accuracy - progress.accuracy)
    if progress.accuracy > 0.7:
        progress.limit *= 1.03
    half = max(decay_from, 0.01) / 2
    by_clock = 4 + (MAX_ENTRIES - 4) * (done - half) / half
    progress.limit = min(MAX_ENTRIES, max(progress.limit, by_clock))


def draw_batch(rng: random.Random, limit: float, tokens: int) -> Batch:
    """A batch of conversations over directories of about one size, of about `tokens` tokens."""
    top = max(2, int(limit))
    entries = rng.randint(max(2, int(0.7 * top)), top) if rng.random() < 0.5 else rng.randint(2, top)
    turns = min(40, max(6, entries))
    plain_share = 1.0 if limit < 6 else 0.5 if limit < 16 else 0.2
    two_words = 0.0 if limit < 6 else None
    conversations: list[data.Conversation] = []
    total = 0
    if limit < 16:
        tokens = tokens * 2 // 3
    while total < tokens:
        size = max(1, entries + rng.randint(-1, 1))
        conversation = data.make_conversation(rng, size, turns, "train", two_words=two_words, plain_share=plain_share)
        conversations.append(conversation)
        total += len(data.encode_conversation(conversation)[0])
    return make_batch(conversations)


class Run:
    """A model in training, with all that a checkpoint holds."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model = ClerkModel(ClerkConfig(pattern=args.pattern))
        self.optimisers = make_optimisers(self.model, args.muon_lr, args.adam_lr)
        self.average = {name: weight.clone() for name, weight in self.model.state_dict().items()}
        self.progress = Progress()
        if args.resume:
            self._resume(args.resume)
        self.rng = random.Random(args.seed + self.progress.step)

    def _resume(self, path: Path) -> None:
        stored = torch.load(path, weights_only=True)
        self.model.load_state_dict(stored["model"])
        self.average = stored["average"]
        self.progress = Progress(**stored["progress"])
        self.progress.limit = self.args.limit or self.progress.limit
        for optimiser, state in zip(self.optimisers, stored["optimisers"], strict=True):
            optimiser.load_state_dict(state)

    def save(self, path: Path) -> None:
        """Write a checkpoint at once or not at all."""
        content = {
            "config": dataclasses.asdict(self.model.cfg),
            "model": self.model.state_dict(),
            "average": self.average,
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "progress": dataclasses.asdict(self.progress),
        }
        torch.save(content, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)

    def unseen(self) -> str:
        """Accuracy of the averaged weights on a few unseen conversations, as text."""
        copy = ClerkModel(self.model.cfg)
        copy.load_state_dict(self.average)
        checked = {entries: quick_check(copy, entries) for entries in (8, 32, 64)}
        return "  ".join(f"{n}: {recall:.3f}/{missing:.3f}" for n, (recall, missing) in checked.items())

    def step(self, done: float) -> str:
        """One step at the given share of the time; the line for the log."""
        args, progress = self.args, self.progress
        factor = learning_rate(done, progress.step, 30, args.decay_from)
        for optimiser, rate in zip(self.optimisers, (args.muon_lr, args.adam_lr), strict=True):
            for group in optimiser.param_groups:
                group["lr"] = rate * factor
        batch = draw_batch(self.rng, progress.limit, args.tokens)
        loss, exact, _ = score(self.model, batch)
        pointing = pointing_loss(self.model, batch)
        self.model.zero_grad()
        (loss + args.pointing * pointing).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        keep = min(0.98, (progress.step + 1) / (progress.step + 10))
        for name, weight in self.model.state_dict().items():
            self.average[name].lerp_(weight, 1 - keep)
        recall, missing = recall_and_missing(batch, exact)
        grow(progress, recall, done, args.decay_from)
        progress.step += 1
        return (
            f"step {progress.step:5d}  lr {factor:.2f}  loss {loss.item():.4f}  pointing {pointing.item():.3f}  "
            f"norm {norm:.2f}  recall {recall:.3f} (running {progress.accuracy:.3f})  missing {missing:.2f}  "
            f"limit {progress.limit:.0f}  shape {tuple(batch.ids.shape)}"
        )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=75)
    parser.add_argument("--tokens", type=int, default=6144, help="tokens a step")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--decay-from", type=float, default=0.4, help="share of the time before the rate falls")
    parser.add_argument("--pointing", type=float, default=0.3, help="weight of the pointing loss")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pattern", default=ClerkConfig.pattern)
    parser.add_argument("--limit", type=float, default=0, help="with --resume: the directory size to go on from")
    parser.add_argument("--resume", type=Path, help="continue from a checkpoint, its optimisers included")
    return parser.parse_args()


def keep_memory() -> None:
    """Start anew with a glibc that keeps freed blocks, which was faster than giving them back to the system."""
    wanted = {"MALLOC_MMAP_THRESHOLD_": str(8 << 30), "MALLOC_TRIM_THRESHOLD_": str(16 << 30)}
    if sys.platform == "linux" and not wanted.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**wanted, **os.environ})


def main() -> None:
    """Train until the time is up."""
    args = parse()
    keep_memory()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args)
    print(f"{sum(weight.numel() for weight in run.model.parameters())} parameters, pattern {args.pattern}", flush=True)
    began = saved = checked = time.monotonic()
    while (elapsed := time.monotonic() - began) < args.minutes * 60:
        line = run.step(elapsed / (args.minutes * 60))
        now = time.monotonic()
        if run.progress.step % 20 == 0:
            print(f"{elapsed / 60:6.1f} min  {line}", flush=True)
        if now - saved > 60:
            run.save(args.out / "last.pt")
            saved = now
        if now - checked > 180:
            print(f"   unseen (recall/missing) {run.unseen()}", flush=True)
            checked = now
    run.save(args.out / "last.pt")
    run.save(args.out / "final.pt")
    print(f"   final unseen (recall/missing) {run.unseen()}", flush=True)


if __name__ == "__main__":
    main()
