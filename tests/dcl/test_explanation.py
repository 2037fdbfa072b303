from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import any_text, bagger, light, make_run, make_tokenizer
from typer.testing import CliRunner

from dcl.adapter import COLUMNS, IDENTITY, Adapter
from dcl.cli import app
from dcl.explanation import (
    replace_turn,
    split_sentences,
    trace_blame,
    weigh_turn,
)
from dcl.lexical import BIGRAM_ROWS, Lexicon
from dcl.references import find_symptom
from dcl.runtime import load
from dcl.taxonomy import MODES
from dcl.trajectory import Example, Fault, Turn, TurnKind

M = len(MODES)
ROWS = make_tokenizer().get_vocab_size() + BIGRAM_ROWS
LEXICON = Lexicon(
    idf=np.random.default_rng(0).uniform(1, 3, ROWS).astype(np.float32),
    table=np.random.default_rng(1).standard_normal((ROWS, M)).astype(np.float32),
    contrast=0.5,
)


@light
@given(st.lists(any_text, min_size=1, max_size=4))
def test_the_words_of_an_agent_sum_to_its_wide_logit(said: list[str]) -> None:
    run = make_run(*(("ab"[i % 2], text) for i, text in enumerate(said)))
    bag = bagger()(run)
    weighed = [weigh_turn(bagger(), LEXICON, run, bag, turn, 3) for turn in range(len(said))]
    assert all(list(words) == sorted(words, key=lambda word: -word.weight) for words in weighed)
    wide = LEXICON(bag.words, len(said))[:, 3]
    alone = replace(LEXICON, contrast=0.0)(bag.words, len(said))[:, 3]
    speakers = len(bag.agents)
    for agent in range(speakers):
        own = bag.agent_index == agent
        shares = sum(word.weight for turn in np.flatnonzero(own) for word in weighed[turn])
        if len(bag.words[agent].turn):
            others = LEXICON.contrast / speakers * float(alone[~own].sum())
            assert shares - others == pytest.approx(float(wide[own].sum()), abs=1e-3)


def test_words_carry_the_pieces_they_are_made_of() -> None:
    run = make_run(("a", "The sum, the SUM is 41."))
    words = weigh_turn(bagger(), LEXICON, run, bagger()(run), 0, 0)
    assert {word.text for word in words} == {"the", "sum", ",", "is", "41", "."}


@light
@given(any_text, st.integers(1, 5))
def test_sentences_cover_all_that_is_not_blank(text: str, most: int) -> None:
    spans = split_sentences(text, most)
    assert len(spans) <= most
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    left = text
    for start, stop in reversed(spans):
        left = left[:start] + left[stop:]
    assert not left.strip()


def test_sentences_end_at_points_and_lines() -> None:
    text = "It is 2.5 wide. Is it? 1. no\nyes"
    pieces = [text[a:b].strip() for a, b in split_sentences(text)]
    assert pieces == ["It is 2.5 wide.", "Is it?", "1. no", "yes"]


def test_a_blame_path_leads_from_the_source_to_the_symptom() -> None:
    run = make_run(
        ("planner", "coder: skip sum"),
        ("coder", "skip the sum again"),
        ("critic", "."),
        ("tool", "coder: error, failed to skip the sum again"),
        ("coder", "ok"),
    )
    bag = bagger()(run)
    assert find_symptom(bag, 0) == 3
    path = trace_blame(run, bag, 0)
    assert path[0].turn == 0
    assert path[0].verb is None
    assert path[-1].turn == 3
    turns = [hop.turn for hop in path]
    assert turns == sorted(set(turns))
    assert 2 not in turns
    assert path[1].verb == "delegation"
    assert [hop.turn for hop in trace_blame(run, bag, 4)] == [4]


def test_a_tool_changes_state_and_one_agent_remembers() -> None:
    run = make_run(("a", "write it"), ("b", "error error"))
    turns = (run.turns[0], Turn("b", "error error", kind=TurnKind.TOOL_RESULT))
    tool = type(run)("r", "", turns)
    assert trace_blame(tool, bagger()(tool), 0)[1].verb == "state"
    assert trace_blame(run, bagger()(run), 0)[1].verb == "message"


def test_the_shipped_model_explains_what_it_finds() -> None:
    from dcl.explanation import explain, probability

    attributor = load(threads=1, injected=True)
    run = make_run(
        ("planner", "Split the bill among four friends."),
        ("worker", "I skip the check. The total is 17. Nobody asked for more."),
    )
    found = attributor(run)
    findings = found.findings(top_k=1)
    (told,) = explain(attributor, run, findings)
    assert told.words
    assert told.neighbour is None
    content = run.turns[findings[0].turn].content
    falls = {
        content[start:stop].strip(): findings[0].prob
        - probability(
            attributor(replace_turn(run, findings[0].turn, content[:start] + content[stop:])),
            findings[0],
        )
        for start, stop in split_sentences(content)
    }
    assert {one.text: one.fall for one in told.sentences} == pytest.approx(falls, abs=1e-5)
    assert told.sentences[0].fall == max(one.fall for one in told.sentences)
    assert max(map(abs, falls.values())) > 1e-3  # far more than what the comparison lets pass
    assert told.to_dict()["like"] is None


