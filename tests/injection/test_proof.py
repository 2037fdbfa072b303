from __future__ import annotations

import pytest
from worlds import STORY, Parrot, prover, story_task, task_named

from dcl.taxonomy import MODES, ErrorMode
from injection.errors import AttackError, ModelError
from injection.manipulator import Attack, Injection, Rules, Strategy
from injection.plans import Plan, PlanConfig, make_plans, suitability
from injection.proof import find_decisive_step
from injection.scripted import Scripted
from injection.session import Call, Reply, run_system
from injection.systems import SYSTEMS, Debate, MacNet

CORRUPT: Strategy = "response_corruption"
INJECT: Strategy = "prompt_injection"
ABLE = {"skill": 1.0, "slip": 0.0, "care": 0.0}


def plan(*injections: Injection, system: str = "llm_debate") -> Plan:
    return Plan(system, "GSM8K/story", injections, 1)


def test_a_fault_that_breaks_the_run_is_proved_by_taking_it_out() -> None:
    prove = prover(Debate(), story_task(), **ABLE)
    proof = prove.prove(plan(Injection("Aggregator", ErrorMode.FM_2_6, CORRUPT, 0)))
    assert proof.outcome == "proved"
    assert proof.minimal == ((0,),)
    assert proof.faulty is not None
    assert not proof.faulty.verdict.right
    assert [(r.removed, r.right) for r in proof.replays] == [((0,), True)]
    (firing,) = proof.faulty.firings[0]
    assert firing.call == 6
    assert firing.before != firing.after
    assert prove.clean.run.events[6].content == firing.before


def test_a_fault_that_is_outvoted_is_not_labelled() -> None:
    prove = prover(Debate(), story_task(), **ABLE)
    assert (
        prove.prove(plan(Injection("Assistant1", ErrorMode.FM_2_6, CORRUPT, 1))).outcome
        == "still_right"
    )


def test_two_faults_that_only_break_the_run_together_are_both_to_blame() -> None:
    prove = prover(Debate(), story_task(), **ABLE)
    both = plan(
        Injection("Assistant1", ErrorMode.FM_3_1, CORRUPT, 1),
        Injection("Assistant2", ErrorMode.FM_3_1, CORRUPT, 1),
    )
    proof = prove.prove(both)
    assert proof.minimal == ((0,), (1,))
    assert proof.decisive == {0, 1}


def test_a_fault_that_does_not_matter_is_told_from_the_one_that_does() -> None:
    prove = prover(Debate(), story_task(), **ABLE)
    proof = prove.prove(
        plan(
            Injection("Assistant1", ErrorMode.FM_2_4, CORRUPT, 0),
            Injection("Aggregator", ErrorMode.FM_3_1, CORRUPT, 0),
        )
    )
    assert proof.outcome == "proved"
    assert proof.decisive == {1}


def test_faults_that_each_suffice_must_all_be_taken_out() -> None:
    prove = prover(MacNet("chain"), story_task(), **ABLE)
    proof = prove.prove(
        plan(
            Injection("Node3", ErrorMode.FM_2_6, CORRUPT),
            Injection("Node3", ErrorMode.FM_1_1, INJECT),
        )
    )
    assert proof.minimal == ((0, 1),)
    assert {replay.removed: replay.right for replay in proof.replays} == {
        (0,): False,
        (1,): False,
        (0, 1): True,
    }


def test_a_run_that_was_wrong_anyway_proves_nothing() -> None:
    prove = prover(Debate(), story_task(), skill=0.0, slip=0.0)
    assert (
        prove.prove(plan(Injection("Aggregator", ErrorMode.FM_2_6, CORRUPT))).outcome
        == "clean_wrong"
    )


class Keep:
    """A manipulator that gives every text back as it was, but for blanks."""

    name = "keep"

    def inject(self, prompt: str, mode: object, scene: object) -> str:
        return prompt + " "

    corrupt = inject

    def rephrase(self, reply: str, scene: object) -> str:
        return reply


@pytest.mark.parametrize("strategy", [CORRUPT, INJECT])
def test_an_attack_that_changes_nothing_is_never_labelled(strategy: str) -> None:
    prove = prover(Debate(), story_task(), **ABLE)
    prove.manipulator = Keep()
    proof = prove.prove(plan(Injection("Aggregator", ErrorMode.FM_2_6, strategy)))  # type: ignore[arg-type]
    assert (proof.outcome, proof.reason) == (
        "no_attack",
        "Aggregator: the manipulator left the text as it was",
    )
    assert prove.prove(plan(Injection("Aggregator", None, CORRUPT))).outcome == "no_attack"


def test_an_attack_that_never_fires_is_never_labelled() -> None:
    prove = prover(Debate(), story_task(), **ABLE)
    proof = prove.prove(plan(Injection("Assistant1", ErrorMode.FM_2_6, CORRUPT, 7)))
    assert proof.outcome == "no_attack"
    assert "number 7 never took place" in proof.reason
    with pytest.raises(AttackError, match="any never took place"):
        Attack(Injection("Nobody", ErrorMode.FM_1_1, CORRUPT), Rules(), "math", 1).verify()


