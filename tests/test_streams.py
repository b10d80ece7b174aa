import pytest
import torch
import transformers as hf

from reprune.blocks import decoder_blocks, linears
from reprune.errors import NumericalError
from reprune.statistics import Hessian, InputNorm
from reprune.streams import Stream

CPU = torch.device("cpu")
SIZES = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = SIZES | {"intermediate_size": 64, "num_key_value_heads": 2, "sliding_window": 4}
GPT2 = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
FAMILIES = {
    "opt": lambda: hf.OPTForCausalLM(hf.OPTConfig(ffn_dim=64, word_embed_proj_dim=32, **SIZES)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
    "neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(intermediate_size=64, **SIZES)),
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=4)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(head_dim=8, **GATED)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GATED)),
}
QKV, GATES = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.gate_proj", "mlp.up_proj"]
LLAMA = [QKV, ["self_attn.o_proj"], GATES, ["mlp.down_proj"]]
GROUPS = {
    "tiny": LLAMA,
    "opt": [QKV, ["self_attn.out_proj"], ["fc1"], ["fc2"]],
    "gpt2": [["attn.c_attn"], ["attn.c_proj"], ["mlp.c_fc"], ["mlp.c_proj"]],
    "neox": [["attention.query_key_value"], ["attention.dense"], ["mlp.dense_h_to_4h"], ["mlp.dense_4h_to_h"]],
    "bloom": [
        ["self_attention.query_key_value"],
        ["self_attention.dense"],
        ["mlp.dense_h_to_4h"],
        ["mlp.dense_4h_to_h"],
    ],
    "gemma2": LLAMA,
    "mistral": LLAMA,
}


@pytest.fixture(params=GROUPS)
def family(request):
    return request.param


@pytest.fixture
def model(family, tiny_model):
    torch.manual_seed(0)
    return tiny_model() if family == "tiny" else FAMILIES[family]().eval()


def enter(model, tokens, **kwargs):
    return Stream.enter(model, "text", tokens, 2, CPU, CPU, **kwargs)


def through(stream, model):
    states = [stream.pruned]
    for index, block in enumerate(decoder_blocks(model)):
        states.append(stream.run(block, index, states[-1], "dense model"))
    return states


@torch.no_grad()
def own_states(model, tokens, batch_size=2):
    """The model's output_hidden_states, and the last block's output, which that has only after the final norm."""
    batches, last = [], []
    handle = decoder_blocks(model)[-1].register_forward_hook(
        lambda _, __, output: last.append(output[0] if isinstance(output, tuple) else output)
    )
    for batch in tokens.split(batch_size):
        batches.append(model(input_ids=batch, output_hidden_states=True, use_cache=False).hidden_states[:-1])
    handle.remove()
    return [*(torch.cat(states) for states in zip(*batches, strict=True)), torch.cat(last)]


def test_states_are_the_models_own(model, tokens):
    tokens = tokens(5)  # three batches, the last of them smaller
    found = through(enter(model, tokens), model)
    expected = own_states(model, tokens)
    assert len(found) == len(expected) == 3
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_gather_finds_the_linears_that_read_one_input(family, model, tokens):
    stream, seen = enter(model, tokens(5)), []
    block = decoder_blocks(model)[0]
    groups, output, _ = stream.gather(block, 0, stream.pruned, lambda name, *_: seen.append(name), linears(block), True)
    assert groups == GROUPS[family]
    assert seen == [group[0] for group in GROUPS[family]] * 3  # once a batch and group
    assert torch.equal(output, stream.run(block, 0, stream.pruned, "dense model"))


@pytest.mark.parametrize("kind", [Hessian, InputNorm])
def test_ending_a_pass_early_gives_the_same_statistics(model, tokens, kind):
    stream = enter(model, tokens(5))
    block = decoder_blocks(model)[1]
    calls = []
    handle = linears(block)[[*linears(block)][-1]].register_forward_hook(lambda *_: calls.append(1))

    def collect(want_output):
        stats = {}

        def update(name, inputs, _):
            stats.setdefault(name, kind(inputs.shape[-1], CPU))
            stats[name].update(inputs if inputs.ndim == 3 else inputs.unsqueeze(0))

        return stream.gather(block, 1, stream.pruned, update, linears(block), want_output)[0], stats

    (whole_groups, whole), whole_calls = collect(True), len(calls)
    (early_groups, early), early_calls = collect(False), len(calls) - whole_calls
    handle.remove()
    assert (whole_calls, early_calls) == (3, 1)  # the first pass is whole, to learn how often linears are called
    assert whole_groups == early_groups
    assert whole.keys() == early.keys()
    for name, stat in whole.items():
        for key, value in vars(stat).items():
            other = vars(early[name])[key]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, (name, key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entering_leaves_the_model_as_it_was(model, tokens, dtype):
    model = model.to(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits = model(input_ids=tokens(1)).logits
    stream = enter(model, tokens(5), parts=[3])
    assert stream.pruned.dtype == torch.float32
    after = model.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype == dtype
        assert torch.equal(value, after[name])
    assert not any("forward" in vars(block) for block in decoder_blocks(model))
    assert torch.equal(model(input_ids=tokens(1)).logits, logits)


def test_a_bfloat16_model_is_computed_in_float32(tiny_model, tokens):
    model = tiny_model(2, "bfloat16")
    expected = own_states(tiny_model(2, "bfloat16").float(), tokens(5))
    stream = enter(model, tokens(5))
    decoder_blocks(model).float()  # as the walk does, block by block
    for one, other in zip(through(stream, model), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_a_part_gets_its_own_arguments(tiny_model, tokens):
    model = tiny_model()
    stream = enter(model, tokens(4), parts=[3])
    call = stream.call(1, 1)  # three in batches of two leave one
    with torch.no_grad():
        batch = decoder_blocks(model)[1](stream.pruned[:1], *call.args, **call.kwargs)
    torch.testing.assert_close(batch, stream.run(decoder_blocks(model)[1], 1, stream.pruned, "x")[:1])


def test_a_nan_names_corpus_block_and_stage(tiny_model, tokens):
    model = tiny_model()
    stream = enter(model, tokens(5))
    decoder_blocks(model)[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(NumericalError, match=r"hidden states of text after block 1 \(after pruning\): not finite"):
        stream.run(decoder_blocks(model)[1], 1, stream.pruned, "after pruning")


def test_forwards_count_sequences(tiny_model, tokens):
    model = tiny_model()
    stream = enter(model, tokens(5))
    assert stream.forwards == 0
    through(stream, model)
    assert stream.forwards == 10
