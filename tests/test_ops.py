"""The operator contract: opcheck, compilation, autocast, checkpointing, meta tensors, FLOPs, double backward."""

import subprocess
import sys

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tilewise as tw
from tilewise.terms import lower, spec_of
from tilewise.testing import CASES, Sizes

FWD, BWD = torch.ops.tilewise.attn_fwd.default, torch.ops.tilewise.attn_bwd.default


def operator_arguments(case, sizes, dtype, mask=None, dropout_p=0.0, layout=lambda x: x):
    x = {name: layout(tensor) if name in "qkv" else tensor for name, tensor in case.inputs(sizes, dtype).items()}
    content, ports = lower(x["q"], tw.terms.flatten(case.build(x, sizes)))
    mask = mask or tw.Mask()
    seed = torch.tensor([1234]) if dropout_p else None
    tensors = [t for port in ports for t in port.tensors]
    return (
        content, x["k"], x["v"], tensors, mask.bounds, mask.keys, mask.dense, seed, spec_of(ports), case.scale(sizes.d),
        sizes.Tk - sizes.Tq, mask.left, mask.right, dropout_p, tw.Options().spec, "blocked",
    )  # fmt: skip


def permuted(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def sliced(x):
    return torch.cat((x, x), -1)[..., : x.shape[-1]]


@pytest.mark.parametrize(
    ("name", "dtype", "sizes", "layout", "dropout_p"),
    [
        ("none", torch.float32, Sizes(), lambda x: x, 0.0),
        ("t5", torch.float64, Sizes(Tq=9, Tk=13), permuted, 0.0),
        ("shaw", torch.bfloat16, Sizes(d_v=24, H=4), sliced, 0.0),
        ("txl", torch.float32, Sizes(Tq=7, Tk=7), permuted, 0.2),
        ("deberta", torch.float16, Sizes(), lambda x: x, 0.0),
        ("wavlm", torch.float32, Sizes(), sliced, 0.0),
        ("t5", torch.float32, Sizes(Tq=0), lambda x: x, 0.0),
        ("none", torch.float32, Sizes(Tk=0), lambda x: x, 0.0),
    ],
)
def test_opcheck(name, dtype, sizes, layout, dropout_p):
    masks = tw.Mask.lengths([max(sizes.Tk - 3, 0), sizes.Tk]) & tw.Mask.window(6, 2)
    arguments = operator_arguments(CASES[name], sizes, dtype, masks, dropout_p, layout)
    assert set(torch.library.opcheck(FWD, arguments).values()) == {"SUCCESS"}
    learning = [x.detach().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x for x in arguments]
    learning[3] = [x.detach().requires_grad_() for x in arguments[3]]
    assert set(torch.library.opcheck(FWD, tuple(learning)).values()) == {"SUCCESS"}
    o, lse, kept = FWD(*arguments)
    assert kept.numel() == 0
    need = [True] * (3 + len(arguments[3]))
    for wanted in (need, [False, *need[1:-1], False]):
        outcome = torch.library.opcheck(BWD, (torch.randn_like(o), None, o, lse, kept, wanted, *arguments))
        assert set(outcome.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", ["t5", "txl", "deberta"])
def test_one_graph_serves_every_length_forward_and_backward(name):
    torch._dynamo.reset()
    counters.clear()

    def run(q, k, v, a, b):
        if name == "t5":
            terms, mask = tw.T5(a), tw.Mask.causal()
        elif name == "deberta":
            terms, mask = tw.DeBERTa(a, b, position_buckets=16, max_relative_positions=32), tw.Mask()
        else:
            terms, mask = tw.TransformerXL(a, b, b), tw.Mask.window(20)
        return tw.attention(q, k, v, terms=terms, mask=mask)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    shapes = {
        "t5": ((32, 3), (1,)),
        "txl": ((3, 101, 8), (3, 8)),
        "deberta": ((3, 32, 8), (3, 32, 8)),
    }
    for T in (12, 19, 31):
        x = [torch.randn(2, 3, T, 8) for _ in range(3)] + [torch.randn(s) for s in shapes[name]]
        ours, eager = ([t.clone().requires_grad_() for t in x] for _ in range(2))
        got, expected = compiled(*ours), run(*eager)
        assert torch.equal(got, expected)
        got.sin().sum().backward()
        expected.sin().sum().backward()
        for a, b in zip(ours, eager, strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or torch.equal(a.grad, b.grad)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("name", ["none", "t5", "deberta", "txl"])
@torch.no_grad()
def test_compiles_without_gradients_for_any_number_of_tables(name):
    case, sizes = CASES[name], Sizes(B=1, H=2, Hk=2, Tq=6, Tk=6, d=8, d_v=8)
    shapes = dict.fromkeys(("q", "k", "v"), (1, 2, 6, 8)) | case.shapes(sizes)
    x = {n: torch.randn(shape) for n, shape in shapes.items()}

    def run(x):
        return tw.attention(x["q"], x["k"], x["v"], **case.arguments(x, sizes))

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))


class Attending(torch.nn.Module):
    """A projection and attention with a table that learns."""

    def __init__(self, name):
        super().__init__()
        self.project = torch.nn.Linear(16, 48)
        self.table = torch.nn.Parameter(torch.randn(32, 2) if name == "t5" else torch.randn(9, 8))
        self.name = name

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        terms = tw.T5(self.table) if self.name == "t5" else tw.Shaw(self.table, self.table, left=4, right=4)
        return tw.attention(q, k, v, terms=terms)


@pytest.mark.parametrize("name", ["t5", "shaw"])
def test_an_exported_program_infers_and_trains(name):
    module, x = Attending(name), torch.randn(2, 11, 16)
    strict = torch.export.export(module, (x,), strict=True).module()
    assert torch.equal(strict(x), module(x))
    program = torch.export.export(module, (x,), strict=False).module()
    assert torch.equal(program(x), module(x))
    grads = []
    for run in (module, program):
        loss = run(x).square().sum()
        grads.append(torch.autograd.grad(loss, [p for _, p in sorted(run.named_parameters())]))
    torch.testing.assert_close(*grads)


def test_a_map_of_given_rows_compiles_when_it_is_made_outside():
    rows = tw.explicit([0, 2, 1, -1, 2], first=-2)

    def run(q, table, keys):
        return tw.attention(q, q, q, terms=[tw.Scalar(table, rows), tw.OnQuery(keys, rows)])

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for T in (7, 33):
        x = torch.randn(2, 4, T, 16), torch.randn(4, 3, requires_grad=True), torch.randn(3, 16, requires_grad=True)
        torch.testing.assert_close(compiled(*x), run(*x))
        torch.testing.assert_close(*(torch.autograd.grad(f(*x).sin().sum(), x[1:]) for f in (compiled, run)))


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_call_takes_other_heads_beside_tensors_of_known_sizes(dynamic):
    torch._dynamo.reset()

    def attend(q, k, w, u, keys, seen):
        terms = (tw.T5(w), tw.QueryBias(u), *tw.Shaw(keys, left=2, right=2))
        return tw.attention(q, k, k, terms=terms, mask=tw.Mask.full(seen), impl="blocked")

    whole = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for H in (2, 4, 6):
        learnt = (torch.nn.Parameter(torch.randn(*shape)) for shape in ((32, H), (H, 8), (H, 5, 8)))
        arguments = torch.randn(2, H, 9, 8), torch.randn(2, H, 9, 8), *learnt, torch.rand(1, 1, 9, 9) > 0.2
        torch.testing.assert_close(whole(*arguments), attend(*arguments))


def test_an_exported_program_says_that_it_needs_its_explicit_map(tmp_path):
    class Module(torch.nn.Module):
        def forward(self, q, w):
            return tw.attention(q, q, q, terms=tw.Scalar(w, rows))

    rows = tw.explicit([0, 1, 2, 1, 5], -2)
    q, w = torch.randn(1, 2, 9, 8), torch.randn(2, 6)
    torch.export.save(torch.export.export(Module(), (q, w), strict=False), tmp_path / "program.pt2")
    torch.save((q, w, Module()(q, w)), tmp_path / "expected.pt")
    load = f"""
import torch, tilewise
program = torch.export.load({str(tmp_path / "program.pt2")!r}).module()
q, w, expected = torch.load({str(tmp_path / "expected.pt")!r})
try:
    program(q, w)
except RuntimeError as error:
    print(error)
tilewise.explicit([0, 1, 2, 1, 5], -2)
print(torch.equal(program(q, w), expected))
"""
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    said, same = done.stdout.splitlines()
    assert "make the same map, tilewise.explicit(rows, first), before it runs" in said
    assert same == "True"


def test_one_tensor_may_be_query_key_and_value_of_a_compiled_call():
    torch._dynamo.reset()
    run = lambda q, w: tw.attention(q, q, q, terms=(tw.T5(w), tw.T5(w)))  # noqa: E731
    q, w = torch.randn(1, 2, 9, 8, requires_grad=True), torch.randn(32, 2, requires_grad=True)
    expected = torch.autograd.grad(run(q, w).square().sum(), (q, w))
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(q, w).square().sum(), (q, w)), expected)


