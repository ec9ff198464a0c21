"""A trained T5 from the package index: the title model that the wheel ``traceforge-title-model`` carries.

It has the shape of flan-t5-small: 8 + 8 layers, 6 heads of width 64, bidirectional and causal bias tables [32, 6], an
output layer of its own. The wheel holds two ONNX graphs in int8, one number a tensor for scale and zero point. The
weights (q − zero point) · scale are put into transformers' own class, in fp32.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["PREFIX", "load_model", "load_tokenizer"]

PREFIX = "summarize agent step: "
"""What the model was trained to see in front of a text to which it gives a title."""

_GRAPHS = {"encoder": "enc.", "decoder": "m."}


def load_tokenizer():
    """The model's own tokenizer (``tokenizers.Tokenizer``), without the cut at 48 tokens that its file asks for."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(_data() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def load_model():
    """The model in fp32 on the CPU, in evaluation mode.

    Raises:
        RuntimeError: the graphs do not hold exactly the parameters of the class.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32128, d_model=512, d_kv=64, d_ff=1024, num_layers=8, num_decoder_layers=8, num_heads=6,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0, pad_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    weights = {name: w for part, prefix in _GRAPHS.items() for name, w in _weights(part, prefix).items()}
    weights["shared.weight"] = weights["decoder.embed_tokens.weight"] = weights["encoder.embed_tokens.weight"]
    # The class ties the output layer to the embedding whatever the configuration says: untie it before loading.
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    model.load_state_dict(weights, strict=True, assign=True)
    # assign makes a parameter of each name: tie the embeddings again.
    model.encoder.embed_tokens.weight = model.decoder.embed_tokens.weight = model.shared.weight
    return model.eval()


def _data() -> Path:
    import traceforge_title_model

    return traceforge_title_model.span_dir()


def _weights(part: str, prefix: str) -> dict[str, Tensor]:
    """The parameters of one graph by their names in the class."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(_data() / f"{part}.onnx").graph
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    own = lambda name: f"encoder.{name.removeprefix(prefix)}" if part == "encoder" else name.removeprefix(prefix)  # noqa: E731

    def dequantised(base: str) -> Tensor:
        q, scale, zero = (
            torch.from_numpy(stored[f"{base}_{kind}"].copy()) for kind in ("quantized", "scale", "zero_point")
        )
        return (q.float() - zero.float()) * scale.float()

    weights = {}
    for name, array in stored.items():
        if "layer_norm" in name and array.dtype.kind == "f":
            weights[own(name)] = torch.from_numpy(array.copy())
        elif name.endswith("weight_quantized"):
            weights[own(name.removesuffix("_quantized"))] = dequantised(name.removesuffix("_quantized"))
    # A matrix of a linear layer has lost its name: the node that multiplies by it has the layer's path, and it is
    # stored transposed.
    for node in graph.node:
        if node.op_type == "MatMulInteger":
            path = ".".join(re.sub(r"/MatMul.*$", "", node.name).strip("/").split("/"))
            weights[f"{own(path)}.weight"] = dequantised(node.input[1].removesuffix("_quantized")).T.contiguous()
    return weights
