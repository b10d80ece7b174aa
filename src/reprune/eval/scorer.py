"""lm-eval's model class around a model in memory, made faster: same requests, same log-likelihoods.

The answers to one question share its context, which goes through the model once; its keys and values then serve every
answer. Contexts of one length go together, so that nothing needs padding on the left. What shares nothing is sorted by
length and batched by tokens. Logits are made for scored positions only.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor

Request = tuple[Any, list[int], list[int]]  # what it belongs to, tokens of the context, tokens of the continuation


class Scorer(HFLM):
    """HFLM with shared contexts.

    Args:
        model: causal language model.
        tokenizer: its tokenizer.
        batch_tokens: tokens a forward pass, padding included; a longer sequence goes alone.
        share_contexts: whether answers share the pass over their question.
        tick: called for each scored request.
    """

    def __init__(
        self, model: Any, tokenizer: Any, batch_tokens: int, share_contexts: bool, tick: Callable[[], None]
    ) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=1)
        self._batch_tokens, self._share, self._tick = batch_tokens, share_contexts, tick
        # transformers 5.24 renamed it.
        known = signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        results: list[tuple[float, bool] | None] = [None] * len(requests)
        together: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, (_, context, continuation) in enumerate(requests):
            fits = len(context) + len(continuation) <= self.max_length
            # What is too long is cut on the left, each request by its own length: nothing is shared then.
            together[tuple(context) if self._share and fits else (-1, index)].append(index)
        alone = [group[0] for group in together.values() if len(group) == 1]
        shared = [group for group in together.values() if len(group) > 1]
        for batch in _batches(alone, lambda index: self._length(requests[index]), self._batch_tokens):
            for index, result in zip(batch, self._score_alone([requests[i] for i in batch]), strict=True):
                results[index] = result
                self._tick()
        by_length: dict[int, list[list[int]]] = defaultdict(list)
        for group in shared:
            by_length[len(requests[group[0]][1])].append(group)
        for length, groups in sorted(by_length.items(), reverse=True):
            for chunk in _batches(groups, partial(_keys, length), self._batch_tokens):
                for index, result in self._score_shared(requests, chunk):
                    results[index] = result
                    self._tick()
        scored = [result for result in results if result is not None]
        assert len(scored) == len(requests), "a request was not scored"
        return scored

    def _length(self, request: Request) -> int:
        return min(len(request[1]) + len(request[2]) - 1, self.max_length)

    def _score_alone(self, requests: list[Request]) -> list[tuple[float, bool]]:
        """Score requests in one padded batch. Padding is on the right, where a causal model does not look."""
        inputs = [(context + continuation)[-(self.max_length + 1) :][:-1] for _, context, continuation in requests]
        tokens = _padded(inputs).to(self.device)
        places = [
            (row, len(given) - len(continuation), len(given))
            for row, (given, (_, _, continuation)) in enumerate(zip(inputs, requests, strict=True))
        ]
        logits, _ = self._logits(places, input_ids=tokens, use_cache=False)
        return [_answer(piece, request[2]) for piece, request in zip(logits, requests, strict=True)]

    def _score_shared(
        self, requests: list[Request], groups: list[list[int]]
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Score groups of requests, each with one context; all contexts have the same length."""
        contexts = torch.tensor([requests[group[0]][1] for group in groups], device=self.device)
        length = contexts.shape[1]
        first, cache = self._logits(
            [(row, length - 1, length) for row in range(len(groups))], input_ids=contexts, use_cache=True
        )
        rows = [(row, index) for row, group in enumerate(groups) for index in group]
        longer = [(row, index) for row, index in rows if len(requests[index][2]) > 1]
        rest: dict[int, Tensor] = {}
        if longer:
            cache.batch_select_indices(torch.tensor([row for row, _ in longer], device=self.device))
            inputs = [requests[index][2][:-1] for _, index in longer]
            places = [(row, 0, len(given)) for row, given in enumerate(inputs)]
            logits, _ = self._logits(
                places, input_ids=_padded(inputs).to(self.device), use_cache=True, **{self._cache_name: cache}
            )
            rest = {index: piece for (_, index), piece in zip(longer, logits, strict=True)}
        for row, index in rows:
            scored = torch.cat([first[row], rest[index]]) if index in rest else first[row]
            yield index, _answer(scored, requests[index][2])

    def _logits(self, places: list[tuple[int, int, int]], **inputs: Any) -> tuple[list[Tensor], Any]:
        """Return the logits of some places of a batch, and the cache.

        Args:
            places: (row, start, stop) for each piece wanted.
            inputs: for the model.
        """
        seen = []

        def select(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            seen.append(True)
            return (torch.cat([args[0][row, start:stop] for row, start, stop in places])[None],)

        # In front of the output head, so whatever a family does to its logits afterwards is done to these.
        handle = self.model.get_output_embeddings().register_forward_pre_hook(select)
        try:
            out = self.model(**inputs)
        finally:
            handle.remove()
        assert len(seen) == 1, "the output head must run once a forward pass"
        return list(out.logits[0].split([stop - start for _, start, stop in places])), out.get(self._cache_name)


def _answer(logits: Tensor, continuation: list[int]) -> tuple[float, bool]:
    """Return the log-likelihood of a continuation, and whether greedy decoding would have produced it."""
    tokens = torch.tensor(continuation, device=logits.device)[-len(logits) :]
    log_p = logits.log_softmax(-1)
    return float(log_p.gather(1, tokens[:, None]).sum()), bool((log_p.argmax(-1) == tokens).all())


def _keys(length: int, group: list[int]) -> int:
    """Count the tokens whose keys and values a group of answers to one context needs."""
    return length * len(group)


def _padded(rows: list[list[int]]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])


def _batches(items: list[Any], length: Callable[[Any], int], limit: int) -> Iterator[list[Any]]:
    """Cut items into batches, longest first, of at most `limit` tokens when each is padded to the longest."""
    batch: list[Any] = []
    for item in sorted(items, key=length, reverse=True):  # a stable sort: ties stay in order
        if batch and length(batch[0]) * (len(batch) + 1) > limit:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch
