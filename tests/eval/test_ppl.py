import copy
import math

import pytest
import torch
import transformers as hf
from torch.nn import functional as F

from reprune.blocks import decoder_blocks
from reprune.errors import NumericalError
from reprune.eval.ppl import Perplexity
from reprune.evaluation import Subject, as_dense
from reprune.model.tiny import byte_tokenizer


def perplexity(**changes):
    settings = {"corpora": ["text"], "seq_len": 200, "windows": 5, "batch_size": 2, "max_dense": 1e6}
    return Perplexity(**(settings | changes))


def gemma2(tiny_model, seed):
    """Gemma 2 caps its logits behind the output head; a cap of 1 makes that visible."""
    torch.manual_seed(seed)
    config = hf.Gemma2Config(
        vocab_size=258, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=64, sliding_window=16, final_logit_softcapping=1.0, initializer_range=0.3,
    )  # fmt: skip
    return hf.Gemma2ForCausalLM(config).eval()


MODELS = {"tiny": lambda tiny_model, seed: tiny_model(seed=seed), "gemma2": gemma2}


@pytest.fixture(params=MODELS)
def pair(request, tiny_model):
    """A model and a copy whose blocks are damaged; the two share the output head, as a dense and a pruned model do."""
    dense = MODELS[request.param](tiny_model, 0)
    pruned, generator = copy.deepcopy(dense), torch.Generator().manual_seed(1)
    for param in decoder_blocks(pruned).parameters():
        param.data.mul_(torch.rand(param.shape, generator=generator) < 0.7)
    return [dense, pruned]


@torch.no_grad()
def logits_of(model, tokens):
    return model(input_ids=tokens).logits.double()[:, :-1]


def score(dense_model, model, windows, **changes):
    item, ticks, tokenizer = perplexity(**changes), [], byte_tokenizer()
    dense = item.dense(Subject(dense_model, tokenizer, windows), lambda: ticks.append(1))
    subject = Subject(model, tokenizer, windows)
    pruned = item.pruned(subject, dense, lambda: ticks.append(1))
    assert len(ticks) == 2 * item.steps(subject)
    assert item.steps(subject) == sum(-(-len(tokens) // item.batch_size) for tokens in windows.values())
    return as_dense(dense.metrics) | pruned.metrics


def test_perplexity_by_hand(pair, tokens):
    windows = {"text": tokens(5, 200), "other": tokens(3, 40, seed=1)}  # 200: more than one piece of rows
    metrics = score(*pair, windows)
    for corpus, drawn in windows.items():
        for key, model in zip(("ppl_dense", "ppl"), pair, strict=True):
            losses = torch.stack([
                F.cross_entropy(row, window[1:])
                for row, window in zip(logits_of(model, drawn), drawn, strict=True)
            ])  # fmt: skip
            ppl = losses.mean().exp().item()
            assert metrics[f"{key}/{corpus}"] == pytest.approx(ppl, rel=1e-5)
            spread = ppl * losses.std().item() / len(drawn) ** 0.5
            assert metrics[f"{key}_stderr/{corpus}"] == pytest.approx(spread, rel=1e-3)
        assert metrics[f"tokens/{corpus}"] == drawn.numel() - len(drawn)


def test_divergence_by_hand(pair, tokens):
    drawn = tokens(5, 200)
    metrics = score(*pair, {"text": drawn})
    dense, pruned = (logits_of(model, drawn) for model in pair)
    kl = F.kl_div(pruned.log_softmax(-1), dense.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    assert metrics["kl/text"] == pytest.approx(kl.mean().item(), rel=1e-4)
    assert metrics["kl_stderr/text"] == pytest.approx(kl.mean(1).std().item() / 5**0.5, rel=1e-3)
    agreement = (dense.argmax(-1) == pruned.argmax(-1)).double().mean().item()
    assert metrics["agreement/text"] == agreement
    assert 0 < metrics["agreement/text"] < 1


def test_a_model_agrees_with_itself(pair, tokens):
    metrics = score(pair[0], pair[0], {"text": tokens(5, 200)})
    assert metrics["kl/text"] == pytest.approx(0, abs=1e-6)
    assert metrics["agreement/text"] == 1
    assert metrics["ppl/text"] == pytest.approx(metrics["ppl_dense/text"], rel=1e-6)


def test_a_single_window_has_no_spread(tiny_model, tokens):
    metrics = score(tiny_model(), tiny_model(seed=1), {"text": tokens(1, 20)})
    assert (metrics["ppl_stderr/text"], metrics["kl_stderr/text"]) == (0, 0)


def test_the_batch_does_not_matter(pair, tokens):
    windows = {"text": tokens(5, 30)}
    one, other = score(*pair, windows, batch_size=1), score(*pair, windows, batch_size=5)
    assert one == {key: pytest.approx(value, rel=1e-4) for key, value in other.items()}


def test_an_absurd_dense_perplexity_stops(tiny_model, tokens):
    subject = Subject(tiny_model(), byte_tokenizer(), {"text": tokens(3, 20)})
    with pytest.raises(
        NumericalError, match=r"dense perplexity on text is .*above eval\.ppl\.max_dense=2.*model\.bos=always"
    ):
        perplexity(max_dense=2.0).dense(subject, lambda: None)


def test_a_broken_model_stops(tiny_model, tokens):
    model = tiny_model()
    model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(NumericalError, match="dense perplexity on text is nan"):
        perplexity().dense(Subject(model, byte_tokenizer(), {"text": tokens(3, 20)}), lambda: None)


def test_bits_per_byte_by_hand(tiny_model):
    text = "The river in winter, étoile, and the stone."
    drawn = torch.tensor([byte_tokenizer()(text)["input_ids"]])  # a token a byte
    metrics = score(tiny_model(), tiny_model(seed=1), {"text": drawn})
    loss = F.cross_entropy(logits_of(tiny_model(), drawn)[0], drawn[0, 1:]).item()
    assert metrics["bits_per_byte_dense/text"] == pytest.approx(loss / math.log(2), rel=1e-5)


def test_divergence_by_parts(pair, tokens):
    drawn = tokens(5, 201)
    metrics = score(*pair, {"text": drawn})
    dense, pruned = (logits_of(model, drawn) for model in pair)
    log_q, log_p = dense.log_softmax(-1), pruned.log_softmax(-1)
    kl = (log_q.exp() * (log_q - log_p)).sum(-1)
    for part in range(4):
        mean = kl[:, 50 * part : 50 * (part + 1)].mean().item()
        assert metrics[f"kl_by_position/text/{part + 1}"] == pytest.approx(mean, rel=1e-4)
    entropy = -(log_q.exp() * log_q).sum(-1).flatten()
    surest = entropy.argsort()[:250]
    assert metrics["entropy_dense/text/1"] == pytest.approx(entropy[surest].mean().item(), rel=1e-4)
    assert metrics["kl_by_entropy/text/1"] == pytest.approx(kl.flatten()[surest].mean().item(), rel=1e-2)
    for kind in ("position", "entropy"):
        parts = [metrics[f"agreement_by_{kind}/text/{part}"] for part in range(1, 5)]
        assert sum(parts) / 4 == pytest.approx(metrics["agreement/text"])
