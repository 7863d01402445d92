"""Checksums of an engine's tensors, against the same tensors cut up by hand."""

import hashlib

import pytest
import torch

from fusionrl.models.kinds import Delta, Experts, Latent
from fusionrl.models.shape import ModelShape, shape_from_hf_config
from fusionrl.weights.checksums import engine_checksums, hash_tensor, hash_words
from fusionrl.weights.verify import compare_checksums

HIDDEN, FFN, HEADS, GROUPS, HEAD_DIM, VOCAB = 8, 12, 4, 2, 4, 70


def shape(groups: int = GROUPS) -> ModelShape:
    raw = {"model_type": "qwen2", "num_hidden_layers": 1, "hidden_size": HIDDEN, "intermediate_size": FFN}
    raw |= {"num_attention_heads": HEADS, "num_key_value_heads": groups, "head_dim": HEAD_DIM, "vocab_size": VOCAB}
    return shape_from_hf_config(raw)


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).bfloat16()


def sha(tensor: torch.Tensor) -> str:
    """First 8 bytes of SHA-256, the bytes taken value by value."""
    raw = b"".join(int(x).to_bytes(2, "little", signed=True) for x in tensor.contiguous().view(torch.int16).flatten())
    return hashlib.sha256(raw).hexdigest()[:16]


def hf_tensors(groups: int = GROUPS) -> dict[str, torch.Tensor]:
    sizes = {"q": HEADS * HEAD_DIM, "k": groups * HEAD_DIM, "v": groups * HEAD_DIM}
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    return {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN),
        "model.layers.0.input_layernorm.weight": random(HIDDEN),
        **{f"{attention}{x}_proj.weight": random(size, HIDDEN) + (x == "v") for x, size in sizes.items()},
        **{f"{attention}{x}_proj.bias": random(size) + (x == "v") for x, size in sizes.items()},
        attention + "o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
        mlp + "gate_proj.weight": random(FFN, HIDDEN),
        mlp + "up_proj.weight": random(FFN, HIDDEN) + 1,
        mlp + "down_proj.weight": random(HIDDEN, FFN),
        "model.norm.weight": random(HIDDEN) + 1,
        "lm_head.weight": random(VOCAB, HIDDEN) + 1,
    }


