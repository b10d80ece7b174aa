import itertools

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from reprune.generate import Sampling, computing_in, generate, pick

PLAIN = Sampling(repetition_penalty=1.0, temperature=1.0, start_temperature=None, start_tokens=1, top_k=None, top_p=1.0)
SHARP = Sampling(repetition_penalty=1.3, temperature=0.7, start_temperature=2.0, start_tokens=5, top_k=20, top_p=0.9)
NEVER = frozenset({-1})


def numbers(rows, steps, seed=0):
    return torch.rand(rows, steps, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def slow(model, prompt, row, sampling, limit, stop):
    """One text, without a cache, through the processors of transformers; returns its tokens and their loss."""
    text, loss = prompt.tolist(), 0.0
    for step in range(limit):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[:, -1].double()
        temperature = sampling.temperature
        if sampling.start_temperature is not None and step < sampling.start_tokens:
            share = step / sampling.start_tokens
            temperature = (1 - share) * sampling.start_temperature + share * sampling.temperature
        scores = logits
        if sampling.repetition_penalty != 1:
            scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(torch.tensor([text]), scores)
        scores = TemperatureLogitsWarper(temperature)(None, scores)
        if sampling.top_k:
            scores = TopKLogitsWarper(sampling.top_k)(None, scores)
        if sampling.top_p < 1:
            scores = TopPLogitsWarper(sampling.top_p)(None, scores)
        likely = sorted(((p, -i) for i, p in enumerate(scores.softmax(-1)[0].tolist())), reverse=True)
        mass = itertools.accumulate(p for p, _ in likely)
        token = next(-i for (_, i), total in zip(likely, mass, strict=True) if total > row[step])
        if token in stop:
            return text[len(prompt) :], loss
        loss -= logits.log_softmax(-1)[0, token].item()
        text.append(token)
    return text[len(prompt) :], loss


@pytest.mark.parametrize("sampling", [PLAIN, SHARP])
def test_a_batch_equals_texts_written_one_by_one_without_a_cache(tiny_model, tokens, sampling):
    model, prompts, given = tiny_model().double(), tokens(6, 3), numbers(6, 25)
    stop = frozenset(range(0, 258, 12))  # often enough that rows end at different steps
    written = generate(model, prompts, given, sampling, 25, stop)
    expected = [slow(model, prompt, row, sampling, 25, stop) for prompt, row in zip(prompts, given, strict=True)]
    assert [item.tokens for item in written] == [text for text, _ in expected]
    assert [item.loss for item in written] == pytest.approx([loss for _, loss in expected])
    assert len({len(item.tokens) for item in written}) > 2
    assert [item.ended for item in written] == [len(item.tokens) < 25 for item in written]


def test_the_rows_beside_it_do_not_change_a_text(tiny_model, tokens):
    model, prompts, given = tiny_model().double(), tokens(8, 4), numbers(8, 30)
    stop = frozenset(range(0, 258, 20))
    whole = generate(model, prompts, given, SHARP, 30, stop)
    for size in (1, 3):
        parts = [
            generate(model, prompts[i : i + size], given[i : i + size], SHARP, 30, stop) for i in range(0, 8, size)
        ]
        again = [item for part in parts for item in part]
        assert [item.tokens for item in again] == [item.tokens for item in whole]


def test_greedy_choice_is_that_of_transformers(tiny_model, tokens):
    model, prompts = tiny_model(), tokens(3, 4)
    expected = model.generate(prompts, do_sample=False, max_new_tokens=10, min_new_tokens=10, pad_token_id=0)[:, 4:]
    written = generate(model, prompts, None, None, 10, NEVER)
    assert [item.tokens for item in written] == expected.tolist()


@pytest.mark.parametrize("sampling", [PLAIN, SHARP])
def test_tokens_are_picked_with_their_probability(sampling):
    logits = 2 * torch.randn(1, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    context = torch.tensor([[3, 4, 5]])
    scores = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(sampling.top_k or 40),
            TopPLogitsWarper(sampling.top_p),
        ]
    )(context, logits.clone())
    seen = torch.zeros(1, 40, dtype=torch.bool).scatter_(1, context, True)
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    chosen = pick(logits.expand(20_000, -1), grid, seen.expand(20_000, -1), sampling, temperature=0.7)
    share = torch.bincount(chosen, minlength=40) / 20_000
    torch.testing.assert_close(share.double(), scores.softmax(-1)[0], atol=2e-4, rtol=0)
    assert (share[scores[0] == -torch.inf] == 0).all()


def test_numbers_at_the_ends_pick_a_token_that_may_be():
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]], dtype=torch.float64)
    for number, token in ((0.0, 2), (1 - 2**-53, 0)):
        assert pick(logits, torch.tensor([number], dtype=torch.float64), None, PLAIN, 1.0).tolist() == [token]


def test_a_prompt_alone_is_continued_by_nothing(tiny_model, tokens):
    assert [item.tokens for item in generate(tiny_model(), tokens(2, 3), None, None, 0, NEVER)] == [[], []]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_computing_in_another_format_leaves_a_model_as_it_was(tiny_model, dtype):
    model = tiny_model(dtype=dtype)
    before = {name: item.clone() for name, item in [*model.named_parameters(), *model.named_buffers()]}
    with computing_in(model, torch.device("cpu"), torch.float64):
        assert model.lm_head.weight.dtype == torch.float64
        assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, item in [*model.named_parameters(), *model.named_buffers()]:
        assert item.dtype == before[name].dtype
        assert torch.equal(item, before[name])
    assert model.lm_head.weight is model.model.embed_tokens.weight
