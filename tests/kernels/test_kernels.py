"""Do the small kernels compute what their names say, leave their inputs alone, and refuse what does not fit?"""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.gelu_mul import gelu_mul
from kernels.kv_cache import append_kv
from kernels.paged_attention import paged_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import apply_rope
from kernels.sampling import most_likely
from kernels.silu_mul import silu_mul
from tests.interpreter import use_interpreter
from tests.native import INSTRUCTION_SETS, use_instruction_set

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Relative to the largest value: half a unit in the last place, and a little."""


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    gap = (actual.double() - expected).abs().max() / expected.abs().max()
    assert gap <= TOLERANCES[actual.dtype], f"relative difference {gap.item()}"


@pytest.fixture(autouse=True, params=[*INSTRUCTION_SETS, "torch", "triton"])
def compute(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test for each instruction set, without native code, and with the Triton kernels."""
    if request.param == "triton":
        use_interpreter(monkeypatch)
    else:
        use_instruction_set(request.param, monkeypatch)


@pytest.fixture(params=TOLERANCES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_rms_norm(dtype: torch.dtype, num_tokens: int) -> None:
    x = (torch.randn(num_tokens, 96) * 3).to(dtype)
    before, weight = x.clone(), torch.randn(96)
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    assert torch.equal(x, before)
    wide = x.double()
    if num_tokens:
        assert_close(out, wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double())
    with pytest.raises(ValueError, match="weight"):
        rms_norm(x, weight[:95], 1e-5)


@pytest.mark.parametrize("width", [96, 33])
def test_add_rms_norm(dtype: torch.dtype, width: int) -> None:
    x, delta = (torch.randn(7, width) * 3).to(dtype), torch.randn(7, width).to(dtype)
    before, weight = (x.clone(), delta.clone()), torch.randn(width)
    total, out = add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    assert torch.equal(x, before[0]) and torch.equal(delta, before[1])
    wide = total.double()
    assert_close(out, wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double())
    with pytest.raises(ValueError, match="do not fit"):
        add_rms_norm(x, delta[:6], weight, 1e-5)


def test_norms_of_heads_within_a_wider_tensor(dtype: torch.dtype) -> None:
    """As a model has its queries: neither rows nor tokens lie together."""
    qkv, weight = torch.randn(5, 9, 24).to(dtype), torch.randn(24)
    before = qkv.clone()
    heads, others = qkv[:, 1:4], qkv[:, 5:8]
    wide = heads.double()
    assert_close(rms_norm(heads, weight, 1e-5), wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double())
    for delta in (others, others.contiguous()):
        total, out = add_rms_norm(heads, delta, weight, 1e-5)
        wide = total.double()
        assert torch.equal(total, heads + others)
        assert_close(out, wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double())
    assert torch.equal(qkv, before)


def test_rms_norm_of_tiny_and_huge_rows() -> None:
    assert torch.equal(rms_norm(torch.zeros(1, 8), torch.ones(8), 1e-6), torch.zeros(1, 8))
    huge = rms_norm(torch.full((1, 8), 1e4, dtype=torch.float16), torch.ones(8), 1e-6)
    assert torch.equal(huge, torch.ones(1, 8, dtype=torch.float16))


def test_rope_is_a_turn_in_the_complex_plane(dtype: torch.dtype) -> None:
    whole = torch.randn(5, 4, 24).to(dtype)
    before, angles = whole.clone(), torch.rand(5, 12, dtype=torch.float64) * 1000
    heads = whole[:, :3]
    x = heads.double()
    apply_rope(heads, angles.cos().float(), angles.sin().float())
    turned = torch.complex(x[..., :12], x[..., 12:]) * torch.polar(torch.ones(5, 12).double(), angles)[:, None]
    assert_close(heads, torch.cat((turned.real, turned.imag), -1))
    assert torch.equal(whole[:, 3:], before[:, 3:])


def test_rope_checks_its_arguments() -> None:
    x = torch.randn(5, 3, 16)
    with pytest.raises(ValueError, match="do not fit"):
        apply_rope(x, torch.ones(5, 16), torch.ones(5, 16))
    with pytest.raises(TypeError, match="float32"):
        apply_rope(x, torch.ones(5, 8).bfloat16(), torch.ones(5, 8).bfloat16())


def test_silu_mul(dtype: torch.dtype) -> None:
    x = (torch.randn(6, 40) * 4).to(dtype)
    before = x.clone()
    gate, up = x.double().chunk(2, 1)
    assert_close(silu_mul(x), gate / (1 + (-gate).exp()) * up)
    assert torch.equal(x, before)
    with pytest.raises(ValueError, match="halves"):
        silu_mul(x[:, :39])


def test_gelu_mul(dtype: torch.dtype) -> None:
    x = torch.linspace(-6, 6, 7 * 80).view(7, 80).to(dtype)
    before = x.clone()
    gate, up = x.double().chunk(2, dim=1)
    assert_close(gelu_mul(x), gate * (1 + torch.erf(gate / 2**0.5)) / 2 * up)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    assert_close(gelu_mul(x, approximate="tanh"), gate * (1 + torch.tanh(inner)) / 2 * up)
    assert torch.equal(x, before)
    with pytest.raises(ValueError, match="halves"):
        gelu_mul(x[:, :39])
    with pytest.raises(ValueError, match="approximate='relu'"):
        gelu_mul(x, approximate="relu")


def test_append_kv_writes_its_slots_and_nothing_else(dtype: torch.dtype) -> None:
    cache = torch.randn(2, 6, 4, 2, 8).to(dtype)
    before, k, v = cache.clone(), torch.randn(4, 2, 8).to(dtype), torch.randn(4, 2, 8).to(dtype)
    append_kv(cache, k, v, torch.tensor([23, -1, 0, 9]))
    assert torch.equal(cache[0, 5, 3], k[0])
    assert torch.equal(cache[1, 0, 0], v[2])
    assert torch.equal(cache[0, 2, 1], k[3])
    changed = (cache != before).flatten(3).any(3).flatten(1)
    assert changed.nonzero()[:, 1].tolist() == [0, 9, 23, 0, 9, 23]


def test_append_kv_with_offsets_beyond_32_bits() -> None:
    """On memory that is never touched but for one slot."""
    cache = torch.empty(2, (1 << 17) + 1, 16, 8, 128, dtype=torch.bfloat16)
    assert cache[0, -1].storage_offset() == 1 << 31
    k = torch.randn(1, 8, 128).bfloat16()
    append_kv(cache, k, -k, torch.tensor([(1 << 21) + 15]))
    assert torch.equal(cache[1, -1, -1], -k[0])


def test_append_kv_checks_its_arguments() -> None:
    cache, k = torch.zeros(2, 6, 4, 2, 8), torch.zeros(4, 2, 8)
    slots = torch.arange(4)
    for arguments in (
        (cache, k, k[:3], slots), (cache, k, k, slots[:3]), (cache[:1], k, k, slots), (cache.transpose(1, 2), k, k, slots),
        (cache, k[..., :4], k[..., :4], slots),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"cache|slots"):
            append_kv(*arguments)


def test_paged_attention_against_contiguous_sdpa() -> None:
    """One sequence whose blocks lie backwards."""
    history, num_queries, block_size = 9, 5, 4
    k, v, q = torch.randn(14, 2, 8), torch.randn(14, 2, 8), torch.randn(num_queries, 6, 8)
    cache = torch.full((2, 5, block_size, 2, 8), torch.nan)
    table = torch.tensor([[4, 2, 1, 0, -1]])
    slots = torch.tensor([table[0, p // block_size] * block_size + p % block_size for p in range(14)])
    append_kv(cache, k, v, slots)
    mask = torch.ones(num_queries, 14, dtype=torch.bool).tril(history)
    expected = scaled_dot_product_attention(
        q.double().transpose(0, 1), k.double().transpose(0, 1).repeat_interleave(3, 0),
        v.double().transpose(0, 1).repeat_interleave(3, 0), attn_mask=mask, scale=0.3,
    ).transpose(0, 1)  # fmt: skip
    padded = torch.cat((q, torch.randn(2, 6, 8)))
    out = paged_attention(padded, cache, torch.tensor([0, 5]), torch.tensor([14]), table, 0.3)
    assert_close(out[:5], expected)
    assert torch.equal(out[5:], torch.zeros(2, 6, 8))
    with pytest.raises(ValueError, match="do not fit"):
        paged_attention(q[..., :4], cache, torch.tensor([0, 5]), torch.tensor([14]), table, 0.3)
    with pytest.raises(ValueError, match="sequences"):
        paged_attention(q, cache, torch.tensor([0, 5]), torch.tensor([14, 3]), table, 0.3)


def test_most_likely() -> None:
    logits = torch.randn(5, 5001).round(decimals=1)
    logits[1, [7, 1030, 4999, 5000]] = 9.0
    logits[2, 5000] = 9.0
    logits[3] = -torch.inf
    logits[4, 4095:4097] = torch.inf
    assert most_likely(logits).tolist() == [int(logits[0].argmax()), 7, 5000, 0, 4095]
    assert most_likely(logits[:, :3]).tolist() == logits[:, :3].argmax(1).tolist()
    logits[:, ::3] = torch.nan
    assert (most_likely(logits) < 5001).all() and (most_likely(logits) >= 0).all()
    with pytest.raises(TypeError, match="float32"):
        most_likely(logits.bfloat16())
