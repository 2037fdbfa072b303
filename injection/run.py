"""The whole of it: clean runs, plans, proofs, records; resumable, and on many cores."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import product, repeat
from pathlib import Path
from typing import Any, Literal, NamedTuple

from filelock import FileLock, Timeout

from dcl.errors import ConfigError
from injection.endpoint import Endpoint, EndpointConfig
from injection.errors import CheckError, ModelError
from injection.manipulator import Manipulator, Rules
from injection.plans import PlanConfig, make_plans
from injection.proof import Prover
from injection.records import FAILED, GROUP, Store, Tally, make_record, tally
from injection.rewriter import LlmManipulator
from injection.scripted import Scripted
from injection.session import Model
from injection.systems import SYSTEMS, find_system
from injection.tasks import Task, own_tasks, read_tasks


@dataclass(frozen=True, kw_only=True)
class ScriptedConfig:
    """Scripted agents."""

    skill: float = 0.6
    """Share of (agent, task) pairs that can be solved without help, 0 to 1."""
    slip: float = 0.6
    """Share of solutions whose first draft holds a slip, 0 to 1."""
    care: float = 0.4
    """Share of (agent, task) pairs where work of others is checked before it is used, 0 to 1."""
    trust: float = 0.0
    """Share of (agent, task) pairs where work that is there is taken over or approved rather than
    done again, 0 to 1."""

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        for name, share in asdict(self).items():
            if not 0 <= share <= 1:
                raise ConfigError(f"scripted.{name}: expected 0 to 1, got {share}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One collection of injected failures."""

    out: str
    """Folder of the records; a folder that exists is continued."""
    systems: tuple[str, ...] = tuple(SYSTEMS)
    """Names of systems."""
    tasks: tuple[str, ...] = ()
    """Published task files; none means the sets that ship."""
    tasks_per_file: int = 0
    """Most tasks of each file, 0 for all."""
    agents: Literal["scripted", "endpoint"] = "scripted"
    """What the agents run on."""
    manipulator: Literal["rules", "endpoint"] = "rules"
    """What rewrites texts."""
    judge: Literal["none", "endpoint"] = "none"
    """What decides on free text that is not the reference word for word; `none` calls it wrong."""
    scripted: ScriptedConfig = field(default_factory=ScriptedConfig)
    """Read where `agents` is `scripted`."""
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    """Read where something runs on an endpoint."""
    plans: PlanConfig = field(default_factory=PlanConfig)
    """What is injected."""
    seed: int = 1
    """Of agents, plans and wording."""
    workers: int = 2
    """Processes for scripted agents, threads for an endpoint, or workers of a cluster; > 0."""

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if self.workers < 1 or self.tasks_per_file < 0:
            raise ConfigError("expected workers > 0 and tasks_per_file >= 0")
        if not self.systems:
            raise ConfigError("systems: expected at least one, got none")
        for name in self.systems:
            find_system(name)

    @property
    def uses_endpoint(self) -> bool:
        """Whether anything runs on the endpoint."""
        return "endpoint" in (self.agents, self.manipulator, self.judge)


@dataclass(frozen=True, slots=True)
class Group:
    """One system on one task.

    Args:
        number: Its place in the order of all.
        system: Name of the system.
        task: The task.
    """

    number: int
    system: str
    task: Task

    @property
    def name(self) -> str:
        """System, benchmark and task."""
        return f"{self.system}/{self.task.benchmark}/{self.task.id}"

    @property
    def key(self) -> str:
        """Name in the ledger and of its lease."""
        return GROUP + hashlib.sha256(self.name.encode()).hexdigest()[:16]


def list_groups(config: RunConfig) -> list[Group]:
    """Every system on every task, in an order that mixes both.

    Without files of tasks, a system that ships with tasks of its own works on these, after all
    others.

    Raises:
        ConfigError: If a file of tasks cannot be read, or none holds a task.
        TraceError: If a record of a file is no task.
    """
    most = config.tasks_per_file or None
    files, names = config.tasks, dict.fromkeys(config.systems)
    tasks = [t for f in files for t in read_tasks(f)[:most]] if files else own_tasks(most)
    if not tasks:
        raise ConfigError(f"tasks: expected tasks in {', '.join(files)}, got none")
    apart = {} if files else {name: place for name in names if (place := _own_folder(name))}
    pairs = [
        *product(_tell_apart(tasks), (name for name in names if name not in apart)),
        *((task, name) for name, place in apart.items() for task in own_tasks(most, place)),
    ]
    return [Group(i, system, task) for i, (task, system) in enumerate(pairs)]


def _own_folder(name: str) -> Path | None:
    """Where the tasks are that a system ships with, if it does."""
    folder: Path | None = getattr(find_system(name), "tasks", None)
    return folder


def _tell_apart(tasks: Sequence[Task]) -> list[Task]:
    """Tasks without repeats; one whose id is taken by another question gets a part of its hash.

    Published files number their tasks each from the start.
    """
    known: dict[tuple[str, str], Task] = {}
    for task in tasks:
        taken = known.setdefault((task.benchmark, task.id), task)
        if taken != task:
            content = repr((task.question, task.answer)).encode()
            task = replace(task, id=f"{task.id}-{hashlib.sha256(content).hexdigest()[:8]}")
            known.setdefault((task.benchmark, task.id), task)
    return list(known.values())


def collect(config: RunConfig, spread: Spread | None = None) -> Tally:
    """Run everything that is not done yet.

    Args:
        config: What to run.
        spread: Where to; None is this machine, `injection.spread.spread_ray` a cluster.

    Returns:
        How many clean runs and plans of the folder ended how.

    Raises:
        BudgetError: If the budget is used up; what is done is kept, and a later call goes on.
    """
    minds_of.cache_clear()  # each collection has a budget of its own
    store = Store(Path(config.out), settings_of(config))
    work_off(_run_group, config, store, spread)
    return tally(store.outcomes())


