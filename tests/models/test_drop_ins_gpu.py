"""Patched DeBERTa and Wav2Vec2-BERT on a GPU: the Triton kernels give transformers' outputs and gradients."""

import pytest
import test_wav2vec2_bert
import tiny_deberta
import torch
from test_t5_outputs import results

import tilewise
from tilewise.testing import assert_within_budget

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODELS = {
    **{
        name: (lambda dtype, changes=changes: tiny_deberta.build("ForMaskedLM", dtype, **changes), tiny_deberta.tokens)
        for name, changes in tiny_deberta.CONFIGS.items()
    },
    "Wav2Vec2-BERT": (lambda dtype: test_wav2vec2_bert.build(dtype=dtype), test_wav2vec2_bert.inputs),
}


def on_gpu(arguments, dtype):
    return {name: x.to("cuda", dtype if x.is_floating_point() else None) for name, x in arguments.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_within_the_budget(name, dtype):
    build, arguments = MODELS[name]
    model, exact = build(dtype).cuda(), build(torch.float64).cuda()
    exact.load_state_dict(model.state_dict())
    wanted = results(exact, on_gpu({n: x.to(dtype) if x.is_floating_point() else x for n, x in arguments().items()},
                                   torch.float64))  # fmt: skip
    low = results(model, on_gpu(arguments(), dtype))
    report = tilewise.patch(model, impl="triton")
    assert {row.implementation for row in report.rows} == {"triton"}
    got = results(model, on_gpu(arguments(), dtype))
    assert_within_budget("logits", got["logits"], low["logits"], wanted["logits"])
    # Of all gradients together: one small tensor's is a matter of luck (tests/models/test_t5_outputs.py).
    flat = lambda x: torch.cat([x[key].double().flatten() for key in wanted if key not in ("logits", "loss")])  # noqa: E731
    error, allowed = ((flat(x) - flat(wanted)).norm() for x in (got, low))
    assert error <= 2 * allowed + 1e-6 * flat(wanted).norm()
