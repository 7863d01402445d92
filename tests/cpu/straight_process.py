"""A process of its own for `test_straight_decode.py`: SGLang's runner on a CPU, decode steps by both paths.

    echo '[["FOLDER", "float32", {"page_size": 16}]]' | python -m tests.cpu.straight_process

Prints one JSON object a model: what was logged, how often the line's attention was called, how many of the compared
logits differ, which other passes it takes, and what is logged of other engines and models. Each model is in a fork of
this process, which has imported SGLang.
"""

import json
import logging
import os
import sys
from array import array
from types import SimpleNamespace
from typing import Any

from fusionrl.base import cpu_wing
from fusionrl.cpu import kernels, sglang_layers, sglang_patches, straight_decode

PROMPTS = [[5, 9, 17, 3], [7, 2], [1, 4, 8, 30, 12, 6, 19], [11]]
STEPS = 3


def _runner(folder: str, dtype: str, values: dict[str, Any]) -> Any:
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs, ServerArgs

    one_batch.get_tokenizer = lambda *args, **kwargs: None
    args = ServerArgs(
        model_path=folder,
        device="cpu",
        dtype=dtype,
        attention_backend=cpu_wing.ATTENTION_BACKEND,
        sampling_backend="pytorch",
        max_total_tokens=512,
        max_running_requests=8,
        random_seed=1,
        disable_overlap_schedule=True,
        **values,
    )
    ranks = one_batch.SpawnRanks(world_rank=one_batch.spawn_world_rank(args, tp_rank=0, pp_rank=0), gpu_id=0)
    one_batch.publish(args, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    return one_batch.load_model(args, PortArgs.init_new(args), 0, 0)[0].torch_runner


def _requests() -> list[Any]:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    requests = []
    for number, prompt in enumerate(PROMPTS):
        request = Req(
            rid=number,
            origin_input_text="",
            origin_input_ids=array("q", prompt),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=16),
        )
        request.full_untruncated_fill_ids = request.origin_input_ids
        request.logprob_start_len = -1
        request.extend_end = len(prompt)
        requests.append(request)
    return requests


def compare(folder: str, dtype: str, values: dict[str, Any]) -> dict[str, Any]:
    """Decode by the line and by SGLang's layers; then once more with other weights."""
    import torch
    from sglang.benchmark import one_batch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    straight_decode.logger.addHandler(handler)
    straight_decode.logger.setLevel("INFO")
    runner = _runner(folder, dtype, values)
    model = runner.model.model
    line = vars(model).get("forward")
    found = {"told": list(told), "num_attended": 0, "unequal": 0}
    attend_new = kernels.attend_new

    def counted(*args: Any, **kwargs: Any) -> Any:
        found["num_attended"] += 1
        return attend_new(*args, **kwargs)

    kernels.attend_new = counted
    straight = line.__self__
    with torch.no_grad():
        tokens, _, batch = one_batch.extend(_requests(), runner)
        found["num_of_prompts"] = found["num_attended"]
        for step in range(STEPS):
            batch.input_ids = tokens.to(torch.int64)
            batch.prepare_for_decode()
            inputs = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
            usual, straight._usual = straight._usual, _refuse
            by_line = runner.forward(inputs).logits_output.next_token_logits.clone()
            straight._usual, model.forward = usual, usual
            output = runner.forward(inputs).logits_output
            model.forward = line
            found["unequal"] += not torch.equal(by_line, output.next_token_logits)
            tokens = runner.sample(output, inputs)
            if step == 0:  # a push may put other tensors into the modules
                for layer in model.layers:
                    changed = layer.mlp.down_proj.weight * 1.5
                    layer.mlp.down_proj.weight = torch.nn.Parameter(changed, requires_grad=False)
        found["also_takes"] = _other_passes(straight, inputs)
    told.clear()
    _install_elsewhere(runner, straight._backend)
    return found | {"elsewhere": told}


def _install_elsewhere(runner: Any, backend: Any) -> None:
    """Try engines with other settings, a model of another class, and one whose layers have hooks."""
    arguments, model = runner.server_args, runner.model
    assert all(hasattr(arguments, name) for name in straight_decode._OFF), "SGLang has another name"
    usual = {"model": model, "server_args": SimpleNamespace(), "decode_attention_backend_str": None}
    usual["decode_attention_backend_str"] = runner.decode_attention_backend_str
    others = [{"server_args": SimpleNamespace(**{name: True})} for name in (*straight_decode._OFF, "tp_size")]
    others[-1]["server_args"].tp_size = 2
    others += [{"decode_attention_backend_str": "torch_native"}, {"model": SimpleNamespace(model=SimpleNamespace())}]
    for values in others:
        assert not straight_decode.install(SimpleNamespace(**usual | values), backend)  # type: ignore[arg-type]
    model.model.layers[0].mlp.register_forward_hook(lambda *args: None)
    assert not straight_decode.install(SimpleNamespace(**usual), backend)  # type: ignore[arg-type]


def _other_passes(straight: Any, inputs: Any) -> list[str]:
    """Passes that the line takes, of some that are none of its own but for the first one."""
    import torch

    count = inputs.positions.numel()
    positions, gaps = inputs.positions, torch.zeros(2 * count, dtype=torch.int64)[::2]
    pool, model = straight._backend.token_to_kv_pool, straight.model
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "a decode step": (inputs, {}),
        "drafts": (inputs, {"spec_info": object()}),
        "an encoder": (inputs, {"encoder_lens": gaps}),
        "slots with gaps": (inputs, {"out_cache_loc": gaps}),
        "short lengths": (inputs, {"seq_lens": inputs.seq_lens.int()}),
        "layers that are kept": (model, {"layers_to_capture": [0]}),
        "a quantised cache": (pool, {"store_dtype": torch.uint8}),
        "keys with gaps": (pool, {"k_buffer": [buffer[::2] for buffer in pool.k_buffer]}),
        "angles of another type": (straight._layers[0].angles, {"cos_sin_cache": torch.zeros(4, 4).double()}),
    }
    taken = []
    for name, (owner, values) in cases.items():
        before = {key: getattr(owner, key) for key in values}
        for key, value in values.items():
            setattr(owner, key, value)
        straight._plain_pool = None
        if straight._is_ours(positions, inputs):
            taken.append(name)
        for key, value in before.items():
            setattr(owner, key, value)
    with torch.enable_grad():
        taken += ["gradients"] * straight._is_ours(positions, inputs)
    taken += ["three positions a token"] * straight._is_ours(positions.expand(3, count), inputs)
    return taken + ["nothing"] * straight._is_ours(positions[:0], inputs)


def _refuse(*args: object) -> None:
    raise AssertionError("a decode step went by SGLang's layers")


def main() -> None:
    """Print the comparisons."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ["SGLANG_FORCE_FUSED_OP_BACKEND"] = "torch"
    cpu_wing.install_stand_ins()
    sglang_patches.register_attention()
    sglang_patches.name_device()
    sglang_layers.register_layers()
    import sglang.benchmark.one_batch  # noqa: F401  # before the forks

    for folder, dtype, values in json.load(sys.stdin):
        child = os.fork()
        if child == 0:
            print(json.dumps(compare(folder, dtype, values)), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{folder} {dtype} {values}: failed")


if __name__ == "__main__":
    main()
