"""Open files of a run's router, which has the most of all processes, and the limit of this machine."""

from fusionrl.base.process import most_open_files
from fusionrl.config.config import Config
from fusionrl.config.run_parts import uses_engines
from fusionrl.plan.plan import Plan

FILES_BESIDE = 200
"""Files of the router without its connections for requests: libraries, logs, health checks."""


def most_requests(open_files: int) -> int:
    """Return how many requests may be under way: each is a connection from the client and one to an engine."""
    return max(0, (open_files - FILES_BESIDE) // 2)


def samples_in_flight(config: Config, plan: Plan) -> int:
    """Return how many samples may be under way at once, by flags and bound."""
    knobs, rollout = plan.knobs, config.rollout
    if knobs is not None:
        groups = int((1 + knobs.lead) * knobs.groups_per_version) + knobs.spare_groups
        return min(knobs.max_samples_in_flight, groups * knobs.samples_per_group)
    groups = max(rollout.rollout_batch_size or 0, rollout.over_sampling_batch_size or 0)
    return min(rollout.sglang_server_concurrency * plan.num_engines, groups * rollout.n_samples_per_prompt)


def open_file_warnings(config: Config, plan: Plan) -> list[str]:
    """A text where more samples may be under way than the router has open files for."""
    if not uses_engines(config) or not plan.num_engines:
        return []
    limit, samples = most_open_files(), samples_in_flight(config, plan)
    if samples <= most_requests(limit):
        return []
    return [
        f"{samples} samples may be in flight, and each takes two open files of the router; this machine allows it"
        f" {limit}, enough for {most_requests(limit)}: raise the hard limit (ulimit -Hn) to"
        f" {2 * samples + FILES_BESIDE}, or give --sglang-server-concurrency"
        f" {max(1, most_requests(limit) // plan.num_engines)}"
    ]
