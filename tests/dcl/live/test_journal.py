from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import light, make_run, write_model

from dcl.attribution import Attributor
from dcl.errors import ConfigError
from dcl.live.alarms import AlarmRules, Event
from dcl.live.durable import DurableRuns
from dcl.live.journal import Journal
from dcl.live.openruns import Arrival, Bounds, OpenRuns
from dcl.runtime import load

ROWS: list[dict[str, object]] = [{"a": 1}, {"b": "\ud800 ü\n"}, {"c": [None]}]


@pytest.fixture(scope="module")
def attributor(tmp_path_factory: pytest.TempPathFactory) -> Attributor:
    return load(write_model(tmp_path_factory.mktemp("models") / "model"), threads=1)


def read(folder: Path) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    journal = Journal(folder)
    try:
        return journal.recover()
    finally:
        journal.close()


def test_rows_come_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "state")
    assert journal.recover() == ([], [])
    journal.append(ROWS[:2])
    journal.append(ROWS[2:], durable=False)
    journal.close()
    assert read(tmp_path / "state") == ([], ROWS)
    assert read(tmp_path / "state") == ([], ROWS)


def test_a_snapshot_takes_the_place_of_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(ROWS)
    assert journal.nbytes > 0
    journal.compact(ROWS[:1])
    assert journal.nbytes == 0
    journal.append(ROWS[1:2])
    journal.close()
    assert read(tmp_path) == (ROWS[:1], ROWS[1:2])
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "journal-1.jsonl",
        "lock",
        "snapshot.jsonl",
    ]


@light
@given(cut=st.integers(0, 200), more=st.sampled_from([b"", b'{"half": ', b"\x00\x00\n", b"[]\n"]))
def test_a_cut_tail_costs_its_own_rows_only(
    tmp_path_factory: pytest.TempPathFactory, cut: int, more: bytes
) -> None:
    folder = tmp_path_factory.mktemp("state")
    journal = Journal(folder)
    journal.append(ROWS)
    journal.close()
    file = folder / "journal-0.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:cut] + more)
    kept = whole[:cut].count(b"\n")
    assert read(folder) == ([], ROWS[:kept])
    journal = Journal(folder)
    journal.append([{"next": 1}])
    journal.close()
    assert read(folder) == ([], [*ROWS[:kept], {"next": 1}])


def test_a_process_killed_while_it_wrote_a_snapshot_has_lost_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(ROWS)
    journal.close()
    (tmp_path / "journal-1.jsonl").write_bytes(b"")
    (tmp_path / ".snapshot.jsonl.tmp").write_bytes(b'{"schema": "dcl.st')
    assert read(tmp_path) == ([], ROWS)


@pytest.mark.parametrize(
    "content", [b"", b"{}\n", b'{"schema": "dcl.state/1", "journal": 0}\n{"rows": 1}\n']
)
def test_a_damaged_snapshot_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "snapshot.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match="expected a whole snapshot"):
        read(tmp_path)


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(ConfigError, match="another process keeps its state there"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot keep state there"):
        Journal(tmp_path / "file")


def start(attributor: Attributor, folder: Path, compact_bytes: int = 1 << 20) -> DurableRuns:
    runs = OpenRuns(attributor, rules=AlarmRules(confirm=1))
    return DurableRuns(runs, Journal(folder), compact_bytes=compact_bytes)


RUNS = [
    make_run(("a", "the sum"), ("b", "is wrong"), ("b", "again"), ("a", "wrong"), id="1"),
    make_run(("b", "wrong"), ("a", "skip"), id="2"),
    make_run(("a", "the sum"), ("a", "is"), ("b", "is"), id="3"),
]


def arrivals() -> Iterator[Arrival]:
    """The turns of all runs in turn, then the ends."""
    for t in range(4):
        yield from (Arrival(r.id, r.turns[t], r.task) for r in RUNS if len(r.turns) > t)
    yield from (Arrival(run.id, None) for run in RUNS)


@pytest.mark.parametrize("compact_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("kill", range(0, 13, 2))
def test_a_restart_continues_where_the_last_process_was(
    attributor: Attributor, tmp_path: Path, kill: int, told: bool, compact_bytes: int
) -> None:
    whole = OpenRuns(attributor, rules=AlarmRules(confirm=1))
    expected = [event for arrival in arrivals() for event in whole.take(arrival)]
    first = start(attributor, tmp_path, compact_bytes)
    first.recover()
    heard: dict[tuple[str, int], Event] = {}
    for i, arrival in enumerate(arrivals()):
        if i == kill:
            break
        for events in first.take([arrival], position={"at": i}):
            heard |= {(event.run_id, event.number): event for event in events}
        if told or i < kill - 1:
            first.told()
    first.close()  # nothing is written by it; what a kill leaves behind is the same
    second = start(attributor, tmp_path, compact_bytes)
    again = second.recover()
    assert all(heard.get((event.run_id, event.number), event) == event for event in again)
    assert not (told and again)
    heard |= {(event.run_id, event.number): event for event in again}
    assert second.position == ({"at": kill - 1} if kill else None)
    for arrival in list(arrivals())[kill:]:
        for events in second.take([arrival]):
            heard |= {(event.run_id, event.number): event for event in events}
    second.close()
    assert sorted(heard.values(), key=str) == sorted(expected, key=str)


def test_silent_runs_that_were_closed_stay_closed(attributor: Attributor, tmp_path: Path) -> None:
    now = [0.0]

    def make() -> DurableRuns:
        runs = OpenRuns(attributor, bounds=Bounds(idle_s=10), clock=lambda: now[0])
        return DurableRuns(runs, Journal(tmp_path))

    first = make()
    first.recover()
    list(first.take([Arrival("r", RUNS[0].turns[0])]))
    now[0] = 11
    assert [event.reason for event in first.expire()] == ["idle"]
    first.close()
    second = make()
    assert [event.reason for event in second.recover()] == ["idle"]
    assert len(second.runs) == 0
    second.close()


def test_a_journal_of_something_else_is_refused(attributor: Attributor, tmp_path: Path) -> None:
    (tmp_path / "journal-0.jsonl").write_text(json.dumps({"take": [{"run": 3}]}) + "\n")
    durable = start(attributor, tmp_path)
    with pytest.raises(ConfigError, match="expected a state of dcl"):
        durable.recover()
    durable.close()


def test_no_row_is_lost_where_the_folder_cannot_be_put_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> None:
        raise OSError(errno.EIO, "bad disk")

    journal = Journal(tmp_path / "state")
    journal.recover()
    journal.append(ROWS[:1])
    with monkeypatch.context() as patch:
        patch.setattr("dcl.live.journal.sync_folder", fail)
        with pytest.raises(OSError, match="bad disk"):
            journal.compact(ROWS[:1])
    journal.append(ROWS[1:])
    journal.close()
    assert read(tmp_path / "state") == (ROWS[:1], ROWS[1:])