def by_hand(t: dict[str, torch.Tensor], rank: int, tp: int, groups: int = GROUPS) -> dict[str, torch.Tensor]:
    """What rank `rank` of an engine holds, written out head by head and column by column."""
    layer = "model.layers.0."
    q_heads = range(rank * HEADS // tp, (rank + 1) * HEADS // tp)
    kv_heads = sorted({q * groups // HEADS for q in q_heads})
    ffn = [i for i in range(FFN) if i * tp // FFN == rank]
    padded = 128  # the next multiple of 64 above 70
    rows = [i for i in range(padded) if i * tp // padded == rank]

    def heads(name: str, chosen: list[int] | range) -> torch.Tensor:
        return torch.cat([t[layer + name][h * HEAD_DIM : (h + 1) * HEAD_DIM] for h in chosen])

    def vocabulary(name: str) -> torch.Tensor:
        zero = torch.zeros(HIDDEN, dtype=torch.bfloat16)
        return torch.stack([t[name][i] if i < VOCAB else zero for i in rows])

    def qkv(kind: str) -> torch.Tensor:
        parts = [("q_proj", q_heads), ("k_proj", kv_heads), ("v_proj", kv_heads)]
        return torch.cat([heads(f"self_attn.{name}.{kind}", chosen) for name, chosen in parts])

    o_columns = [h * HEAD_DIM + i for h in q_heads for i in range(HEAD_DIM)]
    return {
        "model.embed_tokens.weight": vocabulary("model.embed_tokens.weight"),
        layer + "input_layernorm.weight": t[layer + "input_layernorm.weight"],
        layer + "self_attn.qkv_proj.weight": qkv("weight"),
        layer + "self_attn.qkv_proj.bias": qkv("bias"),
        layer + "self_attn.o_proj.weight": t[layer + "self_attn.o_proj.weight"][:, o_columns],
        layer + "mlp.gate_up_proj.weight": torch.cat(
            [t[layer + f"mlp.{name}_proj.weight"][ffn] for name in ("gate", "up")]
        ),
        layer + "mlp.down_proj.weight": t[layer + "mlp.down_proj.weight"][:, ffn],
        "model.norm.weight": t["model.norm.weight"],
        "lm_head.weight": vocabulary("lm_head.weight"),
    }


@pytest.mark.parametrize(("tp", "groups"), [(1, 2), (4, 2), (2, 4)])
def test_against_tensors_cut_by_hand(tp: int, groups: int) -> None:
    """Also with fewer key and value heads than ranks: then each rank has a copy of its group's."""
    tensors = hf_tensors(groups)
    found = engine_checksums(tensors.items(), shape(groups), tp)
    assert len(found) == tp
    for rank in range(tp):
        assert found[rank] == {name: sha(tensor) for name, tensor in by_hand(tensors, rank, tp, groups).items()}, rank


def test_a_bias_that_is_added_after_the_columns_is_whole_on_every_rank() -> None:
    """A user's family may have one; SGLang's ranks add up their products first."""
    name, bias = "model.layers.0.self_attn.o_proj.bias", random(HIDDEN)
    assert engine_checksums([(name, bias)], shape(), 2) == [{name: sha(bias)}] * 2


@pytest.mark.parametrize(("tp", "groups"), [(1, 2), (2, 2), (4, 2)])
def test_a_checkpoint_that_has_them_joined(tp: int, groups: int) -> None:
    """Queries, keys and values in one tensor, gate and up in another (Phi): engines hold the same."""
    plain = hf_tensors(groups)
    layer = "model.layers.0."
    joined = {name: tensor for name, tensor in plain.items() if not name.endswith((".bias", "_norm.weight"))}
    for target, parts in (("self_attn.qkv_proj", ("q", "k", "v")), ("mlp.gate_up_proj", ("gate", "up"))):
        module, _, _ = target.partition(".")
        joined[f"{layer}{target}.weight"] = torch.cat(
            [joined.pop(f"{layer}{module}.{part}_proj.weight") for part in parts]
        )
    found, wanted = (
        engine_checksums(joined.items(), shape(groups), tp),
        engine_checksums(plain.items(), shape(groups), tp),
    )
    for rank in range(tp):
        assert found[rank] == {name: wanted[rank][name] for name in found[rank]}
        assert f"{layer}self_attn.qkv_proj.weight" in found[rank]


@pytest.mark.parametrize("tp", [1, 2])
def test_stacked_experts(tp: int) -> None:
    """gpt-oss: gate and up alternate, each rank's width padded, biases in fp32, and that of the columns added once."""
    raw = {"num_hidden_layers": 1, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_local_experts": 2}
    raw |= {"num_attention_heads": HEADS, "vocab_size": VOCAB, "num_experts_per_tok": 1}
    of, multiple = "model.layers.0.mlp.experts.", 8
    stacks = {"gate_up_proj": (HIDDEN, 2 * FFN), "gate_up_proj_bias": (2 * FFN,), "down_proj": (FFN, HIDDEN)}
    tensors = {of + name: random(2, *sizes) for name, sizes in (stacks | {"down_proj_bias": (HIDDEN,)}).items()}
    found = engine_checksums(tensors.items(), shape_from_hf_config({"model_type": "gpt_oss"} | raw), tp, None, multiple)
    width = 16 // tp  # 12, padded
    for rank in range(tp):
        both = torch.zeros(2, 2 * width, HIDDEN, dtype=torch.bfloat16)
        bias, down = torch.zeros(2, 2 * width), torch.zeros(2, HIDDEN, width, dtype=torch.bfloat16)
        for i in range(width):
            if (row := rank * width + i) >= FFN:
                continue
            both[:, 2 * i : 2 * i + 2] = tensors[of + "gate_up_proj"][:, :, 2 * row : 2 * row + 2].transpose(1, 2)
            bias[:, 2 * i : 2 * i + 2] = tensors[of + "gate_up_proj_bias"][:, 2 * row : 2 * row + 2]
            down[:, :, i] = tensors[of + "down_proj"][:, row]
        last = torch.zeros(2, HIDDEN) if rank else tensors[of + "down_proj_bias"].float()
        want = {"w13_weight": both, "w13_weight_bias": bias, "w2_weight": down, "w2_weight_bias": last}
        assert found[rank] == {of + name: hash_tensor(tensor) for name, tensor in want.items()}


@pytest.mark.parametrize(("tp", "groups"), [(2, 2), (4, 2)])
def test_norms_over_all_heads_of_minimax(tp: int, groups: int) -> None:
    """SGLang's ranks have those of their heads, and keep the router in fp32."""
    raw = {"num_hidden_layers": 1, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_local_experts": 2}
    raw |= {"num_attention_heads": HEADS, "num_key_value_heads": groups, "head_dim": HEAD_DIM, "vocab_size": VOCAB}
    layer, router = "model.layers.0.", random(2, HIDDEN)
    queries, keys = random(HEADS * HEAD_DIM), random(groups * HEAD_DIM)
    tensors = {layer + "self_attn.q_norm.weight": queries, layer + "self_attn.k_norm.weight": keys}
    tensors[layer + "block_sparse_moe.gate.weight"] = router
    model = shape_from_hf_config({"model_type": "minimax_m2", "num_experts_per_tok": 1} | raw)
    for rank, found in enumerate(engine_checksums(tensors.items(), model, tp)):
        group = rank * groups // tp
        held = queries.chunk(tp)[rank], keys[group * HEAD_DIM : (group + 1) * HEAD_DIM], router.float()
        assert found == dict(zip(tensors, map(hash_tensor, held), strict=True))


def test_engines_that_join_nothing() -> None:
    """SGLang runs SmolLM3 by transformers' model."""
    tensors = hf_tensors()
    unjoined = shape().model_copy(update={"model_type": "smollm3"})
    assert engine_checksums(tensors.items(), unjoined, 1)[0].keys() == tensors.keys()


def test_an_embedding_that_no_rank_cuts() -> None:
    """SGLang's Gemma 3 has torch's, and norms that keep no copy of 1 + weight."""
    tensors = {"model.embed_tokens.weight": random(VOCAB, HIDDEN), "model.norm.weight": random(HIDDEN)}
    gemma = shape().model_copy(update={"model_type": "gemma3_text", "zero_centered_norms": True})
    assert engine_checksums(tensors.items(), gemma, 2) == [{name: sha(x) for name, x in tensors.items()}] * 2


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("is_joined", [True, False])
def test_delta_nets_are_divided_by_heads_of_keys(tp: int, is_joined: bool) -> None:
    """Queries, keys, values and z each; in one run where the checkpoint has them by heads of keys (Qwen3-Next)."""
    kind = Delta(key_heads=2, value_heads=4, key_dim=3, value_dim=5, conv_size=4)
    qkvz = [random(count, HIDDEN) + i for i, count in enumerate((6, 6, 20, 20))]
    ba = [random(4, HIDDEN) + i for i in range(2)]
    rows = {
        "conv1d.weight": [random(count, 1, 4) + i for i, count in enumerate((6, 6, 20))],
        "A_log": [random(4)],
        "dt_bias": [random(4)],
    }
    norm, out = random(5), random(HIDDEN, 20)
    if is_joined:
        qkvz, ba = [torch.cat(qkvz)], [torch.cat(ba)]
        stored = {"in_proj_qkvz.weight": qkvz[0], "in_proj_ba.weight": ba[0]}
    else:
        stored = {"in_proj_qkv.weight": torch.cat(qkvz[:3]), "in_proj_z.weight": qkvz[3]}
        stored |= {"in_proj_b.weight": ba[0], "in_proj_a.weight": ba[1]}
    stored |= {name: torch.cat(parts) for name, parts in rows.items()} | {"norm.weight": norm, "out_proj.weight": out}
    of, family = "model.layers.0.linear_attn.", "qwen3_next" if is_joined else "qwen3_5_text"
    traits = {"model_type": family, "attention": (kind,), "zero_centered_norms": True}  # but not of this norm
    found = engine_checksums(((of + name, x) for name, x in stored.items()), shape().model_copy(update=traits), tp)
    rows |= {"in_proj_qkvz.weight": qkvz, "in_proj_ba.weight": ba}
    for rank in range(tp):
        held = {name: torch.cat([part.chunk(tp)[rank] for part in parts]) for name, parts in rows.items()}
        held |= {"norm.weight": norm, "out_proj.weight": out.chunk(tp, 1)[rank]}
        assert found[rank] == {of + name: hash_tensor(tensor) for name, tensor in held.items()}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("q_lora_rank", [6, None])
def test_latent_attention(tp: int, q_lora_rank: int | None) -> None:
    """The down projections stand whole, and as one, on every rank; what is made of the latent is split by heads."""
    nope, rope, value, latent = 3, 2, 5, 7
    sizes = {"kv_lora_rank": latent, "qk_head_dim": nope, "qk_pos_emb_head_dim": rope, "v_head_dim": value}
    kind = Latent(q_lora_rank=q_lora_rank, **sizes)
    of = "model.layers.0.self_attn."
    tensors = {
        of + "kv_a_proj_with_mqa.weight": random(latent + rope, HIDDEN),
        of + "kv_a_layernorm.weight": random(latent),
        of + "kv_b_proj.weight": random(HEADS * (nope + value), latent),
        of + "o_proj.weight": random(HIDDEN, HEADS * value),
        "model.layers.0.mlp.gate_proj.weight": random(FFN, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": random(FFN, HIDDEN) + 1,
    }
    queries = {"q_a_proj": (6, HIDDEN), "q_b_proj": (HEADS * (nope + rope), 6)}
    if q_lora_rank is None:
        queries = {"q_proj": (HEADS * (nope + rope), HIDDEN)}
    tensors |= {f"{of}{name}.weight": random(*size) for name, size in queries.items()}
    found = engine_checksums(tensors.items(), shape().model_copy(update={"attention": (kind,)}), tp)
    assert len(found) == tp
    for rank in range(tp):
        heads = [h for h in range(HEADS) if h * tp // HEADS == rank]

        def rows(name: str, width: int, heads: list[int] = heads) -> torch.Tensor:
            return torch.cat([tensors[of + name][h * width : (h + 1) * width] for h in heads])

        ffn = [i for i in range(FFN) if i * tp // FFN == rank]
        wanted = {
            of + "kv_a_layernorm.weight": tensors[of + "kv_a_layernorm.weight"],
            of + "kv_b_proj.weight": rows("kv_b_proj.weight", nope + value),
            of + "o_proj.weight": tensors[of + "o_proj.weight"][
                :, [h * value + i for h in heads for i in range(value)]
            ],
            "model.layers.0.mlp.gate_up_proj.weight": torch.cat(
                [tensors[f"model.layers.0.mlp.{name}_proj.weight"][ffn] for name in ("gate", "up")]
            ),
        }
        down = tensors[of + "kv_a_proj_with_mqa.weight"]
        if q_lora_rank is None:
            wanted |= {of + "q_proj.weight": rows("q_proj.weight", nope + rope), of + "kv_a_proj_with_mqa.weight": down}
        else:
            wanted[of + "q_b_proj.weight"] = rows("q_b_proj.weight", nope + rope)
            both = torch.cat([tensors[of + "q_a_proj.weight"], down])
            wanted[of + "fused_qkv_a_proj_with_mqa.weight"] = both
        assert found[rank] == {name: sha(tensor) for name, tensor in wanted.items()}, rank


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_experts_stand_in_two_tensors(names: tuple[str, str, str]) -> None:
    """Gates over ups of all experts, and their downs; each rank has a part of every expert."""
    kind = Experts(num_experts=3, topk=1, ffn_hidden_size=FFN, norm_topk_prob=True)
    gate, up, down = names
    of = "model.layers.0.mlp.experts"
    tensors = {f"{of}.{i}.{name}.weight": random(FFN, HIDDEN) + i for i in (2, 0, 1) for name in (up, gate)}
    tensors |= {f"{of}.{i}.{down}.weight": random(HIDDEN, FFN) + i for i in (1, 2, 0)}
    found = engine_checksums(tensors.items(), shape().model_copy(update={"mlp": (kind,)}), 2)
    for rank, rows in enumerate((slice(0, 6), slice(6, 12))):
        firsts = [torch.cat([tensors[f"{of}.{i}.{name}.weight"][rows] for name in (gate, up)]) for i in range(3)]
        seconds = [tensors[f"{of}.{i}.{down}.weight"][:, rows] for i in range(3)]
        wanted = {"w13_weight": torch.stack(firsts), "w2_weight": torch.stack(seconds)}
        assert found[rank] == {f"{of}.{name}": sha(tensor) for name, tensor in wanted.items()}


def test_mlps_that_a_cpu_s_engine_pads() -> None:
    """Each rank's part is 8 wide here: of the 12 the first has 8, the second 4 and zeros."""
    tensors = hf_tensors()
    found = engine_checksums(tensors.items(), shape(), 2, mlp_multiple=8)
    layer = "model.layers.0.mlp."
    for rank, zeros in enumerate((0, 4)):
        own = [i for i in range(FFN) if i // 8 == rank]
        rows = [
            torch.cat([tensors[f"{layer}{x}_proj.weight"][own], torch.zeros(zeros, HIDDEN, dtype=torch.bfloat16)])
            for x in ("gate", "up")
        ]
        columns = [tensors[layer + "down_proj.weight"][:, own], torch.zeros(HIDDEN, zeros, dtype=torch.bfloat16)]
        assert found[rank][layer + "gate_up_proj.weight"] == sha(torch.cat(rows))
        assert found[rank][layer + "down_proj.weight"] == sha(torch.cat(columns, dim=1))
    plain = engine_checksums(tensors.items(), shape(), 2)
    assert all(found[0][name] == value for name, value in plain[0].items() if ".mlp." not in name)


def test_parts_in_another_order_and_one_that_never_comes() -> None:
    tensors = hf_tensors()
    backwards = reversed(list(tensors.items()))
    assert engine_checksums(backwards, shape(), 2) == engine_checksums(tensors.items(), shape(), 2)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(AssertionError, match="gate_up_proj"):
        engine_checksums(tensors.items(), shape(), 1)


def test_one_bit_shows_and_the_place_in_memory_does_not() -> None:
    tensor = random(6, 4)
    assert hash_tensor(tensor.T.contiguous().T) == hash_tensor(tensor) == sha(tensor)
    tensors = hf_tensors()
    before = engine_checksums(tensors.items(), shape(), 2)
    tensors["model.layers.0.mlp.up_proj.weight"].view(torch.int16)[FFN - 1, 0] ^= 1
    after = engine_checksums(tensors.items(), shape(), 2)
    assert compare_checksums(before[0], after[0]) == []
    assert compare_checksums(before[1], after[1]) == ["model.layers.0.mlp.gate_up_proj.weight"]
    assert compare_checksums({"a": "1", "b": "2", "c": "3"}, {"a": "1", "c": "4", "d": "5"}) == ["b", "c", "d"]


# By SGLang 0.5.23's own kernel for GPUs, run in Triton's interpreter (TRITON_INTERPRET=1) on the tensors of `counted`.
GPU_HASHES = {
    (1, torch.float32): "3d93a6540b54ef2a",
    (3, torch.bfloat16): "a9d5555cf3b1659c",
    (5, torch.uint8): "b1a65cd4abb4d649",
    (8192, torch.float32): "69c92d01a11a05d0",
    (8193, torch.float32): "464e5f7acc17e27c",
    (1_100_000, torch.float32): "c1b1e89297b53008",
}


def counted(size: int, dtype: torch.dtype) -> torch.Tensor:
    values = (torch.arange(size) * 2654435761 % 1000003).float() / 1000
    return (values.long() % 256).to(dtype) if dtype == torch.uint8 else values.to(dtype)


@pytest.mark.parametrize(("size", "dtype"), GPU_HASHES, ids=str)
def test_the_hash_of_a_gpu_s_tensors(size: int, dtype: torch.dtype) -> None:
    assert hash_words(counted(size, dtype)) == GPU_HASHES[size, dtype]
    assert hash_words(counted(0, dtype)) == "0" * 16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU on this machine")
@pytest.mark.parametrize("size", [1, 8193, 3_000_000])
def test_the_hash_of_a_gpu_s_tensors_on_a_gpu(size: int) -> None:
    sglang = pytest.importorskip("sglang.kernels.ops.memory.gpu_tensor_hash")
    tensor = counted(size, torch.bfloat16).cuda()
    assert hash_words(tensor) == f"{sglang.gpu_tensor_hash(tensor):016x}"
