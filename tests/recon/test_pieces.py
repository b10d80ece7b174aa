import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from reprune.blocks import decoder_blocks, linears
from reprune.errors import ModelError
from reprune.recon.pieces import Cut, Piece, pieces, until
from reprune.recon.reconstruction import Unit
from reprune.streams import Stream, forward_block

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "intermediate_size": 48,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
OWN = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 1},
    "bloom": {"n_head": 4, "n_layer": 2},
    "phi": {"num_key_value_heads": 4},
}


def block_and_call(family, **more):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | OWN.get(family, {}) | more)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    stream = Stream.enter(model, "text", torch.randint(2, 60, (2, 8)), 2, CPU, CPU)
    return decoder_blocks(model)[0], stream.pruned, stream.call(0, 2)


def split(unit, family, **more):
    block, hidden, call = block_and_call(family, **more)
    return pieces(unit, block, lambda: forward_block(block, hidden, call)), block, hidden, call


@pytest.mark.parametrize(
    ("family", "attention", "feed_forward"),
    [
        ("llama", "self_attn", "mlp"), ("qwen3", "self_attn", "mlp"), ("gemma2", "self_attn", "mlp"),
        ("gpt2", "attn", "mlp"), ("olmo2", "self_attn", "mlp"),
        ("opt", "self_attn", "fc1+fc2"),
    ],
)  # fmt: skip
def test_attention_then_feed_forward(family, attention, feed_forward):
    found, block, _, _ = split(Unit.submodule, family)
    assert [piece.name for piece in found] == [attention, feed_forward]
    assert found[1].cut is None
    parts = [{id(p) for name in piece.modules for p in block.get_submodule(name).parameters()} for piece in found]
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == {id(param) for param in block.parameters()}


def test_the_cut_is_where_the_residual_enters_the_second_half():
    (attention, _), block, hidden, call = split(Unit.submodule, "llama")
    with until(block, attention.cut) as run:
        middle = run(lambda: forward_block(block, hidden, call))
    own, _ = block.self_attn(block.input_layernorm(hidden), **call.kwargs)
    torch.testing.assert_close(middle, hidden + own)
    rest = block.mlp(block.post_attention_layernorm(middle))
    torch.testing.assert_close(middle + rest, forward_block(block, hidden, call))  # and nothing is left hooked


@pytest.mark.parametrize(
    ("family", "more", "reason"),
    [
        ("gpt_neox", {"use_parallel_residual": True}, "does not wait for attention"),
        ("phi", {}, "does not wait for self_attn"),
        ("bloom", {}, "adds the residual itself"),
    ],
)
def test_other_families_are_refused_with_a_reason(family, more, reason):
    with pytest.raises(ModelError, match=reason):
        split(Unit.submodule, family, **more)


def test_linears_in_the_order_of_the_forward_pass():
    found, block, hidden, call = split(Unit.linear, "llama")
    names = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    assert found == [Piece(name, [name], Cut(name, leaving=True)) for name in names]
    with until(block, found[-1].cut) as run:
        output = run(lambda: forward_block(block, hidden, call))
    assert output.shape == hidden.shape
    assert set(linears(block)) == set(names)
