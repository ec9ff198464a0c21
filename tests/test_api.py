"""attention(): what it refuses and in which words, what it chooses, its options."""

import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch

import tilewise as tw
from attention_inputs import qkv
from tilewise import api
from tilewise.call import Call
from tilewise.ops import attend
from tilewise.terms import lower, ports_of, spec_of


def call(q=None, k=None, v=None, **arguments):
    defaults = qkv()
    return tw.attention(*(d if x is None else x for x, d in zip((q, k, v), defaults, strict=True)), **arguments)


WRONG = {
    "rank": (dict(q=torch.randn(2, 10, 8)), ValueError, r"q has shape \(2, 10, 8\); expected \[B, H, T, d\]"),
    "batch": (dict(k=torch.randn(1, 4, 10, 8)), ValueError, "k has a batch of 1; expected 2, as q"),
    "heads": (
        dict(k=torch.randn(2, 3, 10, 8), v=torch.randn(2, 3, 10, 8)), ValueError,
        "k has 3 heads; expected a divisor of q's 4",
    ),
    "width": (dict(k=torch.randn(2, 4, 10, 9)), ValueError, "k has width 9; expected 8, as q"),
    "values": (dict(v=torch.randn(2, 4, 11, 8)), ValueError, r"v has shape \(2, 4, 11, 8\); expected \[B, 4, 10, d_v\]"),
    "integers": (dict(q=torch.ones(2, 4, 10, 8, dtype=torch.int64)), TypeError, "q is torch.int64; expected float64"),
    "dtypes": (dict(k=torch.randn(2, 4, 10, 8).half()), TypeError, "k is torch.float16; expected torch.float32, as q"),
    "devices": (dict(k=torch.randn(2, 4, 10, 8, device="meta")), ValueError, "k is on meta; expected cpu, where q is"),
    "no term": (dict(terms=[3]), TypeError, "terms has a int; expected Scalar, OnQuery"),
    "options": (dict(options="keep"), TypeError, r"options is a str; expected Options, such as Options\(skew='memory'\)"),
    "no such skew": (
        dict(options=lambda: tw.Options(skew="global")), ValueError,
        "options.skew is 'global'; expected 'auto', 'shared' or 'memory'",
    ),
    "keep on a CPU": (
        dict(options=tw.Options(projections="keep")), tw.Unsupported,
        r"'keep', which impl='triton' alone can do; impl='triton' cannot either: q is on cpu; .* Without these options",
    ),
    "TF32 on a CPU": (
        dict(options=tw.Options(fp32="tf32")), tw.Unsupported,
        r"options.fp32 is 'tf32', a choice of impl='triton' alone; elsewhere PyTorch's own switch",
    ),
    "skew on a CPU": (
        dict(options=tw.Options(skew="memory"), impl="blocked"), tw.Unsupported,
        "options.skew is 'memory', a choice of impl='triton' alone",
    ),
    "few rows": (
        dict(terms=lambda: tw.Scalar(torch.randn(4, 5), tw.t5_buckets())), ValueError,
        "Scalar.table has 5 rows; expected at least 32, which its map t5:32:128:1 needs",
    ),
    "Shaw rows": (dict(terms=lambda: tw.Shaw(torch.randn(129, 8), left=4, right=4)), ValueError, r"keys has shape \(129, 8\); expected \[H, 9, d\] or \[9, d\], rows = left \+ right \+ 1 with left = 4 and right = 4"),
    "Shaw values": (dict(terms=lambda: tw.Shaw(torch.randn(9, 8), torch.randn(10, 8), left=4, right=4)), ValueError, r"values has shape \(10, 8\); expected \[H, 9, d\]"),
    "VITS rows": (dict(terms=lambda: tw.VITS(torch.randn(1, 21, 8), torch.randn(1, 9, 8), window=4)), ValueError, r"keys has shape \(1, 21, 8\); expected \[H, 9, d\] or \[9, d\], rows = 2·window \+ 1 with window = 4"),
    "DeBERTa rows": (dict(terms=lambda: tw.DeBERTa(None, torch.randn(4, 1024, 8), position_buckets=256, max_relative_positions=512)), ValueError, r"pos_query has shape \(4, 1024, 8\); expected \[H, 512, d\] .* with position_buckets = 256"),
    "DeBERTa v1 rows": (dict(terms=lambda: tw.DeBERTaV1(torch.randn(4, 2048, 8), None)), ValueError, r"pos_key has shape \(4, 2048, 8\); expected \[H, 1024, d\] .* with max_relative_positions = 512"),
    "u rank": (dict(terms=lambda: tw.TransformerXL(torch.randn(4, 19, 8), torch.randn(8), torch.randn(4, 8))), ValueError, r"u has shape \(8,\); expected \[H, d\]"),
    "T5 rank": (dict(terms=lambda: tw.T5(torch.randn(32))), ValueError, r"weight has shape \(32,\); expected \[num_buckets, H\]"),
    "table rank": (
        dict(terms=lambda: tw.OnQuery(torch.randn(9), tw.clipped(-4, 4))), ValueError,
        r"OnQuery.table has shape \(9,\); expected \[H, R, d\] or \[R, d\]",
    ),
    "table dtype": (
        dict(terms=lambda: tw.OnKey(torch.ones(9, 8, dtype=torch.int32), tw.clipped(-4, 4))), TypeError,
        "OnKey.table is torch.int32; expected a floating dtype",
    ),
    "no map": (dict(terms=lambda: tw.OnKey(torch.randn(9, 8), 4)), TypeError, "OnKey.rows is a int; expected a RowMap"),
    "table heads": (dict(terms=tw.T5(torch.randn(32, 3))), ValueError, r"Scalar.table has 3 heads; expected 4 \(q's\) or 1"),
    "table width": (
        dict(terms=tw.Shaw(torch.randn(9, 7), left=4, right=4)), ValueError, "OnQuery.table has width 7; expected 8",
    ),
    "value width": (
        dict(terms=tw.Shaw(torch.randn(9, 8), torch.randn(9, 7), left=4, right=4)), ValueError,
        "OnValue.table has width 7; expected 8",
    ),
    "short reach": (
        dict(terms=tw.OnQuery(torch.randn(17, 8), tw.identity(8))), ValueError,
        r"for offsets up to ±8; these lengths \(Tq = 10, Tk = 10, offset = 0\) meet 9: expected at least 19 rows",
    ),
    "even rows": (
        dict(terms=lambda: tw.TransformerXL(torch.randn(18, 8), torch.randn(4, 8), torch.randn(4, 8))), ValueError,
        "table has 18 rows; expected an odd number",
    ),
    "left": (
        dict(terms=tw.Inkling(torch.randn(9, 3), torch.randn(2, 4, 9, 3))), ValueError,
        r"OnQuery's left has shape \(2, 4, 9, 3\); expected \(2, 4, 10, 3\)",
    ),
    "gate": (
        dict(terms=tw.Scalar(torch.randn(4, 9), tw.clipped(-4, 4), gate=torch.randn(2, 4, 9))), ValueError,
        r"Scalar's gate has shape \(2, 4, 9\); expected \(2, 4, 10\)",
    ),
    "bias": (
        dict(terms=tw.TransformerXL(torch.randn(19, 8), torch.randn(3, 8), torch.randn(4, 8))), ValueError,
        r"QueryBias.bias has shape \(3, 8\); expected \[4, 8\], heads and width",
    ),
    "table device": (
        dict(terms=tw.T5(torch.randn(32, 4, device="meta"))), ValueError, "Scalar's table is on meta; expected cpu, where q is",
    ),
    "NaN": (dict(terms=tw.T5(torch.full((32, 4), torch.nan))), ValueError, "Scalar.table has NaN entries"),
    "long": (dict(mask=tw.Mask.lengths([5, 11])), ValueError, "mask.bounds reach from 0 to 11; expected 0 to Tk = 10"),
    "few lengths": (dict(mask=tw.Mask.lengths([5, 5, 5])), ValueError, r"mask.bounds has shape \(3, 1, 2\); expected \[1 or 2,"),
    "negative": (dict(mask=lambda: tw.Mask.lengths([-1, 5])), ValueError, r"lengths \[-1, 5\].*expected 0 ≤ starts ≤ lengths"),
    "cu_seqlens": (dict(mask=lambda: tw.Mask.packed([0, 5, 3])), ValueError, r"cu_seqlens is \[0, 5, 3\]; expected numbers rising"),
    "window": (dict(mask=lambda: tw.Mask.window(-1)), ValueError, r"window is \(-1, 0\); expected two numbers ≥ 0"),
    "padding": (dict(mask=tw.Mask.padding(torch.ones(2, 9))), ValueError, r"mask.keys has shape \(2, 9\); expected \[2, 10\]"),
    "padding rank": (dict(mask=lambda: tw.Mask.padding(torch.ones(2, 1, 9))), ValueError, "padding mask has shape"),
    "dense": (dict(mask=tw.Mask.full(torch.ones(9, 10, dtype=torch.bool))), ValueError, r"mask.dense has shape \(1, 1, 9, 10\)"),
    "dense dtype": (dict(mask=lambda: tw.Mask.full(torch.ones(10, 10))), TypeError, "mask is torch.float32; expected bool"),
    "dropout": (dict(dropout_p=1.0), ValueError, "dropout_p is 1.0; expected 0 ≤ dropout_p < 1"),
    "empty rows": (dict(empty_rows="nan"), ValueError, "empty_rows is 'nan'; expected 'zero' or 'uniform'"),
    "impl": (dict(impl="cuda"), ValueError, "impl is 'cuda'; expected 'auto', 'triton', 'blocked', 'reference'"),
    "list": (dict(q=[1.0]), TypeError, r"q is a list; expected a tensor \[B, H, T, d\]"),
    "no width": (dict(q=torch.randn(2, 4, 10, 0), k=torch.randn(2, 4, 10, 0)), ValueError, "q has width 0; expected at least 1"),
    "tensor mask": (dict(mask=torch.ones(10, 10, dtype=torch.bool)), TypeError, r"mask is a Tensor; expected a Mask, Mask.full\(mask\)"),
    "method mask": (dict(mask=lambda: tw.Mask.causal), TypeError, r"mask is a method; expected a Mask, such as Mask.causal\(\)"),
    "meta mask": (dict(mask=tw.Mask.padding(torch.ones(2, 10, device="meta"))), ValueError, "mask.keys is on meta; expected cpu"),
    "additive padding": (dict(mask=lambda: tw.Mask.padding(torch.tensor([[0.0, -1e9]]))), ValueError, "values other than 0 and 1"),
    "list padding": (dict(mask=lambda: tw.Mask.padding([[1]])), TypeError, "padding mask is a list; expected a tensor"),
    "list full": (dict(mask=lambda: tw.Mask.full([[True]])), TypeError, "mask is a list; expected a tensor"),
    "mask and None": (dict(mask=lambda: tw.Mask.causal() & None), TypeError, "unsupported operand"),
    "joined lengths": (
        dict(mask=lambda: tw.Mask.lengths([3, 4, 5]) & tw.Mask.lengths([3, 4])), ValueError,
        r"masks are joined whose bounds have shapes \(3, 1, 2\) and \(2, 1, 2\)",
    ),
    "joined padding": (
        dict(mask=lambda: tw.Mask.padding(torch.ones(2, 9)) & tw.Mask.padding(torch.ones(2, 8))), ValueError,
        r"masks are joined whose keys have shapes \(2, 9\) and \(2, 8\)",
    ),
    "broken lengths": (dict(mask=lambda: tw.Mask.lengths([3.7, 4.0])), TypeError, "lengths are torch.float32; expected integers"),
    "huge lengths": (dict(mask=lambda: tw.Mask.lengths(torch.tensor([2**32 + 3, 4]))), ValueError, "lengths reach 4294967299; expected numbers below"),
    "bare window": (dict(mask=lambda: tw.Mask(left=-5)), ValueError, "mask.left is -5; expected a number from 0 to 2⁶² − 1"),
    "bare keys": (dict(mask=tw.Mask(keys=torch.ones(2, 10))), TypeError, r"mask.keys is torch.float32; expected torch.bool, as Mask's class methods"),
    "bare bounds": (dict(mask=tw.Mask(bounds=torch.zeros(2, 1, 2))), TypeError, r"mask.bounds is torch.float32; expected torch.int32"),
    "float window": (dict(mask=lambda: tw.Mask(left=1.5)), TypeError, "mask.left is 1.5; expected an integer"),
    "NaN window": (dict(mask=lambda: tw.Mask(right=float("nan"))), TypeError, "mask.right is nan; expected an integer"),
    "no window": (dict(mask=lambda: tw.Mask(right=None)), TypeError, "mask.right is None; expected an integer"),
    "tensor window": (dict(mask=lambda: tw.Mask(left=torch.tensor(3))), TypeError, r"mask.left is tensor\(3\); expected an integer"),
    "huge window": (dict(mask=lambda: tw.Mask.window(2**80)), ValueError, "mask.left is 1208925819614629174706176; expected a number from"),
    "list bounds": (dict(mask=lambda: tw.Mask(bounds=[[0, 1]])), TypeError, "mask.bounds is a list; expected a tensor or None"),
    "no lengths": (dict(mask=lambda: tw.Mask.lengths(None)), TypeError, "lengths is None; expected integers, as a list or a tensor"),
    "packed total": (dict(mask=lambda: tw.Mask.packed([0, 5], total=-3)), ValueError, "total is -3; expected an integer"),
    "broken window": (dict(mask=lambda: tw.Mask.window(1.5)), TypeError, r"window is \(1.5, 0\); expected two integers"),
    "tensor offset": (dict(offset=torch.tensor(1)), TypeError, r"offset is tensor\(1\); expected an integer"),
    "broken offset": (dict(offset=1.5), TypeError, "offset is 1.5; expected an integer"),
    "huge offset": (dict(offset=2**70), TypeError, "offset is 1180591620717411303424; expected an integer within ±2²⁹"),
    "scale": (dict(scale=float("nan")), ValueError, "scale is nan; expected a finite number"),
    "text scale": (dict(scale="x"), TypeError, "scale is 'x'; expected a number"),
    "text dropout": (dict(dropout_p="x"), TypeError, "dropout_p is 'x'; expected a number"),
    "endless scale": (dict(scale=10**400), ValueError, "scale is an integer of 1329 bits; expected a finite number"),
    "sparse": (dict(q=torch.randn(2, 4, 10, 8).to_sparse()), TypeError, "q is a torch.sparse_coo tensor; expected a dense one"),
    "nested": (dict(v=torch.nested.nested_tensor([torch.randn(4, 10, 8)] * 2, layout=torch.jagged)), TypeError, "v is a nested tensor; expected a dense one"),
    "float distance": (dict(terms=lambda: tw.T5(torch.randn(32, 4), max_distance=128.5)), TypeError, "max_distance is 128.5; expected an integer"),
    "text direction": (dict(terms=lambda: tw.T5(torch.randn(32, 4), bidirectional="no")), TypeError, "bidirectional is 'no'; expected True or False"),
    "float side": (dict(terms=lambda: tw.Shaw(torch.randn(9, 8), left=4.0, right=4)), TypeError, "left is 4.0; expected an integer"),
    "float VITS": (dict(terms=lambda: tw.VITS(torch.randn(9, 8), torch.randn(9, 8), window=4.0)), TypeError, "window is 4.0; expected an integer"),
    "float reach": (dict(terms=lambda: tw.ALiBi(torch.ones(4), 9.0)), TypeError, "reach is 9.0; expected an integer"),
    "float buckets": (
        dict(terms=lambda: tw.DeBERTa(None, None, position_buckets=256.0, max_relative_positions=512)), TypeError,
        "position_buckets is 256.0; expected an integer",
    ),
    "text order": (
        dict(terms=lambda: tw.TransformerXL(torch.randn(19, 8), torch.randn(4, 8), torch.randn(4, 8), descending="no")), TypeError,
        "descending is 'no'; expected True or False",
    ),
    "float first": (dict(terms=lambda: tw.Scalar(torch.randn(4, 3), tw.explicit([0, 1, 2], first=0.7))), TypeError, "first is 0.7; expected an integer"),
    "huge row": (dict(terms=lambda: tw.Scalar(torch.randn(4, 3), tw.explicit([2**32], first=0))), ValueError, "rows is 4294967296; expected rows below"),
    "list query bias": (dict(terms=lambda: tw.QueryBias([1.0])), TypeError, r"QueryBias.bias is a list; expected a tensor \[H, d\]"),
    "list bias": (dict(terms=lambda: tw.OnQuery(torch.randn(9, 8), tw.clipped(-4, 4), bias=[1.0])), TypeError, "OnQuery.bias is a list; expected a tensor"),
    "list gate": (dict(terms=lambda: tw.WavLM(torch.randn(320, 4), [1.0])), TypeError, r"gate is a list; expected a tensor \[B, H, Tq\]"),
    "no Inkling": (dict(terms=lambda: tw.Inkling(None, None)), TypeError, r"table is a NoneType; expected a tensor \[R, d'\]"),
    "no left": (dict(terms=lambda: tw.Inkling(torch.randn(3, 2), None)), TypeError, r"left is a NoneType; expected a tensor \[B, H, Tq, d'\]"),
    "text terms": (dict(terms="t5"), TypeError, "terms has a str; expected Scalar"),
    "tensor terms": (dict(terms=torch.ones(3)), TypeError, "terms has a Tensor; expected Scalar"),
    "list table": (dict(terms=lambda: tw.T5([[1.0]])), TypeError, r"weight is a list; expected a tensor \[num_buckets, H\]"),
    "no bias": (dict(terms=lambda: tw.TransformerXL(torch.randn(19, 8), None, torch.randn(4, 8))), TypeError, "u is a NoneType; expected a tensor"),
    "NaN bias": (
        dict(terms=tw.TransformerXL(torch.randn(19, 8), torch.full((4, 8), torch.nan), torch.randn(4, 8))), ValueError,
        "QueryBias.bias has NaN entries",
    ),
    "integer gate": (
        dict(terms=tw.Scalar(torch.randn(4, 9), tw.clipped(-4, 4), gate=torch.ones(2, 4, 10, dtype=torch.int64))), TypeError,
        "Scalar.gate is torch.int64; expected a floating dtype",
    ),
    "Inkling rows": (dict(terms=lambda: tw.Inkling(torch.randn(3), None)), ValueError, r"table has shape \(3,\); expected \[R, d'\]"),
    "ALiBi reach": (dict(terms=lambda: tw.ALiBi(torch.ones(4), -1)), ValueError, "reach is -1; expected a number ≥ 0"),
    "VITS window": (dict(terms=lambda: tw.VITS(torch.randn(1, 1, 8), torch.randn(1, 1, 8), window=-1)), ValueError, "window is -1"),
    "Shaw sides": (dict(terms=lambda: tw.Shaw(torch.randn(9, 8), left=-1, right=-3)), ValueError, "left is -1 and right -3"),
    "triton": (dict(impl="triton"), tw.Unsupported, "q is on cpu; triton runs on cuda. impl='blocked' runs it"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG.values(), ids=WRONG)
def test_bad_input_says_what_is_wrong(arguments, error, message):
    with pytest.raises(error, match=message):
        call(**{name: x() if callable(x) else x for name, x in arguments.items()})


def test_default_offset_puts_the_queries_last():
    q, k, v = qkv(Tq=3, dtype=torch.float64)
    whole = torch.cat((torch.randn(2, 4, 7, 8, dtype=torch.float64), q), 2)
    table = torch.randn(32, 4, dtype=torch.float64)
    full = tw.attention(whole, k, v, terms=tw.T5(table, bidirectional=False), mask=tw.Mask.causal())
    step = tw.attention(q, k, v, terms=tw.T5(table, bidirectional=False), mask=tw.Mask.causal())
    torch.testing.assert_close(step, full[:, :, -3:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [-0.7, 0.0, -3.0])
@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_any_finite_scale(impl, terms, scale):
    q, k, v = (x.requires_grad_() for x in qkv())
    rows = torch.randn(9, 8)
    made = (tw.Shaw(rows, left=4, right=4), tw.T5(torch.ones(32, 4))) if terms else ()
    o = tw.attention(q, k, v, terms=made, scale=scale, impl=impl)
    Q, K, V = (x.detach().double().requires_grad_() for x in (q, k, v))
    S = Q @ K.mT
    if terms:
        i = torch.arange(10)
        S = S + torch.einsum("bhid,ijd->bhij", Q, rows.double()[(i - i[:, None]).clamp(-4, 4) + 4])
    expected = (S * scale).softmax(-1) @ V
    torch.testing.assert_close(o.double(), expected, rtol=1e-4, atol=1e-5)
    for got, wanted in zip(
        torch.autograd.grad(o.square().sum(), (q, k, v)), torch.autograd.grad(expected.square().sum(), (Q, K, V)),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(got.double(), wanted, rtol=1e-3, atol=1e-4)


class Whole:
    """An integer of no library."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


@pytest.mark.parametrize("number", [np.int64, np.uint8, np.array, Whole])
def test_integers_of_any_library(number):
    n, q = number, qkv()[0]
    given = tw.attention(
        q, q, q, offset=n(2), mask=tw.Mask.window(n(5), n(3)) & tw.Mask(left=n(6)),
        terms=tw.Scalar(torch.ones(4, 23), tw.identity(n(11))),
    )  # fmt: skip
    mask = tw.Mask.window(5, 3)
    assert torch.equal(
        given, tw.attention(q, q, q, offset=2, mask=mask, terms=tw.Scalar(torch.ones(4, 23), tw.identity(11)))
    )
    assert tw.Mask.packed([0, 5], total=n(9)).bounds.shape == (1, 9, 2)


@pytest.mark.parametrize("number", [np.float32, np.float16, np.float64, Fraction])
def test_numbers_of_any_library(number):
    q = qkv()[0]
    assert torch.equal(tw.attention(q, q, q, scale=number(0.5)), tw.attention(q, q, q, scale=0.5))
    assert tw.attention(q, q, q, dropout_p=number(0.5)).shape == q.shape


def test_masks_join():
    keys = torch.tensor([[True, True, False, True]])
    mask = tw.Mask.window(2, 1) & tw.Mask.lengths([4], starts=[1]) & tw.Mask.padding(keys) & tw.Mask.causal()
    i, j = torch.arange(4)[:, None], torch.arange(4)
    expected = (i - j <= 2) & (j <= i) & (j >= 1) & keys
    assert torch.equal(mask.allowed(4, 4)[0, 0], expected)
    packed = tw.Mask.packed([0, 1, 3], total=5) & tw.Mask.full(torch.ones(5, 5, dtype=torch.bool))
    document = torch.tensor([0, 1, 1, 2, 3])
    assert torch.equal(packed.allowed(5, 5)[0, 0], (document[:, None] == document) & (document < 2))


def test_a_mask_without_tensors_follows_the_device_asked_for():
    assert tw.Mask.causal().allowed(3, 3, device=torch.device("meta")).is_meta
    assert tw.Mask.lengths([2]).allowed(3, 3, device=torch.device("meta")).is_meta
    with torch.device("meta"):
        q = torch.randn(1, 2, 5, 8)
        assert tw.attention(q, q, q, mask=tw.Mask.causal(), impl="reference").is_meta


def test_maps_and_masks_ignore_the_default_device():
    q, k, v = qkv(Tq=13, Tk=13)
    torch.set_default_device("meta")
    try:
        mask = tw.Mask.lengths([9, 13]) & tw.Mask.packed([0, 5, 13])
        terms = tw.Shaw(torch.randn(8, 8, device="cpu"), left=5, right=2)
        outputs = [tw.attention(q, k, v, terms=terms, mask=mask, impl=impl) for impl in ("blocked", "reference")]
    finally:
        torch.set_default_device(None)
    torch.testing.assert_close(*outputs)


def test_importing_tilewise_needs_torch_alone():
    code = (
        "import sys, torch\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('triton', 'transformers', 'rich', 'typer', 'matplotlib'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import tilewise\n"
        "q = torch.randn(1, 2, 5, 4)\n"
        "print(tuple(tilewise.attention(q, q, q, terms=tilewise.T5(torch.zeros(32, 2))).shape))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(1, 2, 5, 4)"


@pytest.mark.parametrize(("u", "v"), [(True, True), (True, False), (False, True)])
def test_biases_are_left_to_the_kernels_that_take_them(monkeypatch, u, v):
    q, k, x = (torch.randn(2, 3, 10, 8) for _ in range(3))
    table, bias = torch.randn(3, 19, 8), torch.randn(2, 3, 8)
    terms = tw.TransformerXL(table, *bias)
    terms = (*terms[: int(u)], terms[1] if v else tw.OnQuery(table, tw.identity(9, descending=True)))
    seen = []
    monkeypatch.setattr(api, "attend", lambda call, spec, impl: seen.append((call, spec)) or (call.q, call.q))
    monkeypatch.setattr(api, "_choose", lambda call, impl: impl)
    for impl in ("triton", "blocked"):
        tw.attention(q, k, x, terms=terms, impl=impl)
    (kernels, spec), (others, _) = seen
    # No sum with the query was formed, and every tensor travels as it is.
    assert kernels.q is q
    expected = [table, *([bias[0]] if u else []), *([bias[1]] if v else [])]
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(kernels.tensors, expected, strict=True))
    assert ports_of(spec, kernels.tensors)[0].names == kernels.ports[0].names
    assert not any(port.biased for port in others.ports)
    assert torch.equal(others.q, q + bias[0][:, None] if u else q)


def test_only_transformer_xl_leaves_its_biases_to_the_kernels():
    q, table, u = torch.randn(1, 3, 10, 8), torch.randn(3, 19, 8), torch.randn(3, 8)
    xl = tw.TransformerXL(table, u, u)
    others = {
        "a second u": (*xl, tw.QueryBias(u)),
        "a second term": (*xl, tw.T5(torch.randn(32, 3))),
        "a left factor": (tw.QueryBias(u), tw.OnQuery(table, tw.identity(9), left=q, bias=u)),
        "ends": (tw.QueryBias(u), tw.OnQuery(table, tw.clipped(-9, 9), bias=u)),
        "no table": (tw.QueryBias(u),),
    }
    for name, terms in others.items():
        content, ports = lower(q, terms, biases=True)
        assert not any(port.biased for port in ports), name
        assert content is not q, name
    content, (port,) = lower(q, xl, biases=True)
    with pytest.raises(ValueError, match="expected impl='triton'"):
        attend(Call(q, q, q, (port,), tw.Mask(), 1.0, 0), spec_of([port]), "blocked")
    assert content is q
    assert port.names == ("table", "content", "bias")
