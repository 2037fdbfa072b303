"""Natural failures: runs that go wrong with nothing injected, and the step that decided them.

Injected faults announce themselves more than natural ones do. Here systems just run, with other
luck for every seed; a run that ends wrong is repeated with one call at a time put right, from the
first on, and the earliest call whose correction makes the run right is its label
(`injection.proof`, AgenTracer, arXiv 2509.03312). What no single correction saves is counted and
not labelled.

How a scripted agent errs is known: it takes down something other than what it reasons from, plans
other than the task says, passes or refuses work wrongly, or ends the run early. So the mode follows
from what the call was for (`name_mode`). Of what goes on in a language model nothing is known, and
its records have no mode.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from dcl.errors import ConfigError
from dcl.splits import split_of
from dcl.taxonomy import ErrorMode
from injection.checkers import Verdict, check
from injection.discussion import PLAN_LINE
from injection.endpoint import Endpoint, EndpointConfig, Seeded
from injection.errors import CheckError, ModelError
from injection.proof import Decisive, find_decisive_step
from injection.records import FAILED, GROUP, LOCATED, VERSION, Store, list_turns
from injection.run import Group, RunConfig, settings_of, work_off
from injection.scripted import SCRIPTED, Scripted
from injection.session import Call, Model, Reply, Run, run_system
from injection.surfing import FINISHED
from injection.systems import find_system
from injection.systems.experts import END
from injection.tasks import Task

_PLANNING = frozenset({"plan", "facts", "recruit", "survey"})
_CHECKING = frozenset({"critique", "evaluate", "decide", "rank", "final", "close", "conclude"})


@dataclass(frozen=True, kw_only=True)
class NaturalConfig(RunConfig):
    """One collection of natural failures; `plans` and `manipulator` are not read."""

    seeds: int = 8
    """Runs of every system on every task, each with other luck; > 0. An endpoint gets the seed."""
    search: Literal["scan", "bisect"] = "scan"
    """How the step is looked for; see `injection.proof.find_decisive_step`."""

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        super().__post_init__()
        if self.seeds < 1:
            raise ConfigError(f"seeds: expected at least 1, got {self.seeds}")


@dataclass(frozen=True, slots=True)
class Told:
    """A model that is told the right answer: what a correction by the same model looks like.

    Args:
        model: The model.
        answer: The right answer.
    """

    model: Model
    answer: str

    @property
    def name(self) -> str:
        """What records call it."""
        return f"{self.model.name}, told the answer"

    def __call__(self, call: Call) -> Reply:
        """Answer one call.

        Raises:
            ModelError: If there is no usable answer.
        """
        hint = f"The right answer of the task is {self.answer}. Do your part so that it is reached."
        return self.model(call.with_prompt(f"{call.prompt}\n{hint}"))


def collect_natural(config: NaturalConfig) -> Counter[str]:
    """Run everything that is not done yet.

    Args:
        config: What to run.

    Returns:
        How many runs of the folder ended how: `right`; `located` gives a record; `undecided` means
        that no single correction makes the run right; `no_reply` that a model failed.

    Raises:
        BudgetError: If the budget is used up; what is done is kept, and a later call goes on.
    """
    _endpoint.cache_clear()  # each collection has a budget of its own
    store = Store(Path(config.out), settings_of(config))
    work_off(_run_group, config, store)
    outcomes = store.outcomes()
    return Counter(
        outcome
        for id, outcome in outcomes.items()
        if not id.startswith(GROUP) and id.removeprefix(FAILED) not in outcomes.keys() - {id}
    )


def name_mode(phase: str, text: str) -> ErrorMode:
    """The mode of an error that a scripted agent made by itself.

    Args:
        phase: What the call was for.
        text: What the agent said.
    """
    if phase == "steer" and FINISHED in text:
        return ErrorMode.FM_3_1
    if phase in _CHECKING or (phase == "discuss" and ("gree]" in text or END in text)):
        return ErrorMode.FM_3_3
    if phase in _PLANNING or (phase == "discuss" and PLAN_LINE.search(text)):
        return ErrorMode.FM_1_1
    return ErrorMode.FM_2_6


def make_natural_record(
    name: str,
    group: Group,
    run: Run,
    verdict: Verdict,
    found: Decisive,
    *,
    model: str,
    corrector: str,
    seed: int,
) -> dict[str, Any]:
    """The record of one natural failure.

    Args:
        name: Of the run, in the ledger.
        group: System and task.
        run: The run that failed.
        verdict: What the checker said of it.
        found: The step that decided it.
        model: Name of the model that the agents run on.
        corrector: Name of the model that corrects.
        seed: Of the run.
    """
    task = group.task
    event = run.events[found.step - 1]
    mode = name_mode(event.phase, event.content) if model == SCRIPTED else None
    label = {
        "agent_name": found.agent,
        "error_type": None if mode is None else mode.value,
        "step": found.step,
    }
    return {
        "id": f"{task.benchmark}_{model}_{group.system}_{task.id}_{name}",
        "metadata": {
            "framework": group.system,
            "benchmark": task.benchmark,
            "model": model,
            "num_agents": len({call.agent for call in run.calls}),
            "task_type": task.domain,
            "source": "injection",
            "outcome": "failure",
            "question_hash": task.question_hash,
            "split": split_of(task.question_hash),
            "verified": True,
        },
        "input": {
            "query": task.question,
            "conversation_history": list_turns(run),
            "final_output": run.answer,
        },
        "output": {"faulty_agents": [label]},
        "ground_truth": {"correct_answer": task.answer, "is_normal_sample": False},
        "injection": {
            "version": VERSION,
            "plan": name,
            "seed": seed,
            "attacks": [],
            "decisive": asdict(found),
            "corrector": corrector,
            "verdicts": {"faulty": verdict.to_dict()},
            "prompt_digests": [event.digest for event in run.events],
            "cost": asdict(run.cost),
        },
    }


def _run_group(config: NaturalConfig, group: Group, store: Store, done: Mapping[str, str]) -> None:
    """One system on one task with every seed."""
    complete = True
    for seed in range(config.seed, config.seed + config.seeds):
        name = hashlib.sha256(f"{group.name}/{seed}".encode()).hexdigest()[:16]
        if name in done:
            continue
        try:
            outcome, record = _run_seed(config, group, name, seed)
        except (ModelError, CheckError) as error:
            complete = False  # the next start tries again
            store.add(FAILED + name, "no_reply", reason=str(error), group=group.name)
            continue
        store.add(name, outcome, record, group=group.name)
    if complete:
        store.add(group.key, "complete", group=group.name)


def _run_seed(
    config: NaturalConfig, group: Group, name: str, seed: int
) -> tuple[str, dict[str, Any] | None]:
    """What became of one run, and its record if its step was found."""
    model, corrector, judge = _minds(config, group.task, seed)
    system, task = find_system(group.system), group.task
    run = run_system(system, task.question, model)
    verdict = check(task, run.answer, judge=judge)
    if verdict.right:
        return "right", None
    found = find_decisive_step(system, task, model, corrector, judge=judge, search=config.search)
    if found is None:
        return "undecided", None
    return LOCATED, make_natural_record(
        name, group, run, verdict, found, model=model.name, corrector=corrector.name, seed=seed
    )


def _minds(config: NaturalConfig, task: Task, seed: int) -> tuple[Model, Model, Model | None]:
    """What the agents run on, what corrects them, and what judges free text."""
    judge = _endpoint(config.endpoint) if config.judge == "endpoint" else None
    if config.agents == "endpoint":
        model = Seeded(_endpoint(config.endpoint), seed)
        return model, Told(model, task.answer), judge
    scripted = Scripted(seed, **asdict(config.scripted))
    return scripted, replace(scripted, skill=1.0, slip=0.0, care=1.0, trust=0.0), judge


@cache
def _endpoint(config: EndpointConfig) -> Endpoint:
    """The endpoint, once for a process: all seeds share its limits."""
    return Endpoint(config)