def test_no_words_are_shown_where_modes_do_not_follow_from_them() -> None:
    from dcl.explanation import explain

    attributor = load(threads=1)
    run = make_run(("planner", "Split the bill."), ("worker", "I skip the check. It is 17."))
    (told,) = explain(attributor, run, attributor(run).findings(top_k=1))
    assert told.words == ()
    assert told.sentences
    assert told.signs
    weights = [sign.weight for sign in told.signs]
    assert weights == sorted(weights, reverse=True)
    assert min(weights) > 0


def test_signs_are_what_a_turn_has_over_the_others_of_its_run() -> None:
    from dcl.explanation import weigh_signs

    attributor = load(threads=1)
    run = make_run(
        ("human", "error?"),
        ("planner", "Split it by 4."),
        ("worker", "error: 17?"),
        ("critic", "ok"),
    )
    acting = np.array([False, True, True, True])  # of agents, and so of turns
    bag = replace(attributor.bagger(run), acting=acting)
    scorer: Any = attributor.scorer
    (natural,) = scorer.adapters
    assert natural.trust == 0  # nothing but columns, so signs say all
    names = ("to_task", "is_last", "numbers_new")
    own = Adapter(
        names, np.zeros(3), np.ones(3), np.array([2.0, -1, 3]), 0.5, IDENTITY.agent, IDENTITY.modes
    )
    *vectors, task = scorer.encoder([*bag.windows, bag.task])
    _, columns = scorer.observe(bag, np.stack(vectors), task)
    shares = natural.weigh_columns(columns)
    for adapters in ((natural,), (natural, own)):
        scorer.adapters = adapters
        if own in adapters:
            shares = 0.5 * shares + own.weigh_columns(columns)
        (logits,) = scorer([bag])
        assert shares.sum(axis=1) == pytest.approx(logits.step, abs=1e-4)
        apart = shares - shares[acting].mean(axis=0)
        for turn, signs in enumerate(weigh_signs(attributor, bag, range(4))):
            speaking = np.flatnonzero(apart[turn] > 1e-6)
            assert {COLUMNS[i] for i in speaking} == {sign.column for sign in signs}
            for sign in signs:
                i = COLUMNS.index(sign.column)
                assert sign.weight == pytest.approx(apart[turn, i])
                assert sign.high == (columns[turn, i] > columns[acting, i].mean())


def test_the_turn_shown_is_the_likeliest_of_its_agent_after_a_second_reading() -> None:
    """What `dcl fit` learns comes after the reading of natural failures and moves turns again."""
    attributor = load(threads=1)
    scorer: Any = attributor.scorer
    turn = replace(IDENTITY, columns=("position",), mean=np.zeros(1), scale=np.ones(1))
    for weight in (-9.0, 9.0):
        scorer.adapters = (scorer.adapters[0], replace(turn, weights=np.array([weight])))
        found = attributor(make_run(*(("ab"[i % 2], f"turn {i}") for i in range(8))))
        for agent in range(2):
            own = np.where(found.agent_index == agent, found.step_probs, -1)
            assert found.find(agent, None).turn == int(np.argmax(own))
            assert found.find(agent, 3).turn == int(np.argmax(own))


def test_words_of_a_fault_without_a_mode_are_those_of_the_likeliest() -> None:
    from dcl.explanation import explain

    attributor = load(threads=1, injected=True)
    run = make_run(("planner", "Split the bill."), ("worker", "I skip the check. It is 17."))
    found = attributor(run)
    mode = int(np.argmax(found.pair_probs[1]))
    pair = [found.find(1, None), found.find(1, mode)]
    without, with_mode = explain(attributor, run, pair, sentences=0)
    assert without.words == with_mode.words
    assert without.signs == ()


def test_any_labelled_logs_can_stand_beside_a_finding(tmp_path: Path) -> None:
    run = make_run(("planner", "Split the bill."), ("worker", "I skip the check. It is 17."))
    other = replace(run, id="other", task="another one")
    labelled = Example(other, (Fault("worker", MODES[10], 1),))
    log, known = tmp_path / "log.jsonl", tmp_path / "known.jsonl"
    log.write_text(json.dumps(Example(run, None).to_dict()) + "\n")
    known.write_text(json.dumps(labelled.to_dict()) + "\n")
    command = ["explain", str(log), "--top-k", "1", "--sentences", "0", "--model", "lite"]
    told = CliRunner().invoke(app, [*command, "--output", "jsonl", "--like", str(known)])
    assert told.exit_code == 0, told.output
    (finding,) = json.loads(told.output.splitlines()[0])["findings"]
    assert finding["like"]["id"] == "other"
    assert finding["like"]["mode"] == MODES[10].value
    assert "high " in CliRunner().invoke(app, command).output  # signs, for people
    refused = CliRunner().invoke(app, [*command, "--like", str(log)])
    assert refused.exit_code == 2
    assert "--like: expected logs with labels" in refused.output
