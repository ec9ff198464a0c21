"""Each constructor against the attention module of the library that it serves, in fp64, on tiny random weights."""

import pytest
import torch
from transformers import (
    DebertaConfig,
    DebertaV2Config,
    MPNetConfig,
    T5Config,
    VitsConfig,
    Wav2Vec2BertConfig,
)  # fmt: skip
from transformers.models.deberta.modeling_deberta import DisentangledSelfAttention as DebertaV1Attention
from transformers.models.deberta.modeling_deberta import build_relative_position as build_v1
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention, build_relative_position
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder, MPNetSelfAttention
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.vits.modeling_vits import VitsAttention
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import (
    Wav2Vec2BertRelPositionalEmbedding,
    Wav2Vec2BertSelfAttention,
)  # fmt: skip
from transformers.models.wavlm.modeling_wavlm import WavLMAttention

import tilewise as tw

B, N, H, D = 2, 37, 3, 8
IMPLS = ["reference", "blocked"]


@pytest.fixture(autouse=True)
def double():
    """Hosts build tables and scales in the default dtype: fp64 makes them exact enough to tell formulas apart."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def heads(x, h=H):
    return x.view(*x.shape[:-1], h, -1).transpose(-2, -3)


def merged(o):
    return o.transpose(1, 2).flatten(2)


def randomised(module):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module.eval()


def close(ours, host):
    torch.testing.assert_close(ours, host, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("decoder", [False, True])
def test_t5(decoder, impl):
    config = T5Config(d_model=H * D, d_kv=D, num_heads=H, dropout_rate=0.0, is_decoder=decoder)
    config._attn_implementation = "eager"
    host = randomised(T5Attention(config, has_relative_attention_bias=True, layer_idx=0, is_causal=decoder))
    x = torch.randn(B, N, H * D)
    causal = torch.full((N, N), torch.finfo(x.dtype).min).triu(1)[None, None] if decoder else None
    expected = host(x, mask=causal)[0]
    terms = tw.T5(host.relative_attention_bias.weight, bidirectional=not decoder)
    mask = tw.Mask.causal() if decoder else None
    o = tw.attention(*(heads(p(x)) for p in (host.q, host.k, host.v)), terms=terms, mask=mask, scale=1.0, impl=impl)
    close(host.o(merged(o)), expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_mpnet(impl):
    config = MPNetConfig(hidden_size=H * D, num_attention_heads=H, num_hidden_layers=1, intermediate_size=8)
    host, encoder = randomised(MPNetSelfAttention(config)), randomised(MPNetEncoder(config))
    x = torch.randn(B, N, H * D)
    expected = host(x, position_bias=encoder.compute_position_bias(x))[0]
    terms = tw.MPNet(encoder.relative_attention_bias.weight)
    o = tw.attention(*(heads(p(x)) for p in (host.q, host.k, host.v)), terms=terms, impl=impl)
    close(host.o(merged(o)), expected)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("buckets", "kinds", "shared"),
    [(8, ["c2p", "p2c"], True), (8, ["c2p"], False), (-1, ["p2c"], False), (-1, ["c2p", "p2c"], False)],
)
def test_deberta_v2(buckets, kinds, shared, impl):
    config = DebertaV2Config(
        hidden_size=H * D, num_attention_heads=H, relative_attention=True, position_buckets=buckets,
        max_relative_positions=16, pos_att_type=kinds, share_att_key=shared,
    )  # fmt: skip
    host = randomised(DisentangledSelfAttention(config))
    x, table = torch.randn(B, N, H * D), torch.randn(2 * host.pos_ebd_size, H * D)
    relative = build_relative_position(x, x, bucket_size=buckets, max_position=16)
    expected = host(x, torch.ones(B, 1, N, N), relative_pos=relative, rel_embeddings=table)[0]
    key, query = (
        (host.key_proj, host.query_proj)
        if shared
        else (getattr(host, "pos_key_proj", None), getattr(host, "pos_query_proj", None))
    )
    terms = tw.DeBERTa(
        heads(key(table)) if "c2p" in kinds else None, heads(query(table)) if "p2c" in kinds else None,
        position_buckets=buckets, max_relative_positions=16,
    )  # fmt: skip
    qkv = (heads(p(x)) for p in (host.query_proj, host.key_proj, host.value_proj))
    o = tw.attention(*qkv, terms=terms, scale=(D * (1 + len(terms))) ** -0.5, impl=impl)
    # The host takes √(d·factor) in fp32.
    torch.testing.assert_close(merged(o), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("reach", [16, 64])
def test_deberta_v1(reach, impl):
    config = DebertaConfig(
        hidden_size=H * D, num_attention_heads=H, relative_attention=True, max_relative_positions=reach,
        pos_att_type=["c2p", "p2c"], talking_head=False,
    )  # fmt: skip
    host = randomised(DebertaV1Attention(config))
    x, table = torch.randn(B, N, H * D), torch.randn(2 * reach, H * D)
    expected = host(x, torch.ones(B, 1, N, N), relative_pos=build_v1(x, x), rel_embeddings=table)[0]
    q, k, v = heads(host.in_proj(x)).chunk(3, dim=-1)
    q, v = q + heads(host.q_bias[None]), v + heads(host.v_bias[None])
    terms = tw.DeBERTaV1(heads(host.pos_proj(table)), heads(host.pos_q_proj(table)), max_relative_positions=reach)
    o = tw.attention(q, k, v, terms=terms, scale=(D * 3) ** -0.5, impl=impl)
    torch.testing.assert_close(merged(o), expected, rtol=1e-6, atol=1e-6)


def wav2vec2_bert(kind):
    config = Wav2Vec2BertConfig(
        hidden_size=H * D, num_attention_heads=H, position_embeddings_type=kind,
        left_max_position_embeddings=6, right_max_position_embeddings=3,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return config, randomised(Wav2Vec2BertSelfAttention(config))


@pytest.mark.parametrize("impl", IMPLS)
def test_shaw(impl):
    _, host = wav2vec2_bert("relative_key")
    x = torch.randn(B, N, H * D)
    terms = tw.Shaw(host.distance_embedding.weight, left=6, right=3)
    o = tw.attention(*(heads(p(x)) for p in (host.linear_q, host.linear_k, host.linear_v)), terms=terms, impl=impl)
    close(host.linear_out(merged(o)), host(x)[0])


@pytest.mark.parametrize("impl", IMPLS)
def test_transformer_xl(impl):
    config, host = wav2vec2_bert("relative")
    x = torch.randn(B, N, H * D)
    embeddings = Wav2Vec2BertRelPositionalEmbedding(config)(x)
    terms = tw.TransformerXL(heads(host.linear_pos(embeddings[0])), host.pos_bias_u, host.pos_bias_v)
    o = tw.attention(*(heads(p(x)) for p in (host.linear_q, host.linear_k, host.linear_v)), terms=terms, impl=impl)
    close(host.linear_out(merged(o)), host(x, relative_position_embeddings=embeddings)[0])


@pytest.mark.parametrize("impl", IMPLS)
def test_vits(impl):
    host = randomised(VitsAttention(VitsConfig(hidden_size=H * D, num_attention_heads=H, window_size=4)))
    x = torch.randn(B, N, H * D)
    terms = tw.VITS(host.emb_rel_k, host.emb_rel_v, window=4)
    o = tw.attention(*(heads(p(x)) for p in (host.q_proj, host.k_proj, host.v_proj)), terms=terms, impl=impl)
    close(host.out_proj(merged(o)), host(x)[0])


@pytest.mark.parametrize("impl", IMPLS)
def test_wavlm(impl):
    host = randomised(WavLMAttention(H * D, H, num_buckets=16, max_distance=20))
    x = torch.randn(B, N, H * D)
    projected = host.gru_rel_pos_linear(heads(x)).view(B, H, N, 2, 4).sum(-1).sigmoid()
    gate = projected[..., 0] * (projected[..., 1] * host.gru_rel_pos_const[..., 0] - 1.0) + 2.0
    terms = tw.WavLM(host.rel_attn_embed.weight, gate, max_distance=20)
    o = tw.attention(*(heads(p(x)) for p in (host.q_proj, host.k_proj, host.v_proj)), terms=terms, impl=impl)
    close(host.out_proj(merged(o)), host(x)[0])


@pytest.mark.parametrize("impl", IMPLS)
def test_alibi(impl):
    q, k, v = torch.randn(3, B, H, N, D).unbind()
    slopes = torch.tensor([0.5, 0.25, 0.125])
    i = torch.arange(N)
    bias = -slopes[:, None, None] * (i[:, None] - i).abs()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    close(tw.attention(q, k, v, terms=tw.ALiBi(slopes, N - 1), impl=impl), expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_inkling(impl):
    q, k, v = torch.randn(3, B, H, N, D).unbind()
    left, table = torch.randn(B, H, N, 4), torch.randn(10, 4)
    delta = torch.arange(N)[:, None] - torch.arange(N)
    reach = torch.einsum("bhid,ijd->bhij", left, table[delta.clamp(0, 9)]) * ((delta >= 0) & (delta < 10))
    S = (q @ k.mT + reach) * 0.1
    expected = S.masked_fill(delta < 0, -torch.inf).softmax(-1) @ v
    o = tw.attention(q, k, v, terms=tw.Inkling(table, left), mask=tw.Mask.causal(), scale=0.1, impl=impl)
    close(o, expected)
