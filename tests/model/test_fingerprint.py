import torch

from reprune.model.fingerprint import fingerprint
from reprune.model.tiny import byte_tokenizer


def test_the_same_weights_have_the_same_fingerprint(tiny_model):
    assert fingerprint(tiny_model(), byte_tokenizer()) == fingerprint(tiny_model(), byte_tokenizer())


def test_whatever_differs_shows(tiny_model):
    changed = tiny_model()
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-6
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["more"])
    kinds = [
        (tiny_model(), byte_tokenizer()),
        (changed, byte_tokenizer()),
        (tiny_model(seed=1), byte_tokenizer()),
        (tiny_model(num_blocks=3), byte_tokenizer()),
        (tiny_model(dtype="bfloat16"), byte_tokenizer()),
        (tiny_model(), tokenizer),
    ]
    assert len({fingerprint(*kind) for kind in kinds}) == len(kinds)


def test_reading_changes_nothing(tiny_model):
    model = tiny_model()
    before = fingerprint(model, byte_tokenizer())
    model(input_ids=torch.tensor([[1, 2, 3]]))
    assert fingerprint(model, byte_tokenizer()) == before
