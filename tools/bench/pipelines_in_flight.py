"""So many requests in flight at once, through the real router and the Buffer's stream.

The engines are paused until all requests have arrived, so nobody needs luck; then they go on, and two batches are
trained. Each request takes two open files of the router, a connection from the client and one to an engine: HTTP/1.1,
which SGLang's servers speak, has one request on a connection at a time. So the limit of open files has to be over twice
the requests; where this process may, it raises the hard limit as well (CAP_SYS_RESOURCE).
"""

from __future__ import annotations

import asyncio
import math
import resource
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from fusionrl.base.open_files import most_open_files, raise_open_files
from fusionrl.plan.open_files import FILES_BESIDE, most_requests
from tools.bench.lengths import Lengths
from tools.bench.pipelines_paced import Row, Setting, opened

_WAIT_S = 300.0


def make_room(count: int) -> int:
    """Raise this process's limit for `count` requests, as far as it may; returns how many requests it is enough for."""
    wanted = 2 * count + FILES_BESIDE
    if wanted > most_open_files():
        with suppress(ValueError, OSError):  # not allowed here
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
    return most_requests(raise_open_files())


def hold(setting: Setting, count: int, model: Path) -> dict[str, Any]:
    """Bring `count` requests in flight, and then end them; returns figures in real seconds."""
    possible = make_room(count)
    reached = min(count, possible)
    batch = math.ceil(reached / 3 / setting.samples)  # admitted are three batches: a version's own and two ahead
    per_engine = math.ceil(reached / setting.engines)
    setting = replace(setting, prompts=batch, weight=1.0, max_running=per_engine, update_s=0.0, push_s=1.0)
    setting = replace(setting, lengths=Lengths(median=200.0, sigma=0.5, longest=28_672))
    flags = {"max_staleness": 2, "admission_lead": 2.0, "max_samples_in_flight": reached}
    with opened(setting, Row("in flight", "async-partial", flags), 2, model) as (run, engines, clock):
        asyncio.run(engines.pause("in_place"))
        start, cpu, most = time.perf_counter(), clock.now(), 0
        with run.open(push=False) as step:
            while (now := int(asyncio.run(engines.report())["in_flight"])) > most or most < reached // 16 * 16:
                most = max(most, now)
                if time.perf_counter() - start > _WAIT_S:
                    break
                time.sleep(0.5)
            filled_s = time.perf_counter() - start
            memory = {
                "buffer_mib": psutil.Process().memory_info().rss / 2**20,
                "router_mib": clock.router.memory_info().rss / 2**20,
            }
            asyncio.run(engines.resume())
            for number in range(2):
                step(number)
            ended_s = time.perf_counter() - start - filled_s
            retries = run.retries()
        used = {name: seconds - cpu[name] for name, seconds in clock.now().items()}
    return {
        "asked": count,
        "possible_by_open_files": possible,
        "in_flight": most,
        "filled_s": filled_s,
        "two_batches_s": ended_s,
        "samples_trained": 2 * setting.batch,
        "requests_sent_again": retries,
        "loop_delay_s": run.probe.largest_s,
        "buffer_cpu_s": used["buffer"],
        "router_cpu_s": used["router"],
        **memory,
    }