def test_autocast_lowers_the_products_and_keeps_the_statistics():
    q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    table = torch.randn(32, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, lse = tw.attention(q, k, v, terms=tw.T5(table), return_lse=True)
    assert o.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    o.float().sum().backward()
    assert q.grad.dtype == table.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tw.attention(q.bfloat16(), k, v).dtype == torch.bfloat16
        assert tw.attention(q.double(), k.double(), v.double()).dtype == torch.float64


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_repeats_the_dropout(reentrant):
    x = [torch.randn(1, 2, 33, 8, requires_grad=True) for _ in range(3)] + [torch.randn(32, 2, requires_grad=True)]

    def run(q, k, v, w):
        return tw.attention(q, k, v, terms=tw.T5(w), dropout_p=0.3)

    torch.manual_seed(3)
    plain = torch.autograd.grad(run(*x).square().sum(), x)
    torch.manual_seed(3)
    o = checkpoint(run, *x, use_reentrant=reentrant)
    o.square().sum().backward()
    for a, b in zip(x, plain, strict=True):
        assert torch.equal(a.grad, b)


def test_meta_tensors():
    with torch.device("meta"):
        q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 11, 8), torch.randn(2, 2, 11, 6)
        o, lse = tw.attention(q, k, v, terms=tw.T5(torch.randn(32, 4)), return_lse=True)
    assert o.shape == (2, 4, 9, 6)
    assert lse.shape == (2, 4, 9)
    assert o.is_meta
    # Merging the heads must not copy.
    assert o.transpose(1, 2).is_contiguous()