def settings_of(config: RunConfig) -> dict[str, Any]:
    """What may not change in a folder that is continued, as it decides what its records say.

    More systems and tasks, other workers and budgets are welcome.
    """
    free = {"out", "systems", "tasks", "tasks_per_file", "workers", "endpoint"}
    asked = ("model", "temperature", "rewrite_temperature", "seed", "max_tokens")
    whole = asdict(config)
    wire = {key: whole["endpoint"][key] for key in asked} if config.uses_endpoint else {}
    kept = {key: value for key, value in whole.items() if key not in free}
    return {"kind": type(config).__name__, **kept, "endpoint": wire}


RunGroup = Callable[[Any, Group, Store, dict[str, str]], None]
"""Does what is left of one group; gets the configuration, the store, and the outcomes so far."""


def work_off(
    run_group: RunGroup, config: RunConfig, store: Store, spread: Spread | None = None
) -> None:
    """Do all groups that are not done yet, each under a lease.

    Args:
        run_group: Does one group; a function of a module, as processes are sent it.
        config: What to run.
        store: Of its folder.
        spread: Where to; None is this machine.
    """
    (store.folder / "leases").mkdir(exist_ok=True)
    done = store.outcomes()
    groups = [group for group in list_groups(config) if group.key not in done]
    (spread or spread_local(config))(partial(_hold, run_group), config, groups)


Work = Callable[[RunConfig, Group, bool], bool]
Spread = Callable[[Work, RunConfig, Sequence[Group]], None]


def spread_local(config: RunConfig) -> Spread:
    """Work on this machine: in processes where agents compute, in threads where they wait.

    Another executor is another `Spread`: it calls `work(config, group, wait)` once for each group
    without waiting for groups that others hold, and then again for those that gave False.
    """
    threads = config.uses_endpoint

    def spread(work: Work, config: RunConfig, groups: Sequence[Group]) -> None:
        if config.workers == 1:
            left = [group for group in groups if not work(config, group, False)]
            for group in left:
                work(config, group, True)
            return
        pool = _pool(config.workers, threads)
        try:
            with _uninterrupted():
                made = pool.map(work, repeat(config), groups, repeat(False))
            left = [g for g, ok in zip(groups, made, strict=True) if not ok]
            list(pool.map(work, repeat(config), left, repeat(True)))
            pool.shutdown()
        except BaseException as error:
            # Who leaves waits for no endpoint; the ledger is whole at any moment.
            pool.shutdown(wait=not threads or isinstance(error, Exception), cancel_futures=True)
            raise

    return spread


def _pool(workers: int, threads: bool) -> Executor:
    """Threads, or fresh processes."""
    if threads:
        return ThreadPoolExecutor(workers)
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let processes that are started inside leave Ctrl-C to the one that starts them.

    What they are told to ignore as they start they ignore for good.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are not ours to set
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, even if it was killed.

    A worker of a pool would wait for work for ever.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _hold(run_group: RunGroup, config: RunConfig, group: Group, wait: bool) -> bool:
    """One group under a lease; False if another process holds it and we are not to wait."""
    out = Path(config.out)
    try:
        with FileLock(out / "leases" / group.key, timeout=-1 if wait else 0):
            store = _store(config.out)
            done = store.outcomes()
            if group.key not in done:
                run_group(config, group, store, done)
    except Timeout:
        return False
    return True


def _run_group(config: RunConfig, group: Group, store: Store, done: dict[str, str]) -> None:
    """The clean run of a group and all its plans."""
    model, manipulator, judge = minds_of(config)
    prover = Prover(find_system(group.system), group.task, model, manipulator, judge)
    try:
        right = prover.clean.verdict.right
    except (ModelError, CheckError) as error:
        store.add(FAILED + group.key, "no_clean_run", reason=str(error), group=group.name)
        return
    plans = make_plans(
        config.plans,
        group.system,
        group.name.partition("/")[2],
        prover.clean.run,
        group=group.number,
        seed=config.seed,
    )
    complete = True
    for plan in plans if right else ():
        if plan.id in done:
            continue
        try:
            proof = prover.prove(plan)
        except (ModelError, CheckError) as error:
            complete = False  # says nothing about the plan; the next start tries again
            store.add(FAILED + plan.id, "no_reply", reason=str(error), group=group.name)
            continue
        record = None
        if proof.outcome in ("proved", "benign"):
            record = make_record(
                proof, prover.clean, group.task, model=model.name, manipulator=manipulator.name
            )
        faults = [i.to_dict() for i in plan.injections]
        store.add(
            plan.id, proof.outcome, record, group=group.name, faults=faults, reason=proof.reason
        )
    if complete:
        store.add(group.key, "clean_right" if right else "clean_wrong", group=group.name)


@cache
def _store(out: str) -> Store:
    """The store of this process."""
    return Store(Path(out))


class Minds(NamedTuple):
    """What a run thinks with.

    Args:
        agents: Answers the calls of agents.
        manipulator: Rewrites texts.
        judge: Decides on free text; None leaves it to the checkers.
    """

    agents: Model
    manipulator: Manipulator
    judge: Model | None


@cache
def minds_of(config: RunConfig) -> Minds:
    """What a run thinks with, once for a process."""
    endpoint = Endpoint(config.endpoint) if config.uses_endpoint else None
    scripted = Scripted(config.seed, **asdict(config.scripted))
    return Minds(
        endpoint if endpoint and config.agents == "endpoint" else scripted,
        LlmManipulator(endpoint) if endpoint and config.manipulator == "endpoint" else Rules(),
        endpoint if config.judge == "endpoint" else None,
    )
