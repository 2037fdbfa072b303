"""Groups over a Ray cluster; records, ledger and leases are those of `injection.run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat

from dcl.cluster import connect
from injection.run import Group, RunConfig, Work


def spread_ray(work: Work, config: RunConfig, groups: Sequence[Group]) -> None:
    """Work on all machines of a cluster, `config.workers` groups at a time, one core for each.

    Every machine has to see the folder of the records, with file locks that work across machines.

    Args:
        work: Does one group, as `injection.run.Spread` says.
        config: Its endpoint is shared out, see `share_limits`.
        groups: What is left to do.

    Raises:
        ConfigError: If Ray is not installed, the cluster cannot be joined, or a machine of it does
            not see what this one does.
        DclError: What a group raised.
    """
    if not groups:
        return
    share = share_limits(config)
    with connect() as cluster:
        run = partial(cluster.map, work, workers=config.workers)
        finished = run(repeat(share), groups, repeat(False))
        left = [group for group, done in zip(groups, finished, strict=True) if not done]
        run(repeat(share), left, repeat(True))


def share_limits(config: RunConfig) -> RunConfig:
    """The configuration of one of `config.workers` processes that share an endpoint.

    Budgets and the rate of requests hold for a process; here each gets its part of them. A budget
    of fewer calls or tokens than workers gives each worker one.

    Args:
        config: Of all of them together.
    """
    endpoint = config.endpoint
    budgets = {
        name: max(1, most // config.workers)
        for name in ("budget_calls", "budget_tokens")
        if (most := getattr(endpoint, name))
    }
    rate = endpoint.requests_per_minute / config.workers
    return replace(config, endpoint=replace(endpoint, requests_per_minute=rate, **budgets))
