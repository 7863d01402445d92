"""Our kernels against the formulas in float64: values, gradients, types, strides, threads, NaN; and a machine without
them."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fusionrl.cpu import kernel_library, kernels, megatron_patches
from fusionrl.cpu.row_functions import rms_norm, rotate

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SHAPES = [(1, 5), (3, 7), (65, 32), (300, 128), (128, 576)]  # the last two are worth a second thread


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(1)
    assert kernels.loaded(), "this machine has a C compiler"


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def swiglu(both: Tensor) -> Tensor:
    megatron_patches.install()
    from fusionrl.trainer import local_layers  # Megatron, after the shims

    return local_layers.swiglu(both)


def _norm64(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return hidden * (hidden.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _gate64(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return gate / (1 + (-gate).exp()) * up


def _turned64(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.size(-1)
    a, b, rest = values.split([half, half, values.size(-1) - 2 * half], -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def _check(ours: Callable[..., Tensor], exact: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Values and gradients, within a few units in the last place of the largest of each; also in bf16."""
    _check_type(ours, exact, *inputs)
    _check_type(ours, exact, *(x.bfloat16() for x in inputs))


def _check_type(
    ours: Callable[..., Tensor], exact: Callable[..., Tensor], *inputs: Tensor, num_roundings: int = 1
) -> None:
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    doubles = tuple(x.detach().double().requires_grad_() for x in inputs)
    out, expected = ours(*inputs), exact(*doubles)
    assert out.dtype is inputs[0].dtype
    of_output = torch.randn_like(out)
    grads = torch.autograd.grad((out * of_output).sum(), inputs)
    wanted = torch.autograd.grad((expected * of_output.double()).sum(), doubles)
    for found, right in zip((out, *grads), (expected, *wanted), strict=True):
        assert found.shape == right.shape
        # A number of bf16 is rounded once: half a unit in its own last place. Several times: of what it is made of.
        of_each = num_roundings * 2**-8 if found.dtype is torch.bfloat16 else 0.0
        size = right.abs() if num_roundings == 1 else right.abs().max()
        assert ((found.double() - right).abs() <= 2e-6 * right.abs().max() + of_each * size).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms(threads: int, shape: tuple[int, int]) -> None:
    eps = 1e-5
    weight = torch.randn(shape[1])
    norm, exact = (lambda x, w: rms_norm(x, w, eps)), (lambda x, w: _norm64(x, w, eps))
    _check(norm, exact, 3 * torch.randn(shape), weight)
    wide = torch.randn(shape[0], 2, 3 * shape[1])[..., shape[1] : 2 * shape[1]]  # rows in a wider tensor
    _check(norm, exact, wide, weight)
    _check(norm, exact, torch.randn(shape[1], shape[0]).t(), weight)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_sum_with_a_residual_is_normed(threads: int, shape: tuple[int, int]) -> None:
    hidden, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[1])
    out, both = kernels.add_rms_norm(hidden, residual, weight, 1e-6)
    assert torch.equal(both, hidden + residual)
    assert torch.equal(out, kernels.rms_norm(both, weight, 1e-6)[0])
    half = hidden.bfloat16(), residual.bfloat16(), weight.bfloat16()
    out, both = kernels.add_rms_norm(*half, 1e-6)
    assert torch.equal(both, half[0] + half[1])
    exact = _norm64(half[0].double() + half[1].double(), half[2].double(), 1e-6)  # of the sum before it was rounded
    assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 2e-6).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gates(threads: int, shape: tuple[int, int]) -> None:
    _check(swiglu, _gate64, 3 * torch.randn(shape[0], 2 * shape[1]))
    _check(swiglu, _gate64, torch.randn(2 * shape[1], shape[0]).t())


def test_gates_far_from_zero() -> None:
    """exp of what is beyond its range neither overflows nor turns into NaN."""
    gate = torch.tensor([0.0, -0.0, 20.0, -20.0, 87.5, -87.5, 120.0, -120.0, 3e38, -3e38])
    both = torch.stack((gate, torch.ones_like(gate)), -1).requires_grad_()
    out = swiglu(both)
    torch.testing.assert_close(out[:, 0], torch.nn.functional.silu(gate), rtol=1e-6, atol=1e-30)
    (grad,) = torch.autograd.grad(out.sum(), both)
    assert grad.isfinite().all()


@pytest.mark.parametrize("turned", [16, 8])
def test_rotations(threads: int, turned: int) -> None:
    for count in (1, 5, 400):
        angles = torch.randn(count, 1, turned // 2)
        values = torch.randn(count, 6, 40)[:, 1:5, 10:26]  # heads of a wider tensor
        for dtype in (torch.float32, torch.bfloat16):
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
            exact = lambda x, c=cos, s=sin: _turned64(x, c.double(), s.double())  # noqa: E731
            _check_type(lambda x, c=cos, s=sin: rotate(x, c, s), exact, values.to(dtype))


def _attended64(query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, scale: float) -> Tensor:
    """query [H, D] of one request, whose keys are at `slots` → [H, V]."""
    repeat = query.size(0) // keys.size(1)
    key, value = (x[slots.long()].repeat_interleave(repeat, 1).double() for x in (keys, values))
    shares = torch.einsum("hd,lhd->hl", query.double() * scale, key).softmax(-1)
    return torch.einsum("hl,lhv->hv", shares, value)


@pytest.mark.parametrize("sizes", [(4, 2, 32, 32), (9, 3, 64, 64), (2, 2, 128, 128), (4, 1, 24, 17)], ids=str)
@pytest.mark.parametrize("window", [None, 6])
@TYPES
def test_attention_of_one_token_a_request(
    threads: int, sizes: tuple[int, int, int, int], window: int | None, dtype: torch.dtype
) -> None:
    heads, groups, size, value_size = sizes
    lengths = torch.tensor([1, 7, 300, 40, 6, 8])
    keys, values = torch.randn(900, groups, size, dtype=dtype), torch.randn(900, groups, value_size, dtype=dtype)
    table = torch.randint(0, 900, (8, 310), dtype=torch.int32)
    rows = torch.tensor([5, 0, 7, 2, 1, 3])
    query = 3 * torch.randn(6, heads + 2, size, dtype=dtype)[:, 1:-1]
    # Rounding of a score is as much of its share: scores reach 30, fp32 has 6e-8 of them, and values reach 4.
    bound = 30 * 6e-8 * 4
    out = kernels.attend_decode(query, keys, values, table, rows, lengths, scale=0.2, window=window)
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        first = 0 if window is None else max(0, length - 1 - window)
        expected = _attended64(query[i], keys, values, table[row, first:length], 0.2)
        of_each = 2**-8 * expected.abs() if dtype is torch.bfloat16 else 0.0  # an answer is rounded once
        assert out.dtype is dtype and ((out[i].double() - expected).abs() < bound + of_each).all()
    wider = torch.cat((query, query), -1)[..., :size]  # its heads are not side by side
    again = kernels.attend_decode(wider, keys, values, table, rows, lengths, scale=0.2, window=window)
    assert torch.equal(again, out)


@pytest.mark.parametrize(
    ("slot", "row", "length"), [(10, 0, 3), (-1, 0, 3), (1, 1, 3), (1, -1, 3), (1, 0, 4), (1, 0, -1)], ids=str
)
def test_what_is_beyond_the_table_or_the_cache_is_refused(slot: int, row: int, length: int) -> None:
    keys, table = torch.randn(10, 1, 8), torch.tensor([[0, slot, 2]], dtype=torch.int32)
    with pytest.raises(IndexError, match="beyond"):
        kernels.attend_decode(
            *(torch.randn(1, 1, 8), keys, keys, table, torch.tensor([row]), torch.tensor([length])), scale=1.0
        )


@pytest.mark.parametrize("sizes", [(4, 2, 32, 32), (9, 3, 64, 32), (3, 1, 24, 24)], ids=str)
@pytest.mark.parametrize("has_norms", [False, True])
@TYPES
def test_the_attention_of_new_tokens_in_one_call(
    threads: int, sizes: tuple[int, int, int, int], has_norms: bool, dtype: torch.dtype
) -> None:
    """Norms of heads, rotation, writing and attention in one call, or each by the kernel that other tests look at."""
    heads, groups, size, turned = sizes
    count, num_slots = 300, 900
    queries, keys = heads * size, groups * size
    qkv = torch.randn(count, queries + 2 * keys, dtype=dtype)
    weights = torch.randn(size, dtype=dtype), torch.randn(size, dtype=dtype)
    angles, positions = torch.randn(50, turned, dtype=dtype), torch.randint(0, 50, (count,))
    caches = [torch.randn(num_slots, groups, size, dtype=dtype) for _ in range(2)]
    slots, rows = torch.randperm(num_slots)[:count], torch.randperm(count)
    table, lengths = torch.randint(0, num_slots, (count, 20), dtype=torch.int32), torch.randint(1, 21, (count,))
    table[rows, lengths - 1] = slots.int()  # the new token is the last one of its request

    query, key, value = (part.contiguous() for part in qkv.split([queries, keys, keys], -1))
    if has_norms:
        query, key = (
            kernels.rms_norm(part.view(count, -1, size), weight, 1e-6)[0].view(part.shape)
            for part, weight in zip((query, key), weights, strict=True)
        )
    cos, sin = angles.chunk(2, -1)
    query, key = (kernels.rotate(part.view(count, -1, size), cos[positions], sin[positions]) for part in (query, key))
    expected = [cache.clone() for cache in caches]
    expected[0][slots], expected[1][slots] = key, value.view(count, groups, size)
    attended = kernels.attend_decode(query, *expected, table, rows, lengths, scale=0.2, window=6)

    norms, now = weights if has_norms else None, (table, rows, lengths)
    out = kernels.attend_new(qkv.clone(), norms, 1e-6, angles, positions, slots, *caches, *now, scale=0.2, window=6)
    assert torch.equal(out, attended.view(count, -1)) and all(map(torch.equal, caches, expected))
    if not has_norms:
        turned_both = kernels.rotate_both(*qkv.split([queries, keys, keys], -1)[:2], angles, positions, size)
        assert torch.equal(turned_both[0], query.view(count, -1)) and torch.equal(turned_both[1], key.view(count, -1))

    for name, wrong in (("positions", 50), ("slots", num_slots), ("rows", count), ("lengths", 21)):
        beyond = {"positions": positions, "slots": slots, "rows": rows, "lengths": lengths}
        beyond[name] = beyond[name].index_fill(0, torch.tensor([7]), wrong)
        own = beyond["positions"], beyond["slots"]
        with pytest.raises(IndexError, match="beyond"):
            kernels.attend_new(
                qkv.clone(), norms, 1e-6, angles, *own, *caches, table, beyond["rows"], beyond["lengths"], scale=0.2
            )


@TYPES
def test_nothing_at_all(dtype: torch.dtype) -> None:
    """No rows, and a request without tokens."""
    none, weight = torch.empty(0, 8, dtype=dtype), torch.ones(8, dtype=dtype)
    for out in (*kernels.rms_norm(none, weight, 1e-6), kernels.swiglu(none)):
        assert out.numel() == 0
    grads = kernels.rms_norm_backward(none, none, weight, torch.empty(0, 1))
    assert grads[0].numel() == 0 and torch.equal(grads[1], torch.zeros(8, dtype=dtype))
    keys, query = torch.randn(4, 1, 8, dtype=dtype), torch.randn(1, 2, 8, dtype=dtype)
    table, one = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([0])
    out = kernels.attend_decode(query, keys, keys, table, one, one, scale=1.0)
    assert torch.equal(out, torch.zeros(1, 2, 8, dtype=dtype))


@TYPES
def test_results_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    """Of values and gradients, bit by bit: a resume on a machine with more cores is exact."""
    hidden, both, weight, angles, keys, query = (
        torch.randn(shape, dtype=dtype) for shape in ((700, 96), (700, 192), (96,), (700, 16), (900, 2, 32), (8, 4, 32))
    )
    table = torch.randint(0, 900, (8, 310), dtype=torch.int32)
    lengths, rows = torch.tensor([300, 1, 7, 40, 6, 8, 310, 12]), torch.arange(8)

    def results(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        out, scale = kernels.rms_norm(hidden, weight, 1e-6)
        return [
            *(out, *kernels.rms_norm_backward(both[:, :96], hidden, weight, scale)),
            *(*kernels.add_rms_norm(hidden, out, weight, 1e-6), kernels.swiglu(both)),
            *(kernels.swiglu_backward(hidden, both), kernels.rotate(hidden.view(700, 3, 32), angles, angles)),
            kernels.attend_decode(query, keys, keys, table, rows, lengths, scale=0.2),
        ]

    before = torch.get_num_threads()
    try:
        one, *others = [results(threads) for threads in (1, 2, 3, 5)]
    finally:
        torch.set_num_threads(before)
    for other in others:
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)


def test_numbers_of_bf16_are_rounded_as_torch_rounds() -> None:
    """To the nearest, to even between two; from the largest up to infinity. A sum of two numbers is exact in fp32."""
    large = torch.arange(0, 0x7F80, 3, dtype=torch.int16).view(torch.bfloat16)
    halves = (large.float() * 2**-8).bfloat16()  # many sums are just between two numbers
    for small in (halves, -halves, halves * 0.5, large.flip(0), -large, torch.full_like(large, float("inf"))):
        hidden, residual = large[None], small[None]
        _, both = kernels.add_rms_norm(hidden, residual, torch.ones_like(large), 1e-6)
        assert torch.equal(both, hidden + residual)
    assert kernels.add_rms_norm(-residual, residual, torch.ones_like(large), 1e-6)[1].isnan().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@TYPES
def test_what_is_not_finite_stays_so(bad: float, dtype: torch.dtype) -> None:
    hidden, weight = torch.randn(3, 8, dtype=dtype), torch.ones(8, dtype=dtype)
    hidden[1, 2] = bad
    assert kernels.rms_norm(hidden, weight, 1e-6)[0].isnan().any(1).tolist() == [False, True, False]
    both = torch.ones(3, 8, dtype=dtype)
    both[1, 2] = bad
    assert kernels.swiglu(both).isfinite().all(1).tolist() == [True, False, True]
    keys = torch.randn(4, 1, 8, dtype=dtype)
    keys[2, 0, 3] = bad
    table, rows = torch.tensor([[0, 1], [1, 2]], dtype=torch.int32), torch.tensor([0, 1])
    out = kernels.attend_decode(
        torch.randn(2, 1, 8).abs().to(dtype), keys, keys.clone(), table, rows, torch.tensor([2, 2]), scale=1.0
    )
    assert out.isfinite().all(-1).flatten().tolist() == [True, False]


def test_other_types_are_left_to_torch() -> None:
    half = torch.ones(1, dtype=torch.bfloat16)
    assert kernels.fit(torch.ones(1)) and kernels.fit(half, half)
    assert not kernels.fit(torch.ones(1), half) and not kernels.fit(half, torch.ones(1))
    assert not kernels.fit(torch.ones(1, dtype=torch.float16))
    assert not kernels.fit(torch.ones(1, device="meta"))


def test_a_machine_without_a_library(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Torch computes the same; it rounds bf16 on the way."""

    def load() -> None:
        raise kernel_library.CompileError("no C compiler: install gcc")

    functions = (kernels.loaded, kernels._library)
    for function in functions:
        function.cache_clear()
    monkeypatch.setattr(kernel_library, "load", load)
    norm, exact = (lambda x, w: rms_norm(x, w, 1e-5)), (lambda x, w: _norm64(x, w, 1e-5))
    try:
        assert not kernels.fit(torch.ones(1))
        for dtype in (torch.float32, torch.bfloat16):
            hidden, weight = torch.randn(5, 16, dtype=dtype), torch.randn(16, dtype=dtype)
            _check_type(norm, exact, hidden, weight, num_roundings=3)
            _check_type(swiglu, _gate64, hidden, num_roundings=3)
    finally:
        monkeypatch.undo()
        for function in functions:
            function.cache_clear()
    assert caplog.text.count("torch computes instead: no C compiler: install gcc") == 1


@TYPES
@pytest.mark.parametrize("shape", [(3, 2, 4, 12, 8), (40, 1, 3, 64, 32)], ids=str)
def test_a_token_of_delta_nets(shape: tuple[int, ...], dtype: torch.dtype, threads: int) -> None:
    """Against the rule in float64, over two tokens; heads come as parts of wider rows, states as a part of a pool."""
    count, heads, value_heads, size, value_size = shape
    pool = torch.randn(2, count + 3, value_heads, value_size, size)
    states, exact, slots = pool[1], pool[1].double(), torch.randperm(count + 3)[:count]
    for _ in range(2):
        rows = torch.randn(count, (2 * heads * size) + value_heads * value_size).to(dtype)
        query, key, value = rows.split([heads * size, heads * size, value_heads * value_size], 1)
        query, key = (x.view(count, heads, size) for x in (query, key))
        value = value.view(count, value_heads, value_size)
        keep, share = torch.rand(count, value_heads), torch.rand(count, value_heads)
        out = kernels.delta_decode(query, key, value, keep, share, states, slots)
        q, k = (x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
        q, k = (x.repeat_interleave(value_heads // heads, 1) for x in (q / size**0.5, k))
        state = exact[slots] * keep[..., None, None]
        change = share[..., None] * (value.double() - torch.einsum("bhvk,bhk->bhv", state, k))
        exact[slots] = state = state + change[..., None] * k[..., None, :]
        wanted = torch.einsum("bhvk,bhk->bhv", state, q)
        bound = 1e-5 if dtype is torch.float32 else 2**-8
        torch.testing.assert_close(out.double(), wanted, atol=bound, rtol=bound)
        torch.testing.assert_close(states.double(), exact, atol=1e-5, rtol=1e-5)
    with pytest.raises(IndexError, match="a slot is beyond the states"):
        kernels.delta_decode(query, key, value, keep, share, states, slots + 3)


@TYPES
def test_tensors_with_gaps(dtype: torch.dtype) -> None:
    """What torch takes in any layout is the same as its dense copy."""
    row, weight = torch.randn(40, dtype=dtype)[::4], torch.randn(20, dtype=dtype)[::2]
    dense = row.contiguous(), weight.contiguous()
    assert torch.equal(kernels.rms_norm(row, weight, 1e-6)[0], kernels.rms_norm(*dense, 1e-6)[0])
    assert torch.equal(kernels.swiglu(row), kernels.swiglu(dense[0]))
    values, angles = torch.randn(8, 3, 4, dtype=dtype).transpose(0, 2), torch.randn(16, 4, dtype=dtype)[::4]
    turned = kernels.rotate(values, angles, angles)
    assert torch.equal(turned, kernels.rotate(values.contiguous(), angles.contiguous(), angles.contiguous()))
