"""A tiny random Llama with a byte tokenizer, made in code: for tests, and to try a setting in seconds."""

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from reprune.model.pretrained import Bos, Dtype

BOS, EOS = "<bos>", "<eos>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token a byte (ids 0 to 255), then <bos> (256) and <eos> (257)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """Settings of the random model; see conf/model/tiny.yaml."""

    num_blocks: int
    hidden_size: int
    seed: int
    dtype: Dtype
    device: str
    bos: Bos

    def max_positions(self) -> int:
        """Return the largest sequence length, in tokens."""
        return 1024

    def describe(self) -> str:
        """Name the model in one line."""
        return f"a random Llama with {self.num_blocks} blocks of width {self.hidden_size}"

    def skeleton(self) -> PreTrainedModel:
        """Return the model for its shapes."""
        return self.load()[0]

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Make the model and its tokenizer; the same seed gives the same weights."""
        config = LlamaConfig(
            vocab_size=258,
            hidden_size=self.hidden_size,
            intermediate_size=2 * self.hidden_size,
            num_hidden_layers=self.num_blocks,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=self.max_positions(),
            bos_token_id=256,
            eos_token_id=257,
            tie_word_embeddings=True,
            initializer_range=0.1,  # the library's 0.02 leaves so narrow a model almost the identity
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = LlamaForCausalLM(config)
        dtype = torch.float32 if self.dtype is Dtype.auto else getattr(torch, self.dtype.value)
        return model.to(dtype).eval(), byte_tokenizer()