class Stubborn:
    """Answers by the number of the call, whatever it is asked; fails from some call on."""

    name = "stubborn"

    def __init__(self, last: int = 99) -> None:
        self.last = last

    def __call__(self, call: Call) -> Reply:
        if call.index >= self.last:
            raise ModelError("no reply")
        return Reply(
            "Answer: 211" if "Working on it" in call.prompt or call.index < 6 else "Answer: 5"
        )


def test_an_agent_that_resists_is_never_labelled() -> None:
    class Fickle(Parrot):
        """Right the first time round, wrong ever after, attacked or not."""

        def __call__(self, call: Call) -> Reply:
            self.calls.append(call)
            return Reply("Answer: 211" if len(self.calls) <= 7 else "Answer: 5")

    prove = prover(Debate(), story_task())
    prove.model = Fickle()
    proof = prove.prove(plan(Injection("Aggregator", ErrorMode.FM_2_6, INJECT)))
    assert proof.outcome == "resisted"


def test_a_failed_call_is_no_failure_of_the_system() -> None:
    prove = prover(Debate(), story_task())
    prove.model = Stubborn(last=3)
    with pytest.raises(ModelError):
        prove.prove(plan(Injection("Aggregator", ErrorMode.FM_2_6, CORRUPT)))


def test_a_benign_rewrite_is_a_negative_only_if_the_run_stays_right() -> None:
    prove = prover(Debate(), story_task(), **ABLE)
    proof = prove.prove(plan(Injection("Aggregator", None, CORRUPT, 0)))
    assert proof.outcome == "benign"
    assert proof.decisive == frozenset()


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_proof_of_every_system_stands(name: str) -> None:
    prove = prover(SYSTEMS[name], task_named("gsm8k-3"))
    if not prove.clean.verdict.right:
        return
    plans = make_plans(PlanConfig(per_task=28), name, "t", prove.clean.run, group=0, seed=3)
    for made in plans:
        proof = prove.prove(made)
        if proof.outcome != "proved":
            continue
        assert proof.faulty is not None
        assert not proof.faulty.verdict.right
        for subset in proof.minimal:
            assert prove.attack(made, without=subset).verdict.right
        for firings in proof.faulty.firings:
            assert firings
            assert all(firing.before.split() != firing.after.split() for firing in firings)


def test_plans_are_balanced_and_the_same_every_time() -> None:
    runs = {name: prover(SYSTEMS[name], story_task()).clean.run for name in SYSTEMS}
    config = PlanConfig(per_task=8, benign=0, max_faults=3)
    plans = []
    for group in range(126):
        name = list(SYSTEMS)[group % 9]
        plans.append(make_plans(config, name, f"t{group}", runs[name], group=group, seed=1))
    again = make_plans(config, list(SYSTEMS)[5], "t5", runs[list(SYSTEMS)[5]], group=5, seed=1)
    assert plans[5] == again
    flat = [made for group in plans for made in group]
    assert len({made.id for made in flat}) == len(flat) == 1008
    first = [made.injections[0] for made in flat]
    for mode in MODES:
        assert sum(injection.mode is mode for injection in first) == 72
    for strategy in (INJECT, CORRUPT):
        assert sum(injection.strategy == strategy for injection in first) == 504
    assert all(len({i.agent for i in made.injections}) == len(made.injections) for made in flat)


def test_a_mode_is_aimed_where_it_can_show() -> None:
    run = prover(Debate(), story_task(), skill=1.0, slip=1.0).clean.run
    first, later = run.calls[0], run.calls[3]
    texts = [event.content for event in run.events]
    assert suitability(ErrorMode.FM_2_5, first, texts[0]) == 0
    assert suitability(ErrorMode.FM_2_5, later, texts[3]) == 1
    assert suitability(ErrorMode.FM_3_2, first, texts[0]) == 2
    assert suitability(ErrorMode.FM_3_2, first, "Answer: 1") == 0


def test_the_decisive_step_of_a_natural_failure_is_the_earliest_that_helps() -> None:
    lost = Scripted(1, skill=0.0, slip=0.0)
    able = Scripted(1, skill=1.0, slip=0.0)
    system = MacNet("chain", nodes=3)
    scanned = find_decisive_step(system, story_task(), lost, able)
    assert scanned is not None
    assert (scanned.call, scanned.agent, scanned.step, scanned.tried) == (0, "Node0", 1, 1)
    halved = find_decisive_step(system, story_task(), lost, able, search="bisect")
    assert halved is not None
    assert halved.call == 0
    assert find_decisive_step(system, story_task(), able, able) is None
    assert find_decisive_step(system, story_task(), lost, lost) is None


def test_scan_and_bisect_differ_where_one_correction_is_not_enough() -> None:
    wrong, right = Parrot("Answer: 5"), Parrot("Answer: 211")
    scanned = find_decisive_step(Debate(), story_task(), wrong, right)
    assert scanned is not None
    assert scanned.agent == "Aggregator"
    assert scanned.tried == 7
    halved = find_decisive_step(Debate(), story_task(), wrong, right, search="bisect")
    assert halved is not None
    assert halved.call == 6


def test_equal_calls_get_equal_replies() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.said: list[str] = []

        def before(self, call: Call) -> Call:
            return call

        def after(self, call: Call, reply: Reply) -> Reply:
            self.said.append(reply.text)
            return reply

    model = Scripted(1)
    for system in SYSTEMS.values():
        recorder = Recorder()
        run = run_system(system, STORY, model, [recorder])
        assert [model(call).text for call in run.calls] == recorder.said