def test_flops_are_counted_as_for_sdpa():
    q, k, v = torch.randn(2, 4, 16, 8, requires_grad=True), torch.randn(2, 4, 24, 8), torch.randn(2, 4, 24, 8)
    with FlopCounterMode(display=False) as counter:
        tw.attention(q, k, v)
    # FlopCounterMode has no formula for SDPA's CPU kernel; its math path counts the two products.
    with FlopCounterMode(display=False) as sdpa, sdpa_kernel(SDPBackend.MATH):
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert counter.get_total_flops() == sdpa.get_total_flops() == 4 * 2 * 4 * 16 * 24 * 8
    with FlopCounterMode(display=False) as counter:
        tw.attention(q, k, v).sum().backward()
    assert counter.get_total_flops() == 14 * 2 * 4 * 16 * 24 * 8


@pytest.mark.parametrize("loss", [torch.sum, lambda o: o.square().sum()])
def test_a_second_derivative_is_refused(loss):
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(loss(tw.attention(q, q, q)), q, create_graph=True)
    torch.testing.assert_close(grad, torch.autograd.grad(loss(tw.attention(q, q, q)), q)[0])
    with pytest.raises(RuntimeError, match=r"differentiable once.*impl='reference'"):
        grad.sum().backward()
    q = q.detach().double().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda q: tw.attention(q, q, q, impl="reference"), q)


def test_autocast_rounds_what_goes_in_and_nothing_inside():
    """700 keys: in tiles, whose products are fp32's."""
    given = [torch.randn(1, 2, 700, 16, requires_grad=True) for _ in range(3)]
    terms, runs = tw.Shaw(torch.randn(9, 16), left=4, right=4), []
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            low = given if enabled else [x.bfloat16() for x in given]
            o, lse = tw.attention(*low, terms=terms, return_lse=True, impl="blocked")
            runs.append((o, lse, *torch.autograd.grad((o.float().square().sum() + lse.sum()), given)))
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_a_second_derivative_through_lse_is_refused():
    q, k, v = (torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3))
    s = torch.tensor(2.0, requires_grad=True)
    (grad,) = torch.autograd.grad((tw.attention(q, k, v, return_lse=True)[1] * s).sum(), k, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(grad.square().sum() + s, s)


def test_frozen_tables_get_no_gradient():
    q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    table = torch.randn(32, 2)
    tw.attention(q, k.detach(), v, terms=tw.T5(table)).sum().backward()
    assert k.grad is None
    assert q.grad is not None
    assert table.grad is None


@pytest.mark.parametrize("offset", [None, 0])
def test_a_trace_of_one_length_is_refused(offset):
    q = torch.randn(1, 2, 9, 8)
    with pytest.raises(RuntimeError, match=r"record attention for one length alone; expected torch\.export"):
        torch.jit.trace(lambda q: tw.attention(q, q, q, offset=offset), (q,), check_trace=False)
