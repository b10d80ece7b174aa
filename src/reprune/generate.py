"""Texts that a causal language model continues: a batch in lockstep with a key-value cache, sampled by given numbers.

Every row brings its own random numbers, and a token is the inverse of the cumulative distribution at the row's number.
So a text depends on the model, its prompt and its numbers, not on the rows beside it, as long as rounding does not
decide: products of another shape are summed in another order, which moves logits by some units in the last place, and a
number that falls within that of a boundary picks the neighbour. In float32 that is rare (never in 4,387 tokens of
SmolLM2-135M in batches of 16 and 32), in float64 it practically cannot happen.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits; in this order, as in transformers.

    Attributes:
        repetition_penalty: divides positive and multiplies negative logits of tokens already in the row; 1: none.
        temperature: divides logits.
        start_temperature: of the first token, from where it moves linearly to `temperature`; None: `temperature`.
        start_tokens: by how many tokens it gets there.
        top_k: only so many of the most likely tokens; None: all.
        top_p: of these only as many as together have this probability; 1: all.
    """

    repetition_penalty: float
    temperature: float
    start_temperature: float | None
    start_tokens: int
    top_k: int | None
    top_p: float

    def temperature_at(self, step: int) -> float:
        """Return the temperature of the token at a step, from 0."""
        if self.start_temperature is None or step >= self.start_tokens:
            return self.temperature
        return self.start_temperature + (self.temperature - self.start_temperature) * step / self.start_tokens


@dataclass(frozen=True)
class Continuation:
    """What a model wrote after one prompt.

    Attributes:
        tokens: after the prompt, without the one that ended the text.
        loss: sum of -log p over them, in nats, under the model itself (temperature 1, no penalty).
        ended: whether the model ended the text, rather than the limit.
    """

    tokens: list[int]
    loss: float
    ended: bool


@torch.no_grad()
def generate(
    model: Any,
    prompts: Tensor,
    numbers: Tensor | None,
    sampling: Sampling | None,
    limit: int,
    stop: frozenset[int],
    tick: Callable[[int], None] = lambda count: None,
) -> list[Continuation]:
    """Continue prompts of one length until each text ends or has `limit` new tokens.

    Args:
        model: causal language model in evaluation mode, on any device.
        prompts: (rows, length) int64; no padding, so every row has the same length.
        numbers: (rows, limit) float64 in [0, 1), those that pick the tokens; None with greedy choice.
        sampling: how tokens are chosen; None: the most likely one.
        limit: new tokens at most.
        stop: tokens that end a text.
        tick: called after each step with the number of rows that got a token.

    Returns:
        One continuation a row, in order.
    """
    rows = torch.arange(len(prompts))  # rows of `prompts` that are still being written, in the order of the batch
    tokens: list[list[int]] = [[] for _ in rows]
    losses = [0.0] * len(prompts)
    ended = [False] * len(prompts)
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    inputs, cache, seen = prompts.to(model.device), _cache(model.config), None
    for step in range(limit):
        output = model(input_ids=inputs, use_cache=True, **{keyword: cache})
        logits = output.logits[:, -1].double()
        if sampling is None or numbers is None:
            chosen = logits.argmax(-1)
        else:
            if sampling.repetition_penalty != 1:
                seen = torch.zeros_like(logits, dtype=torch.bool) if seen is None else seen
                seen.scatter_(1, inputs, True)
            chosen = pick(logits, numbers[rows, step], seen, sampling, sampling.temperature_at(step))
        loss = (logits.logsumexp(-1) - logits.gather(1, chosen[:, None])[:, 0]).tolist()
        alive = []
        for place, (row, token) in enumerate(zip(rows.tolist(), chosen.tolist(), strict=True)):
            if token in stop:
                ended[row] = True
                continue
            tokens[row].append(token)
            losses[row] += loss[place]
            alive.append(place)
        if not alive:
            break
        tick(len(alive))
        if len(alive) < len(rows):  # rows that have ended cost no more
            kept = torch.tensor(alive, device=inputs.device)
            cache.batch_select_indices(kept)
            chosen, rows = chosen[kept], rows[alive]
            seen = None if seen is None else seen[kept]
        inputs = chosen[:, None]
    return [Continuation(*row) for row in zip(tokens, losses, ended, strict=True)]


def pick(logits: Tensor, numbers: Tensor, seen: Tensor | None, sampling: Sampling, temperature: float) -> Tensor:
    """Choose a token a row, where the cumulative probability of tokens, most likely first, passes the row's number.

    Args:
        logits: (rows, vocabulary) float64.
        numbers: (rows,) float64 in [0, 1), on the CPU.
        seen: (rows, vocabulary) bool, the tokens already in a row; needed with a repetition penalty.
        sampling: the settings.
        temperature: of this step.

    Returns:
        (rows,) int64, on the device of logits.
    """
    if seen is not None:
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.top_k is not None:
        values, ids = logits.topk(min(sampling.top_k, logits.shape[1]))
    else:
        values, ids = logits.sort(descending=True, stable=True)
    # On the CPU, as cumulative sums on a GPU may differ from call to call.
    likely = (values.cpu() / temperature).softmax(-1)
    mass = likely.cumsum(-1)
    count = (mass - likely < sampling.top_p).sum(-1, keepdim=True)  # the fewest that reach top_p
    total = mass.gather(1, count - 1)
    place = torch.searchsorted(mass, numbers[:, None] * total, right=True).minimum(count - 1)
    return ids.gather(1, place.to(ids.device))[:, 0]


class _Growing(DynamicLayer):
    """A layer's keys and values with room for tokens to come; its parent copies all of them at every token."""

    keys: Any
    values: Any
    viewed: Any = None  # the keys as they were last returned, a part of `room`
    room: list[Tensor]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add the states of new tokens, (rows, heads, tokens, size), and return those of all."""
        if self.get_seq_length() == 0:
            return super().update(key_states, value_states, *args, **kwargs)
        used, new = self.keys.shape[-2], key_states.shape[-2]
        if self.viewed is not self.keys or used + new > self.room[0].shape[-2]:
            self.room = [self._with_room(old, 2 * used + new) for old in (self.keys, self.values)]
        for room, states in zip(self.room, (key_states, value_states), strict=True):
            room[..., used : used + new, :] = states
        self.keys, self.values = (room[..., : used + new, :] for room in self.room)
        self.viewed = self.keys  # if rows are selected from it, keys are a new tensor without room
        return self.keys, self.values

    @staticmethod
    def _with_room(states: Tensor, length: int) -> Tensor:
        room = states.new_empty(*states.shape[:-2], length, states.shape[-1])
        room[..., : states.shape[-2], :] = states
        return room


def _cache(config: Any) -> DynamicCache:
    """Return an empty cache; layers with a sliding window, which never grow large, are left to the library."""
    cache = DynamicCache(config=config)
    cache.layers = [_Growing() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


@contextmanager
def computing_in(model: Any, device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    """Move a model to a device and a wider dtype, and leave it on the CPU in the dtypes that it had.

    Nothing is lost: every narrower number is also one of the wider format.
    """
    before = {name: item.dtype for name, item in [*model.named_parameters(), *model.named_buffers()]}
    model.to(device=device, dtype=dtype)
    try:
        yield
    finally:
        model.to("cpu")
        for name, item in [*model.named_parameters(), *model.named_buffers()]:
            item.data = item.data.to(before[name])
