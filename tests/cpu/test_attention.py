"""The batched attention backend against SGLang's torch_native, over SGLang's own pools, a step after the other."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusionrl.base import cpu_wing
from fusionrl.config import upstream_flags
from fusionrl.cpu import kernels, sglang_patches

NUM_SLOTS, NUM_REQUESTS = 512, 12


@pytest.fixture(scope="module", autouse=True)
def sglang() -> Iterator[None]:
    """Import SGLang's layers as an engine does, without the libraries that GPUs alone need; of one rank."""
    cpu_wing.install_stand_ins()
    sglang_patches.register_attention()
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(dcp_enabled=False):
        yield


@dataclass
class Requests:
    """A scheduler's part of the work: which slots the tokens of each request have."""

    heads: tuple[int, int]
    size: int = 16
    latent: int | None = None  # of the keys' numbers, those that are the values, too: latent attention
    window: int = -1
    page_size: int = 1
    dtype: torch.dtype = torch.float32
    lengths: dict[int, int] = field(default_factory=dict)
    """Row → tokens in the cache."""

    def __post_init__(self) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool

        self.random = torch.Generator().manual_seed(7)
        self.table = ReqToTokenPool(NUM_REQUESTS, 256, "cpu", False)
        kind: type[Any] = MHATokenToKVPool if self.latent is None else MLATokenToKVPool
        sizes = (self.heads[1], self.size) if self.latent is None else (self.latent, self.size - self.latent)
        pool = kind(NUM_SLOTS, self.page_size, self.dtype, *sizes, 1, "cpu", enable_memory_saver=False)
        self.runner = SimpleNamespace(
            device="cpu",
            req_to_token_pool=self.table,
            token_to_kv_pool=pool,
            use_mla_backend=self.latent is not None,
            server_args=SimpleNamespace(speculative_algorithm=None),
        )
        self.layer = RadixAttention(
            *(self.heads[0], self.size, 0.25, self.heads[1]),
            layer_id=0,
            sliding_window_size=self.window,
            v_head_dim=-1 if self.latent is None else self.latent,
        )
        pages = torch.randperm(NUM_SLOTS // self.page_size, generator=self.random)
        self.free = pages.tolist()

    def take(self, row: int, count: int) -> Tensor:
        """Slots of the next `count` tokens of a request; a new page begins where the last one is full."""
        taken = []
        for position in range(self.lengths.get(row, 0), self.lengths.get(row, 0) + count):
            if position % self.page_size == 0:
                slot = self.free.pop() * self.page_size
            else:
                slot = int(self.table.req_to_token[row, position - 1]) + 1
            self.table.req_to_token[row, position] = slot
            taken.append(slot)
        self.lengths[row] = self.lengths.get(row, 0) + count
        return torch.tensor(taken)

    def share(self, row: int, source: int, count: int) -> None:
        """Let a new request begin with the first tokens of another one, as the prefix cache does."""
        self.table.req_to_token[row, :count] = self.table.req_to_token[source, :count]
        self.lengths[row] = count

    def batch(self, news: dict[int, int], *, decode: bool) -> Any:
        """A batch in which each row computes so many tokens."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        prefixes = torch.tensor([self.lengths.get(row, 0) for row in news])
        slots = torch.cat([self.take(row, count) for row, count in news.items()])
        return SimpleNamespace(
            forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            req_pool_indices=torch.tensor(list(news)),
            seq_lens=torch.tensor([self.lengths[row] for row in news]),
            extend_prefix_lens=prefixes,
            extend_seq_lens=torch.tensor(list(news.values())),
            out_cache_loc=slots,
            encoder_lens=None,
            spec_info=None,
        )


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": (4, 4)},
        {"heads": (9, 3), "size": 64},
        {"heads": (4, 2), "page_size": 16},
        {"heads": (4, 2), "window": 5},
        {"heads": (4, 1), "dtype": torch.bfloat16},
        {"heads": (4, 1), "size": 24, "latent": 16},
        {"heads": (4, 1), "size": 24, "latent": 16, "dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_equals_torch_native(shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, tokens, requests that end and come, a shared prefix, a prompt in two parts; tokens by the kernel."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    of_kernel: list[Tensor] = []

    def counted(*args: Tensor, **kwargs: Any) -> Tensor:
        of_kernel.append(kernel(*args, **kwargs))
        return of_kernel[-1]

    kernel = kernels.attend_decode
    monkeypatch.setattr(kernels, "attend_decode", counted)
    requests = Requests(**shape)
    ours, native = sglang_patches.create_backend(requests.runner), TorchNativeAttnBackend(requests.runner)
    assert type(ours) is not TorchNativeAttnBackend

    def check(news: dict[int, int], *, decode: bool = False) -> None:
        batch = requests.batch(news, decode=decode)
        (heads, groups), size = requests.heads, requests.size
        q, k, v = (
            torch.randn(sum(news.values()), count * size, generator=requests.random).to(requests.dtype)
            for count in (heads, groups, groups)
        )
        k, v = (x.view(-1, groups, size) for x in (k, v))
        if requests.latent is not None:
            v = k[..., : requests.latent]
        outs = []
        for backend in (ours, native):
            if not (decode and backend is ours):  # a new batch is seen without it, too
                backend.init_forward_metadata(batch)
            outs.append(backend.forward(q, k, v, requests.layer, batch))
        tolerance = 2e-6 if requests.dtype is torch.float32 else 2e-2
        torch.testing.assert_close(outs[0], outs[1], atol=tolerance, rtol=tolerance)

    check({3: 7, 1: 2, 5: 12})
    for _ in range(3):
        check({3: 1, 1: 1, 5: 1}, decode=True)
    whole_pages = 16  # what the prefix cache gives out, whatever the size of a page
    check({7: 40})
    requests.share(8, 7, whole_pages)
    requests.share(2, 7, 2 * whole_pages)
    check({8: 3, 2: 9, 4: 1})
    check({1: 1, 8: 1, 2: 1, 4: 1, 7: 1}, decode=True)
    check({9: 20})
    check({9: 15, 6: 4})  # the second part of a long prompt, beside a new one
    check({9: 1}, decode=True)
    assert len(of_kernel) == (10 if requests.dtype is torch.float32 else 5), "prompts in fp32, too"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [-1, 5])
def test_sinks_are_those_of_transformers(window: int, dtype: torch.dtype) -> None:
    """Prompts in one batch, one with a prefix, then tokens; transformers computes each request by itself."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    heads, groups, size = 4, 2, 16
    requests = Requests((heads, groups), window=window, dtype=dtype)
    backend = sglang_patches.create_backend(requests.runner)
    sinks = torch.linspace(-2, 3, heads).to(dtype)
    module = SimpleNamespace(num_key_value_groups=heads // groups, sinks=sinks, training=False)
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    for news in ({3: 9, 1: 2}, {3: 4, 5: 7}, {3: 1, 1: 1, 5: 1}):
        batch = requests.batch(news, decode=set(news.values()) == {1})
        q, k, v = (
            torch.randn(sum(news.values()), count, size, generator=requests.random).to(dtype)
            for count in (heads, groups, groups)
        )
        backend.init_forward_metadata(batch)
        out = backend.forward(q.flatten(1), k, v, requests.layer, batch, sinks=sinks)
        parts = [x.split(list(news.values())) for x in (q, k, v, out.view(-1, heads, size))]
        for row, query, key, value, found in zip(news, *parts, strict=True):
            earlier = seen.get(row, (key[:0], value[:0]))
            seen[row] = keys, values = torch.cat([earlier[0], key]), torch.cat([earlier[1], value])
            places = torch.arange(len(keys))
            distance = places[-len(query) :, None] - places
            mask = (distance >= 0) & (distance <= window if window > -1 else distance >= 0)
            bias = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)
            states = (x.transpose(0, 1)[None] for x in (query, keys, values))
            wanted, _ = eager_attention_forward(module, *states, bias, scaling=0.25)
            bound = 2e-6 if dtype is torch.float32 else 2e-2
            torch.testing.assert_close(found, wanted[0], atol=bound, rtol=bound)


def test_a_cache_of_windows_keeps_torch_native(caplog: pytest.LogCaptureFixture) -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    runner = Requests((4, 2)).runner
    runner.token_to_kv_pool = object.__new__(SWAKVPool)
    runner.token_to_kv_pool.swa_layer_nums = 0
    with caplog.at_level("INFO"):
        assert type(sglang_patches.create_backend(runner)) is TorchNativeAttnBackend
    assert "torch_native" in caplog.text
    assert "sliding window" in caplog.text


def test_sglang_knows_the_backend_by_its_name() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    sglang_patches.register_attention()  # again
    assert ATTENTION_BACKENDS[cpu_wing.ATTENTION_BACKEND] is sglang_patches.create_backend
    parsed = upstream_flags.parse_with(
        upstream_flags.sglang_parser(), "--attention-backend", [cpu_wing.ATTENTION_BACKEND], {}
    )
    assert parsed == {"attention_backend": cpu_wing.ATTENTION_BACKEND}
    with pytest.raises(upstream_flags.UpstreamError, match="torch_batched"):
        upstream_flags.parse_with(upstream_flags.sglang_parser(), "--attention-backend", ["torch_whole"], {})
