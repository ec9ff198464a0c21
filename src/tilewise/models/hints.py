"""Attention layers that patch() does not replace, though a constructor for their terms exists: which one it is."""

from __future__ import annotations

from torch import nn

__all__ = ["hint"]

CONSTRUCTORS: dict[tuple[str, str], str] = {
    ("bloom", "BloomAttention"): "ALiBi",
    ("deberta", "DisentangledSelfAttention"): "DeBERTaV1",
    ("inkling", "InklingAttention"): "Inkling",
    ("mpnet", "MPNetSelfAttention"): "MPNet",
    ("mpt", "MptAttention"): "ALiBi",
    ("parakeet", "ParakeetEncoderAttention"): "TransformerXL",
    ("seamless_m4t", "SeamlessM4TConformerSelfAttention"): "TransformerXL",
    ("seamless_m4t_v2", "SeamlessM4Tv2ConformerSelfAttention"): "Shaw",
    ("sew_d", "DisentangledSelfAttention"): "DeBERTa",
    ("vits", "VitsAttention"): "VITS",
    ("wav2vec2_conformer", "Wav2Vec2ConformerSelfAttention"): "TransformerXL",
    ("wavlm", "WavLMAttention"): "WavLM",
}
"""(model of transformers, class of its attention layer) ↦ name in :mod:`tilewise`."""


def hint(model: nn.Module) -> str:
    """A sentence on the first such layer of the model; empty if there is none."""
    for path, module in model.named_modules():
        cls = type(module)
        package, _, file = cls.__module__.rpartition(".")
        name = package.removeprefix("transformers.models.")
        # The Conformers of transformers know other positions too, which this attribute names.
        relative = getattr(module, "position_embeddings_type", "relative") in ("relative", "relative_key")
        if relative and file == f"modeling_{name}" and (name, cls.__qualname__) in CONSTRUCTORS:
            constructor = CONSTRUCTORS[name, cls.__qualname__]
            return (
                f"{path or 'the module'} is the {cls.__qualname__} of {name}: its terms are tilewise.{constructor}, "
                "for a layer of your own on tilewise.attention"
            )
    return ""
