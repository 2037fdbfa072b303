from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from worlds import STORY, Parrot, story_task

import dcl
from dcl.taxonomy import MODES
from injection.intervene import (
    Change,
    cluster_corrections,
    intervene,
    posterior_order,
    reverse_order,
    suggest_rule,
)
from injection.repair import Share, repair, wilson, write_hint
from injection.run import Group
from injection.scripted import Scripted
from injection.session import run_system
from injection.systems import Debate, MacNet
from injection.tasks import own_tasks

LOST, ABLE = Scripted(1, skill=0.0, slip=0.0), Scripted(1, skill=1.0, slip=0.0)


def test_agents_are_helped_in_reverse_order_until_one_is_enough() -> None:
    tried = intervene(Debate(), story_task(), Parrot("Answer: 5"), Parrot("Answer: 211"))
    assert [(i.agent, i.right) for i in tried] == [("Aggregator", True)]
    assert tried[0].changes == (Change("Aggregator", "Answer: 5", "Answer: 211"),)
    chain = intervene(MacNet("chain", nodes=3), story_task(), LOST, ABLE)
    assert chain[-1].right
    assert len({i.agent for i in chain}) == len(chain)


def test_another_order_takes_other_agents_first() -> None:
    tried = intervene(
        MacNet("chain", nodes=3), story_task(), LOST, ABLE, order=lambda run: ["Node0"]
    )
    assert [(i.agent, i.right) for i in tried] == [("Node0", True)]


def test_a_hint_in_words_reaches_one_agent_only() -> None:
    model = Parrot("Answer: 5")
    tried = intervene(Debate(), story_task(), model, "Mind the shelves.")
    assert [i.right for i in tried] == [False] * 4
    hinted = [call.agent for call in model.calls if "Mind the shelves." in call.prompt]
    assert hinted == [
        "Aggregator",
        "Assistant3",
        "Assistant3",
        "Assistant2",
        "Assistant2",
        "Assistant1",
        "Assistant1",
    ]


def test_a_right_run_needs_no_help() -> None:
    assert intervene(Debate(), story_task(), ABLE, ABLE) == []


def test_the_posterior_gives_the_order() -> None:
    run = run_system(Debate(), STORY, LOST)
    attribution = dcl.load()(run.trajectory("x", STORY, "failure"))
    order = posterior_order(run, attribution)
    probs = dict(zip(attribution.agents, attribution.agent_probs, strict=True))
    assert sorted(order) == sorted(reverse_order(run))
    assert [probs[a] for a in order] == sorted(probs.values(), reverse=True)


def change(agent: str, said: str, better: str) -> Change:
    return Change(agent, said, better)


def test_corrections_of_one_kind_are_put_together() -> None:
    directions = {"a": [1.0, 0.0], "b": [0.96, 0.28], "c": [0.0, 1.0], "": [0.0, 0.0]}

    def embed(texts: object) -> NDArray[Any]:
        return np.array([directions[text[:1]] for text in texts], dtype=np.float32)  # type: ignore[attr-defined]

    changes = [change("X", "", "a"), change("Y", "", "c"), change("Z", "", "b")]
    kinds = cluster_corrections(changes, embed=embed, likeness=0.8)
    assert [{c.agent for c in kind.changes} for kind in kinds] == [{"X", "Z"}, {"Y"}]
    assert cluster_corrections([], embed=embed) == []


def test_the_encoder_of_dcl_separates_kinds_of_corrections() -> None:
    wrong = "Step 1: 15 * 13 = 185\nAnswer: 185"
    changes = [
        change("Solver", wrong, "Step 1: 15 * 13 = 195\nCheck: 15 * 13 = 195\nAnswer: 195"),
        change(
            "Solver",
            wrong.replace("85", "75"),
            "Step 1: 15 * 13 = 195\nCheck: 15 * 13 = 195\nAnswer: 195",
        ),
        change("Critic", "[Agree] Fine.", "[Disagree] The second step is wrong."),
    ]
    kinds = cluster_corrections(changes)
    assert [len(kind.changes) for kind in kinds] == [2, 1]
    assert kinds[0].rule.startswith("Solver: ")
    assert "judge" in kinds[1].rule


def test_a_rule_follows_from_what_corrections_add() -> None:
    assert "check every step" in suggest_rule(
        [change("A", "Answer: 1", "Check: 1 + 1 = 2\nAnswer: 1")]
    )
    assert "run the code" in suggest_rule([change("A", "x", "```python\ny\n```")])


def test_a_hint_names_the_fault() -> None:
    run = run_system(Debate(), STORY, LOST)
    agent, hint = write_hint(dcl.load()(run.trajectory("x", STORY, "failure")))
    assert agent in {call.agent for call in run.calls}
    assert any(mode.definition in hint for mode in MODES)


def test_repair_counts_successes_before_and_after() -> None:
    groups = [Group(i, "macnet_chain", task) for i, task in enumerate(own_tasks(4))]
    result = repair(groups, Scripted(1, skill=0.3, slip=0.0), dcl.load())
    assert result.before.total == result.after.total == 24
    assert result.before.hits < 24
    assert result.after.hits >= result.before.hits


@pytest.mark.parametrize(
    ("hits", "total", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (0, 0, 0.0, 1.0)],
)
def test_wilson_intervals(hits: int, total: int, low: float, high: float) -> None:
    assert wilson(hits, total) == pytest.approx((low, high), abs=1e-4)
    assert str(Share(5, 10)) == "50.0 % [23.7, 76.3] of 10"
