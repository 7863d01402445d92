"""Hooks of the end-to-end tests: what a user would plug in."""

from typing import Any


async def partial_credit(args: Any, sample: Any, **kwargs: Any) -> float:
    """1 for the right answer, else up to 0.5 for how many characters are digits."""
    if sample.response.strip() == sample.label:
        return 1.0
    return 0.5 * sum(c.isdigit() for c in sample.response) / max(1, len(sample.response))


async def hangs(args: Any, sample: Any, **kwargs: Any) -> float:
    """As `partial_credit`; hangs while there is the file that FUSIONRL_TEST_FILE names."""
    import asyncio
    import os

    while os.path.exists(os.environ["FUSIONRL_TEST_FILE"]):
        await asyncio.sleep(0.1)
    return await partial_credit(args, sample)


async def fails_late(args: Any, sample: Any, **kwargs: Any) -> float:
    """As `partial_credit`; raises at the sample that FUSIONRL_TEST_SAMPLE names, and at later ones."""
    import os

    if sample.index >= int(os.environ.get("FUSIONRL_TEST_SAMPLE", 10**9)):
        raise KeyError("answer")
    return await partial_credit(args, sample)


async def tells_its_secrets(args: Any, sample: Any, **kwargs: Any) -> float:
    """As `partial_credit`; what this process has of secrets goes into the file that FUSIONRL_TEST_FILE names."""
    import json
    import os
    from pathlib import Path

    names = ("FUSIONRL_ROUTER_KEY", "OPENAI_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "RAY_AUTH_TOKEN")
    file = Path(os.environ["FUSIONRL_TEST_FILE"])
    if not file.exists():
        file.with_suffix(".new").write_text(json.dumps({name: os.environ.get(name) for name in names}))
        file.with_suffix(".new").rename(file)
    return await partial_credit(args, sample)


async def late(args: Any, sample: Any, sampling_params: Any) -> Any:
    """The default answer; while steps 1 to 3 are the newest in metrics.jsonl it waits, for two minutes at most."""
    import asyncio
    import time

    from fusionrl.plugin_api import generate

    deadline = time.monotonic() + 120
    while 1 <= _newest_step(args.run_dir) <= 3 and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    return await generate(args, sample, sampling_params)


async def spans_a_push(args: Any, sample: Any, sampling_params: Any) -> Any:
    """Sample eight tokens; two answers wait then for a push; sample the rest."""
    import asyncio
    import time

    from fusionrl.plugin_api import begin, generate_turn

    if not sample.response_length:
        begin(args, sample)
        await generate_turn(args, sample, sampling_params, longest=8)
        deadline = time.monotonic() + 120
        is_held = sample.index in (0, 32) and sample.status != type(sample).Status.COMPLETED
        while is_held and _newest_step(args.run_dir) <= sample.weight_versions[-1] and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
    if sample.status != type(sample).Status.COMPLETED:
        await generate_turn(args, sample, sampling_params)
    return sample


async def overlong_ahead(args: Any, sample: Any, sampling_params: Any) -> Any:
    """Sample eight more tokens for a prompt of this rollout; up to 400 for one of the next, so that its end cuts it."""
    from fusionrl.plugin_api import generate

    is_ahead = sample.index // 32 > args.rollout_id
    most = 400 if is_ahead else sample.response_length + 8
    return await generate(args, sample, dict(sampling_params, max_new_tokens=most, ignore_eos=True))


def _newest_step(run_dir: str) -> int:
    import re
    from pathlib import Path

    path = Path(run_dir) / "metrics.jsonl"
    rows = [line for line in path.read_text().splitlines() if '"train/loss"' in line] if path.is_file() else []
    return max((int(step) for row in rows for step in re.findall(r'"step": ?(\d+)', row)), default=0)


def waits_or_fails(args: Any, rollout_id: int, step_id: int, *_: Any) -> None:
    """Before a training step: while the file of FUSIONRL_TEST_FILE exists, wait from the eighth rollout on, and in the
    sixth and seventh until a checkpoint's tensors are written, which the next step completes; raise at the rollout and
    the optimizer step of FUSIONRL_TEST_FAILS_AT."""
    import os
    import time
    from pathlib import Path

    deadline = time.monotonic() + 120
    hold = os.environ.get("FUSIONRL_TEST_FILE", "")
    while rollout_id >= 5 and hold and os.path.exists(hold) and time.monotonic() < deadline:
        if rollout_id < 7 and any(Path(args.run_dir, "checkpoints").rglob("*.distcp")):
            break
        time.sleep(0.05)
    if os.environ.get("FUSIONRL_TEST_FAILS_AT") == f"{rollout_id} {step_id}":
        raise KeyError("no such column")


def takes_its_time(*_: Any) -> None:
    """Wait before a training step for as long as FUSIONRL_TEST_WAIT_S says."""
    import os
    import time

    time.sleep(float(os.environ.get("FUSIONRL_TEST_WAIT_S", "0")))


async def never(args: Any, sample: Any, **kwargs: Any) -> float:
    """A reward that does not find the answer in this form, and has a bug that shows in the fourth rollout of 32."""
    if sample.index >= 3 * 32:
        raise KeyError("answer")
    return float(sample.response == f"The answer is {sample.label}.")


def soon_keyless_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """A synchronous rollout function with plain lists, as written for slime; rewards are left to the caller.

    From the second rollout on its client knows nothing of keys.
    """
    import requests

    from fusionrl.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(args.hf_checkpoint)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    groups = data_source.get_samples(args.rollout_batch_size)
    for group in groups:
        for sample in group:
            prompt_ids = tokenizer.encode(sample.prompt, add_special_tokens=False)
            answer = requests.post(
                url,
                json={
                    "input_ids": prompt_ids,
                    "sampling_params": {"max_new_tokens": args.rollout_max_response_len, "temperature": 1.0},
                    "return_logprob": True,
                },
                headers={} if rollout_id else {"Authorization": f"Bearer {args.api_key}"},
                timeout=60,
            ).json()
            logprobs = answer["meta_info"]["output_token_logprobs"]
            new_tokens = [item[1] for item in logprobs]
            sample.tokens = prompt_ids + new_tokens
            sample.response_length = len(new_tokens)
            sample.rollout_log_probs = [item[0] for item in logprobs]
            sample.response = answer["text"]
            sample.status = sample.Status.COMPLETED
    return groups


async def two_turns(args: Any, sample: Any, sampling_params: Any) -> Any:
    """The model, a tool's answer, the model again."""
    from fusionrl.rollout.agent import append_text, begin
    from fusionrl.rollout.sglang_rollout import generate_turn

    begin(args, sample)
    half = dict(sampling_params, max_new_tokens=sampling_params["max_new_tokens"] // 2)
    await generate_turn(args, sample, half)
    if append_text(args, sample, sampling_params, "=42 "):
        await generate_turn(args, sample, sampling_params)
    return sample


async def hostile_generate(args: Any, sample: Any, sampling_params: Any) -> Any:
    """The model's tokens, but the text of a program that cheats or escapes, one after the other."""
    from fusionrl.plugin_api import generate

    sample = await generate(args, sample, sampling_params)
    programs = hostile_programs()
    source, sample.label = programs[sample.index % len(programs)]
    sample.response = f"```python\n{source}\n```"
    sample.status = sample.Status.COMPLETED
    return sample


def hostile_programs() -> list[tuple[str, Any]]:
    """(program, label): of the cheats, with the forms of labels in turn, and of the escapes every fifth, and those at
    the cost of the whole machine. All of them: tests/rewards/test_code_cheats.py, tests/sandbox/test_escapes.py."""
    import itertools
    import sys
    from pathlib import Path

    sys.path.append(str(Path(__file__).parents[2]))
    from tests.rewards.cheats import CHEATS, LABELS
    from tests.sandbox.escapes import ESCAPES, program

    names = ("label", "folder", "source", "key", "unix", "abstract", "mark")
    targets = dict.fromkeys(names, "/etc/passwd") | {"pid": 1, "tcp": ["127.0.0.1", 1], "uid": 0}
    cheats = list(zip(CHEATS.values(), itertools.cycle(LABELS.values()), strict=False))
    worst = ("fill the disk", "have a hundred processes", "leave a process behind", "signal the launcher")
    escapes = [escape for number, escape in enumerate(ESCAPES) if number % 5 == 0 or escape.name in worst]
    return cheats[::5] + [(program(escape, targets), LABELS["input"]) for escape in escapes]


async def sevens_or_others(args: Any, sample: Any, **kwargs: Any) -> float:
    """How many characters are sevens, for the adapter of this name; else how many are other digits."""
    response = sample.response
    wanted = sum((c == "7") if sample.adapter == "sevens" else (c.isdigit() and c != "7") for c in response)
    return wanted / max(1, len(response))


def strikes(args: Any, rollout_id: int, step_id: int, *_: Any) -> None:
    """Before a training step: send this rank a signal, once, as FUSIONRL_TEST_STRIKES says: "SIGKILL 1 2 0" strikes
    rank 1 in rollout 2 before its first optimizer step. "DROPS" lets the kernel drop what other ranks send to it."""
    import os
    import signal
    from pathlib import Path

    import torch.distributed as dist

    for strike in filter(None, os.environ.get("FUSIONRL_TEST_STRIKES", "").split(",")):
        name, *place = strike.split()
        struck = Path(args.run_dir, f"struck {strike}")
        if place == [str(dist.get_rank()), str(rollout_id), str(step_id)] and not struck.exists():
            struck.touch()
            if name == "DROPS":
                _drop_packets_of_ranks()
            else:
                os.kill(os.getpid(), getattr(signal, name))


def _drop_packets_of_ranks() -> None:
    """Give each of this process's connections to other trainers a filter that no packet passes, acknowledgements
    neither: as when the cable between them is cut, neither end gets an error, and Ray's connections stay."""
    import ctypes
    import os
    import socket

    import psutil

    own, trainers = psutil.Process(), [p for p in psutil.process_iter(["name"]) if "PolicyWorker" in p.info["name"]]
    there = {c.laddr for p in trainers if p.pid != own.pid for c in p.net_connections("tcp")}
    drop = ctypes.create_string_buffer(bytes([6, 0, 0, 0, 0, 0, 0, 0]))  # one instruction of BPF: return 0 bytes
    program = bytes(ctypes.c_uint64(1)) + bytes(ctypes.c_uint64(ctypes.addressof(drop)))
    cut = [connection.fd for connection in own.net_connections("tcp") if connection.raddr in there]
    assert cut, "ranks are connected"
    for fd in cut:
        with socket.socket(fileno=os.dup(fd)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER


def has_lost_its_device(args: Any) -> None:
    """When a rank starts: end it where FUSIONRL_TEST_LOST is its rank, and it was struck before."""
    import os
    import signal
    from pathlib import Path

    import torch.distributed as dist

    if os.environ.get("FUSIONRL_TEST_LOST") == str(dist.get_rank()) and list(Path(args.run_dir).glob("struck *")):
        os.kill(os.getpid(), signal.SIGKILL)
