"""Perplexity of the dense and the pruned model, and how far the pruned one diverges from the dense one.

Each window is scored on its own: tokens 2 to seq_len, given the tokens before them in the window. This is the protocol
of the pruning papers but for the draw of the windows, which here come from the test split of a corpus.
The dense model's states in front of its output head are kept, and go through the head once more beside the pruned
model's: the head is never pruned, so the divergence costs no second pass over the dense model.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reprune.errors import NumericalError

TOKENS_AT_ONCE = 128  # rows of logits compared at a time: a vocabulary is wide, and small pieces stay in the cache


@dataclass(frozen=True)
class Dense:
    """What is kept of the dense model: its metrics, and for each corpus the states in front of the output head."""

    metrics: dict[str, float]
    states: dict[str, list[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Settings; each is explained in conf/eval/ppl.yaml."""

    corpora: list[str]
    seq_len: int
    windows: int
    batch_size: int
    max_dense: float

    def dense(self, model: Any, tokens: dict[str, Tensor], tick: Callable[[], None]) -> Dense:
        """Score the dense model.

        Args:
            model: causal language model, in evaluation mode.
            tokens: corpus -> (windows, seq_len) int64.
            tick: called after each batch.

        Returns:
            `ppl_dense/<corpus>` and `ppl_dense_stderr/<corpus>`, and what `pruned` needs.

        Raises:
            NumericalError: a perplexity is above `max_dense` or not finite.
        """
        metrics: dict[str, float] = {}
        states: dict[str, list[Tensor]] = {}
        for corpus, windows in tokens.items():
            losses, states[corpus] = [], []
            for batch in windows.split(self.batch_size):
                logits, hidden = _forward(model, batch)
                states[corpus].append(hidden.cpu())
                losses += [_compare(row, target).mean(0) for row, target in zip(logits, batch, strict=True)]
                del logits  # before the next batch makes its own: nothing else takes as much memory
                tick()
            metrics |= _perplexity(f"ppl_dense{{}}/{corpus}", torch.stack(losses)[:, 0])
            ppl = metrics[f"ppl_dense/{corpus}"]
            if not ppl <= self.max_dense:
                raise NumericalError(
                    f"dense perplexity on {corpus} is {ppl:.4g}, above eval.ppl.max_dense={self.max_dense:g}: the "
                    f"model, its tokenizer or the text does not fit, and pruning would measure nothing. Check "
                    f"model.path, try model.bos=always (some families need it) or model.dtype=float32, or raise "
                    f"eval.ppl.max_dense."
                )
        return Dense(metrics, states)

    def pruned(self, model: Any, tokens: dict[str, Tensor], dense: Dense, tick: Callable[[], None]) -> dict[str, float]:
        """Score the pruned model and compare it with the dense one, token by token.

        Returns:
            For each corpus `ppl`, `kl` (mean KL(dense || pruned) per token, in nats), each with its `_stderr` over
            windows, `agreement` (fraction of tokens whose most likely successor is the same), and `tokens` scored.
        """
        metrics: dict[str, float] = {}
        for corpus, windows in tokens.items():
            rows = []
            for batch, hidden in zip(windows.split(self.batch_size), dense.states[corpus], strict=True):
                logits, _ = _forward(model, batch, beside=hidden)
                both = logits.chunk(2)
                rows += [_compare(*pair).mean(0) for pair in zip(both[0], batch, both[1], strict=True)]
                del logits, both
                tick()
            loss, kl, agreement = torch.stack(rows).T
            metrics |= _perplexity(f"ppl{{}}/{corpus}", loss)
            metrics[f"kl/{corpus}"] = kl.mean().item()
            metrics[f"kl_stderr/{corpus}"] = _stderr(kl)
            metrics[f"agreement/{corpus}"] = agreement.mean().item()
            metrics[f"tokens/{corpus}"] = windows.numel() - len(windows)
        return metrics


@torch.no_grad()
def _forward(model: Any, batch: Tensor, beside: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return logits and the states in front of the output head; `beside` are other states to send through it too.

    They join the batch at the head, so whatever the family does to logits (a cap, a scale) is done to both.
    """
    seen = []

    def hook(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        seen.append(args[0])
        return None if beside is None else (torch.cat([args[0], beside.to(args[0].device)]),)

    handle = model.get_output_embeddings().register_forward_pre_hook(hook)
    try:
        logits = model(input_ids=batch.to(model.device), use_cache=False).logits
    finally:
        handle.remove()
    return logits, seen[0]


def _compare(logits: Tensor, tokens: Tensor, dense: Tensor | None = None) -> Tensor:
    """Return (seq_len - 1, 3) float64: loss, KL to the dense logits and agreement with them, for each scored token.

    Without dense logits there is the loss alone, (seq_len - 1, 1). Softmax in float32 whatever the logits' dtype.
    """
    targets = tokens[1:].to(logits.device)
    rows = []
    for start in range(0, len(targets), TOKENS_AT_ONCE):
        piece = slice(start, min(start + TOKENS_AT_ONCE, len(targets)))
        log_p = logits[piece].float().log_softmax(-1)
        columns = [-log_p.gather(1, targets[piece, None])[:, 0]]
        if dense is not None:
            log_q = dense[piece].float().log_softmax(-1)
            columns.append((log_q.exp() * (log_q - log_p)).sum(-1))
            columns.append((log_q.argmax(-1) == log_p.argmax(-1)).float())
        rows.append(torch.stack(columns, 1).double().cpu())
    return torch.cat(rows)


def _perplexity(name: str, losses: Tensor) -> dict[str, float]:
    """Return perplexity and its standard error (delta method) from the mean loss of each window."""
    ppl = math.exp(min(losses.mean().item(), 700.0))  # a loss beyond that has no float; it is absurd as it stands
    return {name.format(""): ppl, name.format("_stderr"): ppl * _stderr(losses)}


def _stderr(values: Tensor) -> float:
    """Standard error of the mean over windows; 0 for a single one."""
    return (values.std() / len(values) ** 0.5).item() if len(values) > 1 else 0.0
