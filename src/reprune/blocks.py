"""Find the decoder blocks of any causal language model and the linears in them: the only code that looks at structure.

No architecture is named. Blocks are the one list of modules as long as the config says the model is deep; linears are
the modules in a block that hold a weight matrix.
"""

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from reprune.errors import ModelError


def decoder_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder blocks of a model, in order.

    Args:
        model: any causal language model of transformers.

    Raises:
        ModelError: no list of modules, or more than one, has as many entries as the config has hidden layers.
    """
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    found = [(name, module) for name, module in lists if len(module) == depth]
    # A list inside one of the candidates' own blocks (experts, say) is a part of a block, whatever its length.
    outer = [(name, module) for name, module in found if not any(name.startswith(f"{other}.") for other, _ in found)]
    if len(outer) != 1:
        seen = ", ".join(f"{name} ({len(module)})" for name, module in lists) or "none"
        raise ModelError(
            f"{type(model).__name__} is unsupported because {len(outer)} of its module lists have the {depth} entries "
            f"that num_hidden_layers states; exactly one must. Its module lists: {seen}."
        )
    return outer[0][1]


def linears(block: nn.Module) -> dict[str, nn.Linear]:
    """Return the prunable linears of one block by name, in the block's own order.

    Raises:
        ModelError: the block has none, or holds matrices outside of linears (fused experts, convolutions), which
            would silently stay dense.
    """
    found: dict[str, nn.Linear] = {
        name: module for name, module in block.named_modules() if isinstance(module, nn.Linear | Conv1D)
    }
    if not found:
        raise ModelError(f"{type(block).__name__} is unsupported because it has no linear layers to prune.")
    owned = {id(module.weight) for module in found.values()}
    others = [name for name, param in block.named_parameters() if param.ndim > 1 and id(param) not in owned]
    if others:
        raise ModelError(
            f"{type(block).__name__} is unsupported because some of its matrices are not linear layers and would "
            f"silently stay dense: {', '.join(others[:6])}."
        )
    return found


def weight_of(linear: nn.Linear) -> Tensor:
    """Return the weight as an (out, in) view that shares memory with the module's parameter.

    GPT-2's Conv1D stores (in, out); its transpose is returned, so writing into the result works for both.
    """
    weight = linear.weight.detach()
    return weight.T if isinstance(linear, Conv1D) else weight


def as_stored(linear: nn.Linear, matrix: Tensor) -> Tensor:
    """Lay out an (out, in) matrix, such as a keep mask, as the linear stores its weight."""
    return matrix.T.contiguous() if isinstance(linear, Conv1D) else matrix
