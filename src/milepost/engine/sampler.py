"""Pick the next token. In: logits and a request's parameters. Out: token and, where asked for, log-probabilities.

The law kept here: what a request gets doesn't depend on who runs beside it. Each has its own generator, and each row of logits
is treated alone. Order of the steps, as in vLLM: allowed ids, bias, penalties, temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.request import SamplingParams, TokenLogprobs


class Picker:
    """The sampler of one request: its parameters, its random numbers, what it has seen."""

    def __init__(self, params: SamplingParams, *, seed: int, prompt: Tensor, eos: tuple[int, ...], vocab_size: int) -> None:
        self.params = params
        self.generator = torch.Generator().manual_seed(seed % 2**63)
        self.picked = 0
        self._penalised = (
            params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0
        )
        self._answer = torch.zeros(vocab_size if self._penalised else 0)
        self._seen = torch.zeros(vocab_size if self._penalised else 0, dtype=torch.bool)
        if self._penalised:
            self._seen[prompt] = True
        self._allowed = None if params.allowed_token_ids is None else torch.tensor(params.allowed_token_ids)
        self._ends = torch.tensor(sorted({*([] if params.ignore_eos else eos), *params.stop_token_ids}), dtype=torch.int64)

    def pick(self, logits: Tensor) -> tuple[int, TokenLogprobs | None]:
        """Choose from logits [vocab_size]. Log-probabilities are of the logits as the model gave them."""
        token = self._choose(self._adjusted(logits.float()))
        self.picked += 1
        if self._penalised:
            self._answer[token] += 1
            self._seen[token] = True
        count = self.params.logprobs
        return token, None if count is None else logprobs_of(logits, token, count)

    def _adjusted(self, logits: Tensor) -> Tensor:
        params = self.params
        early = self.picked < params.min_tokens and len(self._ends) > 0
        if self._allowed is None and not params.logit_bias and not self._penalised and not early:
            return logits
        logits = logits.clone()
        if self._allowed is not None:
            closed = torch.ones_like(logits, dtype=torch.bool)
            closed[self._allowed] = False
            logits[closed] = -torch.inf
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        if self._penalised:
            ratio = params.repetition_penalty
            logits = torch.where(self._seen, torch.where(logits > 0, logits / ratio, logits * ratio), logits)
            logits -= params.frequency_penalty * self._answer + params.presence_penalty * (self._answer > 0)
        if early:
            logits[self._ends] = -torch.inf
        return logits

    def _choose(self, logits: Tensor) -> int:
        params = self.params
        if params.greedy:
            return int(logits.argmax())
        logits = logits / params.temperature
        if params.min_p > 0.0:
            floor = logits.max() + torch.log(torch.tensor(params.min_p))
            logits = logits.masked_fill(logits < floor, -torch.inf)
        if params.top_k > 0 and params.top_k < len(logits):
            least = logits.topk(params.top_k).values[-1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probabilities = logits.softmax(-1)
        if params.top_p < 1.0:
            ordered, ids = probabilities.sort(descending=True)
            past = ordered.cumsum(0) - ordered >= params.top_p
            probabilities = probabilities.index_fill(0, ids[past], 0.0)
        return int(torch.multinomial(probabilities, 1, generator=self.generator))


def logprobs_of(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    """Log-probability and rank of a token in logits [vocab_size], and the `count` likeliest tokens."""
    scores = logits.float().log_softmax(-1)
    own = scores[token]
    values, ids = scores.topk(min(count, len(scores)))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token, float(own), int((scores > own).sum()) + 1, top)
