from __future__ import annotations

import json
from itertools import pairwise

import pytest
from worlds import Parrot

from injection import surfing, web
from injection.anatomy import compute
from injection.checkers import check
from injection.english import fill
from injection.run import RunConfig, list_groups
from injection.scripted import Scripted
from injection.session import Run, run_system
from injection.systems import WebTeam
from injection.systems.web_team import Browser, open_file
from injection.tasks import Task, own_tasks

ABLE = Scripted(1, skill=1.0, slip=0.0, care=1.0)
MUSEUM = "Oskerby Museum of Maps"


def look_up(expression: str) -> str | None:
    """The value of a fact; None if there is no such thing."""
    attribute, name, file = web.split_fact(expression)
    if file:
        return web.read(web.files()[file], attribute, name)
    return web.facts().get(name, {}).get(attribute)


def tasks() -> list[Task]:
    return own_tasks(folder=WebTeam().tasks)


def runs() -> list[Run]:
    return [run_system(WebTeam(), task.question, ABLE) for task in tasks()]


def test_every_question_leads_to_its_answer_through_facts() -> None:
    for task in tasks():
        values: list[str] = []
        for step in web.plan_lookups(task.question):
            fact = fill(step, values)
            values.append(look_up(fact) or compute(fact) or "")
        assert len(values) > 2
        assert values[-1] == task.answer


def test_every_fact_stands_on_a_page_about_its_thing_and_on_no_result_of_a_search() -> None:
    for name, row in web.facts().items():
        text = "\n".join(web.pages()[f"{name} - Lorepedia"].lines)
        assert {attribute: web.read(text, attribute) for attribute in row} == row
        results = web.search(name).lines
        assert results[0].startswith("About ")
        assert {web.read("\n".join(results), attribute) for attribute in row} == {None}
        assert name in web.links(web.search(name).lines[0])[0]
    assert look_up("mayor of Nowhere") is None
    assert web.plan_lookups("What is the mayor of Nowhere?") == ()


def test_like_things_are_near_and_another_row_can_be_read() -> None:
    assert web.siblings(MUSEUM)[0] in (
        "Oskerby Museum of Clocks",
        "Castell Museum of Maps",
    )
    table = "| Year | Visitors |\n| 2018 | 311 |\n| 2019 | 400 |"
    assert web.read(table, "number of visitors in 2018") == "311"
    assert web.near_values(table, "311")[0] in ("2018", "2019", "400")
    assert web.near_values("- Mayor: Ilka Haverkamp\n- Pages: 12", "Ilka Haverkamp") == []


def test_the_browser_shows_what_is_done_with_it() -> None:
    browser = Browser()
    assert "empty page" in browser.show()
    found = browser.act(json.dumps({"tool": "web_search", "argument": MUSEUM}))
    assert found.startswith(f"I typed '{MUSEUM}'")
    title = f"{MUSEUM} - Lorepedia"
    opened = browser.act(json.dumps({"tool": "click", "argument": title}))
    assert "at the top of the page" in opened
    assert f"[{title}](https://" in opened
    assert "not found" in browser.act(json.dumps({"tool": "click", "argument": "No such link"}))
    assert "% down from the top" in browser.act(json.dumps({"tool": "page_down", "argument": "1"}))
    assert "at the bottom" in browser.act(json.dumps({"tool": "page_down", "argument": "9"}))
    assert "back button" in browser.act(json.dumps({"tool": "history_back"}))
    assert browser.act("The mayor is Nobody.") == "The mayor is Nobody."


def test_files_are_shown_or_listed() -> None:
    shown = open_file(json.dumps({"tool": "open_path", "argument": "/workspace/crews_2019.csv"}))
    assert "Title: crews_2019.csv" in shown
    assert "MV Halcyon II," in shown
    assert "| README.txt |" in open_file(json.dumps({"tool": "open_path", "argument": "/tmp/x"}))
    assert open_file("no tool") == "no tool"


def test_able_agents_answer_every_question_in_many_turns() -> None:
    done = runs()
    for task, run in zip(tasks(), done, strict=True):
        assert check(task, run.answer).right
        assert 15 < len(run.events) < 90
        assert run.events[0].agent == "human"
    talk = [event.agent == "Orchestrator" for run in done for event in run.events]
    assert 0.5 < sum(talk) / len(talk) < 0.75
    assert {event.agent for run in done for event in run.events} == {
        "human", "Orchestrator", "WebSurfer", "FileSurfer", "Assistant", "ComputerTerminal",
    }  # fmt: skip


def test_agents_who_know_nothing_err_and_the_same_call_errs_alike() -> None:
    lost = Scripted(3, skill=0.0)
    some = tasks()[:8]
    first = [run_system(WebTeam(), task.question, lost) for task in some]
    assert first == [run_system(WebTeam(), task.question, lost) for task in some]
    right = [check(t, run.answer).right for t, run in zip(some, first, strict=True)]
    assert len(right) - sum(right) > 0


def test_a_stalled_team_plans_anew_and_ends() -> None:
    stuck = json.dumps(
        {
            "is_request_satisfied": {"reason": "", "answer": False},
            "is_in_loop": {"reason": "", "answer": True},
            "next_speaker": {"reason": "", "answer": "nobody"},
        }
    )
    team = WebTeam(rounds=3, stalls=1)
    run = run_system(team, tasks()[0].question, Parrot("plan", stuck, "hm", stuck, "plan", stuck))
    phases = [event.phase for event in run.events if event.call is not None]
    assert phases == ["survey", "steer", "browse", "steer", "survey", "steer", "browse", "conclude"]


def test_the_terminal_runs_the_latest_code_or_says_that_there_is_none() -> None:
    ledger = {"next_speaker": {"answer": "ComputerTerminal"}, "instruction_or_question": "Run it."}
    team = WebTeam(rounds=1, terminal=lambda code: (True, "7"))
    run = run_system(team, "Anything?", Parrot("plan", json.dumps(ledger), "done"))
    assert any("No code blocks" in event.content for event in run.events)
    plan = "```python\nprint(7)\n```"
    run = run_system(team, "Anything?", Parrot(plan, json.dumps(ledger), "done"))
    assert any("exit code: 0\nIts output was:\n7" in event.content for event in run.events)


@pytest.mark.parametrize("systems", [("web_team", "manager"), ("manager", "web_team")])
def test_a_system_with_tasks_of_its_own_works_on_these_after_all_others(
    systems: tuple[str, ...],
) -> None:
    groups = list_groups(RunConfig(out="x", systems=systems, tasks_per_file=2))
    assert [g.number for g in groups] == list(range(14))
    assert [g.system for g in groups] == ["manager"] * 12 + ["web_team"] * 2
    assert {g.task.id for g in groups if g.system == "web_team"} == {"web-1", "web-2"}


def test_what_is_said_of_a_file_reaches_the_orchestrator() -> None:
    known: list[tuple[str, str]] = []
    for run in runs():
        for before, event in pairwise(run.events):
            stated = surfing._STATED.search(before.content)
            if before.agent == "FileSurfer" and stated and "satisfied" in event.content:
                known.append((f"(the {stated[1]} is {stated[2]})", event.content))
    assert known
    assert all(fact in ledger for fact, ledger in known)


def test_a_ledger_that_ends_the_run_says_so_alone() -> None:
    for run in runs():
        for event in run.events:
            if '"is_request_satisfied"' in event.content:
                ledger = json.loads(event.content.partition("\n")[2])
                ends = ledger["is_request_satisfied"]["answer"]
                assert (ledger["next_speaker"]["reason"] == surfing.FINISHED) is ends
