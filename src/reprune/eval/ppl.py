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
from reprune.evaluation import Measured, Subject
from reprune.terminal import summary

TOKENS_AT_ONCE = 128  # rows of logits compared at a time: a vocabulary is wide, and small pieces stay in the cache


BINS = 4  # parts that positions, and tokens by the dense model's entropy, are sorted into


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Settings; each is explained in conf/eval/ppl.yaml."""

    corpora: list[str]
    seq_len: int
    windows: int
    batch_size: int
    max_dense: float

    def check(self) -> None:
        """Nothing can be known to fail before weights are loaded."""

    def texts(self) -> dict[str, str]:
        """All text is that of the windows, from which documents that share text with calibration are left out."""
        return {}

    def identity(self) -> dict[str, Any]:
        """Depend on nothing beside settings, text and model."""
        return {}

    def steps(self, subject: Subject) -> int:
        """Count batches."""
        return sum(-(-len(windows) // self.batch_size) for windows in subject.tokens.values())

    def table(self, metrics: dict[str, float]) -> str:
        """Lay out the metrics of a run: a row a corpus."""
        return summary(metrics, self.corpora)

    def dense(self, subject: Subject, tick: Callable[[], None]) -> Measured:
        """Score a model by itself.

        Args:
            subject: the model, and windows of tokens, corpus -> (windows, seq_len) int64.
            tick: called after each batch.

        Returns:
            `ppl/<corpus>` and `ppl_stderr/<corpus>`, `bits_per_byte/<corpus>` (of the UTF-8 text that the scored tokens
            spell), `tokens/<corpus>` scored, and as state the hidden states in front of the output head.

        Raises:
            NumericalError: a perplexity is above `max_dense` or not finite.
        """
        metrics: dict[str, float] = {}
        state: dict[str, Tensor] = {}
        for corpus, windows in subject.tokens.items():
            losses, states = [], []
            for batch in windows.split(self.batch_size):
                logits, hidden = forward(subject.model, batch)
                states.append(hidden.cpu())
                losses += [compare(row, target).mean(0) for row, target in zip(logits, batch, strict=True)]
                del logits  # before the next batch makes its own: nothing else takes as much memory
                tick()
            state[corpus] = torch.cat(states)
            metrics |= _perplexity(corpus, torch.stack(losses)[:, 0], windows, subject.tokenizer)
            ppl = metrics[f"ppl/{corpus}"]
            if not ppl <= self.max_dense:
                raise NumericalError(
                    f"dense perplexity on {corpus} is {ppl:.4g}, above eval.ppl.max_dense={self.max_dense:g}: the "
                    f"model, its tokenizer or the text does not fit, and pruning would measure nothing. Check "
                    f"model.path, try model.bos=always (some families need it) or model.dtype=float32, or raise "
                    f"eval.ppl.max_dense."
                )
        return Measured(metrics, state=state)

    def pruned(self, subject: Subject, dense: Measured, tick: Callable[[], None]) -> Measured:
        """Score the pruned model and compare it with the dense one, token by token.

        Returns:
            For each corpus what `dense` gives, `kl` (mean KL(dense || pruned) per token, in nats) with its `_stderr`
            over windows, `agreement` (fraction of tokens whose most likely successor is the same), and both by quarters
            of the window (`kl_by_position/<corpus>/1` to 4) and of the tokens sorted by the dense model's entropy
            (`kl_by_entropy/<corpus>/1`, where it is surest, to 4; `entropy_dense/<corpus>/1` is the mean there).
        """
        metrics: dict[str, float] = {}
        for corpus, windows in subject.tokens.items():
            rows = []
            for batch, hidden in zip(
                windows.split(self.batch_size), dense.state[corpus].split(self.batch_size), strict=True
            ):
                logits, _ = forward(subject.model, batch, beside=hidden)
                both = logits.chunk(2)
                rows += [compare(*pair) for pair in zip(both[0], batch, both[1], strict=True)]
                del logits, both
                tick()
            each = torch.stack(rows)  # (windows, seq_len - 1, 4)
            loss, kl, agreement, _ = each.mean(1).T
            metrics |= _perplexity(corpus, loss, windows, subject.tokenizer)
            metrics[f"kl/{corpus}"] = kl.mean().item()
            metrics[f"kl_stderr/{corpus}"] = stderr(kl)
            metrics[f"agreement/{corpus}"] = agreement.mean().item()
            metrics |= _by_parts(corpus, each)
        return Measured(metrics)


@torch.no_grad()
def forward(model: Any, batch: Tensor, beside: Tensor | None = None) -> tuple[Tensor, Tensor]:
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


def compare(logits: Tensor, tokens: Tensor, dense: Tensor | None = None) -> Tensor:
    """Return (seq_len - 1, 4) float64: loss, KL to the dense logits, agreement with them and the dense entropy.

    Each for every scored token, in nats. Without dense logits there is the loss alone, (seq_len - 1, 1). Softmax in
    float32 whatever the logits' dtype.
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
            # Of the logits themselves: the logarithm of a softmax can round two of them to a tie.
            columns.append((dense[piece].argmax(-1) == logits[piece].argmax(-1)).float())
            columns.append(-(log_q.exp() * log_q).sum(-1))
        rows.append(torch.stack(columns, 1).double().cpu())
    return torch.cat(rows)


def _perplexity(corpus: str, losses: Tensor, windows: Tensor, tokenizer: Any) -> dict[str, float]:
    """Return perplexity, its standard error (delta method) and bits per byte from the mean loss of each window."""
    ppl = math.exp(min(losses.mean().item(), 700.0))  # a loss beyond that has no float; it is absurd as it stands
    scored = windows.numel() - len(windows)
    num_bytes = spelled_bytes(windows[:, 1:], tokenizer)
    return {
        f"ppl/{corpus}": ppl,
        f"ppl_stderr/{corpus}": ppl * stderr(losses),
        f"bits_per_byte/{corpus}": losses.mean().item() * scored / math.log(2) / num_bytes,
        f"tokens/{corpus}": scored,
    }


def spelled_bytes(tokens: Tensor, tokenizer: Any) -> int:
    """Count the UTF-8 bytes of the text that rows of tokens spell, special tokens left out; at least 1.

    A character that the edge of a row cuts counts as the replacement character that decoding puts there.
    """
    texts = tokenizer.batch_decode(tokens.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return max(sum(len(text.encode(errors="replace")) for text in texts), 1)


def _by_parts(corpus: str, each: Tensor) -> dict[str, float]:
    """Average divergence over quarters of the positions and of the dense entropies; each is (windows, tokens, 4)."""
    metrics = {}
    by_entropy = each.flatten(0, 1)
    by_entropy = by_entropy[by_entropy[:, 3].argsort(stable=True)]
    for name, parts in (("position", each.chunk(BINS, dim=1)), ("entropy", by_entropy.chunk(BINS))):
        for number, part in enumerate(parts, start=1):
            _, kl, agreement, entropy = part.reshape(-1, 4).mean(0).tolist()
            metrics[f"kl_by_{name}/{corpus}/{number}"] = kl
            metrics[f"agreement_by_{name}/{corpus}/{number}"] = agreement
            if name == "entropy":
                metrics[f"entropy_dense/{corpus}/{number}"] = entropy
    return metrics


def stderr(values: Tensor) -> float:
    """Standard error of the mean over windows; 0 for a single one."""
    return (values.std() / len(values) ** 0.5).item() if len(values) > 1 else 0.0
