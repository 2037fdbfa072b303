from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fault_server import FAULTS, FaultServer, serve
from worlds import STORY, WORK, scene

import dcl
from dcl.errors import ConfigError
from dcl.taxonomy import MODES, ErrorMode
from injection.endpoint import Endpoint, EndpointConfig, redact
from injection.errors import AttackError, BudgetError, ModelError
from injection.importance import importance_of
from injection.instructions import find_order, order_for
from injection.manipulator import Rules
from injection.natural import NaturalConfig, collect_natural
from injection.plans import PlanConfig, make_plans
from injection.proof import Prover
from injection.records import LEDGER, RECORDS
from injection.repair import repair
from injection.report import summarise
from injection.rewriter import LlmManipulator
from injection.rules import Scene
from injection.run import RunConfig, collect, list_groups
from injection.session import Brief, Call, Message, Reply
from injection.systems import SYSTEMS
from injection.tasks import own_tasks

KEY = "sk-verysecretkey0123456789"
ASK = (Message("system", "s"), Message("user", "2 + 2?"))


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def endpoint(server: FaultServer, **more: Any) -> Endpoint:
    config = EndpointConfig(base_url=server.url, model="folder/tiny", **({"timeout": 30.0} | more))
    return Endpoint(config, sleep=lambda seconds: None)


def test_temperature_seed_and_limit_are_really_sent() -> None:
    with serve() as server:
        model = endpoint(server, seed=9, max_tokens=77)
        reply = model.complete(ASK, temperature=0.3)
    (request,) = server.requests
    assert (request["temperature"], request["seed"], request["max_tokens"]) == (0.3, 9, 77)
    assert request["model"] == "folder/tiny"
    assert request["messages"] == [message._asdict() for message in ASK]
    assert (reply.text, reply.prompt_tokens, reply.completion_tokens) == ("Answer: 4", 11, 5)
    assert model.name == "tiny"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_passing_fault_is_tried_again(fault: str) -> None:
    with serve(fault) as server:
        assert endpoint(server).complete(ASK, temperature=0).text == "Answer: 4"
    assert len(server.requests) == 2


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lasting_fault_is_an_error_and_never_a_text(fault: str) -> None:
    with serve(*[fault] * 50) as server:
        model = endpoint(server, retries=1)
        with pytest.raises(ModelError) as caught:
            model.complete(ASK, temperature=0)
    assert "127.0.0.1" in str(caught.value)
    assert KEY not in str(caught.value)
    assert len(server.requests) == 2  # the client's tries and ours are not multiplied


def test_a_key_that_is_refused_is_not_tried_again() -> None:
    with serve("refused") as server, pytest.raises(ModelError, match="status 401") as caught:
        endpoint(server).complete(ASK, temperature=0)
    assert len(server.requests) == 1
    assert KEY not in str(caught.value)


def test_bytes_that_trickle_run_into_the_timeout() -> None:
    with serve("slow") as server, pytest.raises(ModelError, match="no whole reply"):
        endpoint(server, retries=0, timeout=0.5).complete(ASK, temperature=0)


def test_the_whole_request_is_the_key_of_the_cache(tmp_path: Path) -> None:
    with serve() as server:
        model = endpoint(server, cache=str(tmp_path))
        for _ in range(2):
            model.complete(ASK, temperature=0)
        endpoint(server, cache=str(tmp_path)).complete(ASK, temperature=0)
        assert len(server.requests) == 1
        model.complete(ASK, temperature=0.1)
        model.complete(ASK, temperature=0, seed=5)
        model.complete(ASK[1:], temperature=0)
        endpoint(server, cache=str(tmp_path), max_tokens=5).complete(ASK, temperature=0)
        assert len(server.requests) == 5
        for file in tmp_path.rglob("*.json"):
            file.write_text('{"text": ')
        assert endpoint(server, cache=str(tmp_path)).complete(ASK, temperature=0).text
        assert len(server.requests) == 6
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and file.suffix != ".json"]


def test_a_budget_ends_the_work_before_the_next_request() -> None:
    with serve() as server:
        model = endpoint(server, budget_calls=2)
        for seed in (1, 2):
            model.complete(ASK, temperature=0, seed=seed)
        model.complete(ASK, temperature=0, seed=1)  # known, costs nothing
        with pytest.raises(BudgetError, match="budget of 2 calls"):
            model.complete(ASK, temperature=0, seed=3)
        tokens = endpoint(server, budget_tokens=16)
        tokens.complete(ASK, temperature=0)
        with pytest.raises(BudgetError, match="budget of 16 tokens"):
            tokens.complete(ASK, temperature=0, seed=2)
    assert len(server.requests) == 3


def test_no_more_requests_at_a_time_than_allowed() -> None:
    with serve(*["wait"] * 12) as server:
        model = endpoint(server, concurrency=2)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda seed: model.complete(ASK, temperature=0, seed=seed), range(12)))
    assert len(server.requests) == 12
    assert server.most <= 2


def test_requests_are_spread_over_the_minute() -> None:
    waits: list[float] = []
    with serve() as server:
        config = EndpointConfig(base_url=server.url, model="m", requests_per_minute=1)
        model = Endpoint(config, sleep=waits.append)
        for seed in range(3):
            model.complete(ASK, temperature=0, seed=seed)
    assert len(waits) == 2
    assert 0 < waits[0] <= 60 < waits[1] <= 120


def test_a_configuration_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected the name of a model"):
        Endpoint(EndpointConfig())
    for wrong in ({"timeout": 0}, {"retries": -1}, {"concurrency": 0}):
        with pytest.raises(ConfigError):
            EndpointConfig(**wrong)  # type: ignore[arg-type]


def test_secrets_are_taken_out_of_any_text() -> None:
    text = redact(f"Bearer abc.def {KEY} http://user:pass@host/v1 my-own-key", "my-own-key")
    for secret in ("abc.def", KEY, "user", "pass", "my-own-key"):
        assert secret not in text


def test_each_mode_is_asked_of_the_model_with_its_definition() -> None:
    with serve(text="Something else. Answer: 5") as server:
        manipulator = LlmManipulator(endpoint(server, rewrite_temperature=0.9))
        for mode in MODES:
            assert manipulator.corrupt(WORK, mode, scene()) == "Something else. Answer: 5"
            brief = Brief(STORY, (), "Give your solution.")
            after = Brief.parse(manipulator.inject(brief.render(), mode, scene()))
            assert (after.task, after.request) == (STORY, "Something else. Answer: 5")
        manipulator.rephrase(WORK, scene())
    assert len(server.requests) == 29
    assert {request["temperature"] for request in server.requests} == {0.9}
    for mode, (corrupted, injected) in zip(
        MODES, zip(server.requests[:-1:2], server.requests[1::2], strict=True), strict=True
    ):
        for request in (corrupted, injected):
            user = request["messages"][1]["content"]
            assert mode.definition in user
            assert find_order(user) is mode
    assert "Keep every fact" in server.requests[-1]["messages"][1]["content"]


def test_a_model_that_gives_the_text_back_makes_no_attack() -> None:
    with serve(text=f" {WORK}\n") as server, pytest.raises(AttackError, match="as it was"):
        LlmManipulator(endpoint(server)).corrupt(WORK, ErrorMode.FM_2_6, scene())


def test_a_model_that_quotes_its_instructions_makes_no_attack() -> None:
    mode = ErrorMode.FM_3_2
    brief = Brief(STORY, (), "Give your solution.").render()
    for said in ("The way of failing: no.", f"So. {mode.definition}", "Reply with the edited"):
        with serve(text=said) as server, pytest.raises(AttackError, match="own instructions"):
            LlmManipulator(endpoint(server)).corrupt(WORK, mode, scene())
    for said in (STORY, f"{WORK} Fine."):
        with serve(text=said) as server:
            assert LlmManipulator(endpoint(server)).corrupt(WORK, mode, scene()) == said
    order = order_for(mode, "math", (), random.Random(0))
    with serve(text=order) as server:
        place = Scene(STORY, (), (), random.Random(0), domain="math")
        assert order in LlmManipulator(endpoint(server)).inject(brief, mode, place)


def config(
    server: FaultServer,
    out: Path,
    agents: Any = "scripted",
    judge: Any = "none",
    tasks: tuple[str, ...] = (),
    **more: Any,
) -> RunConfig:
    wire: dict[str, Any] = {"base_url": server.url, "model": "tiny", "retries": 1, "timeout": 30.0}
    return RunConfig(
        out=str(out),
        systems=("macnet_chain",),
        tasks=tasks,
        tasks_per_file=1,
        agents=agents,
        judge=judge,
        manipulator="endpoint",
        plans=PlanConfig(per_task=3, max_faults=1),
        endpoint=EndpointConfig(**(wire | {"cache": str(out / "cache")} | more)),
        workers=1,
    )


def records_of(out: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / RECORDS).read_text().splitlines()]
    return sorted(rows, key=lambda row: str(row["id"]))


@pytest.mark.parametrize("faults", [["broken", "cut", "empty"], FAULTS * 3])
def test_faults_of_the_server_lose_and_mislabel_nothing(faults: list[str], tmp_path: Path) -> None:
    with serve(text="Answer: 5") as server:
        collect(config(server, tmp_path / "calm"))
    with serve(*faults, text="Answer: 5") as server:
        for _ in range(12):
            collect(config(server, tmp_path / "rough", retries=0))
            if not server.faults:
                break
        collect(config(server, tmp_path / "rough", retries=0))
    calm, rough = records_of(tmp_path / "calm"), records_of(tmp_path / "rough")
    assert calm == rough
    assert calm
    assert all(
        turn["after"] == "Answer: 5"
        for row in rough
        for a in row["injection"]["attacks"]
        if a["strategy"] == "response_corruption"
        for turn in a["turns"]
    )


def play(request: dict[str, Any]) -> str:
    """Agents know the answer, the manipulator another one."""
    rewrites = request["messages"][0]["content"].startswith("You edit one message")
    return "Answer: 5" if rewrites else "Answer: 2"


def test_faults_of_the_server_are_no_failures_of_agents(tmp_path: Path) -> None:
    tasks = tmp_path / "gsm8k.jsonl"
    tasks.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    more: dict[str, Any] = {"agents": "endpoint", "tasks": (str(tasks),)}
    with serve(text=play) as server:
        found = collect(config(server, tmp_path / "calm", **more))
    assert found.clean == {"clean_right": 1}
    assert found.plans["proved"] + found.plans["benign"] > 0
    with serve(*FAULTS * 3, text=play) as server:
        for _ in range(40):
            found = collect(config(server, tmp_path / "rough", retries=0, **more))
            if found.clean["clean_right"] and not found.plans["no_reply"]:
                break
    assert not server.faults
    assert records_of(tmp_path / "calm") == records_of(tmp_path / "rough")


def test_a_used_up_budget_stops_cleanly_and_goes_on_later(tmp_path: Path) -> None:
    with serve(text="Answer: 5") as server:
        collect(config(server, tmp_path / "whole"))
        starts = 0
        while True:
            starts += 1
            try:
                collect(config(server, tmp_path / "parts", budget_calls=2))
                break
            except BudgetError:
                assert starts < 40
    assert starts > 2
    assert records_of(tmp_path / "parts") == records_of(tmp_path / "whole")


def test_a_server_that_goes_away_later_is_no_wrong_address() -> None:
    with serve("last") as server:
        model = endpoint(server, retries=0)
        model.complete(ASK, temperature=0)
    with pytest.raises(ModelError, match="Connection error"):
        model.complete(ASK, temperature=0, seed=2)


def test_agents_on_an_endpoint_are_counted_by_why_they_gave_nothing(tmp_path: Path) -> None:
    with serve(*["blank"] * 99) as server:
        made = config(server, tmp_path, agents="endpoint", retries=0)
        found = collect(made)
    assert found.clean == {"no_clean_run": 6}
    assert "the last time without: http://127" in summarise(found, tmp_path)


def test_a_model_judges_free_text_where_it_is_asked_to(tmp_path: Path) -> None:
    tasks = tmp_path / "gaia.jsonl"
    row = {"task_id": "x", "Question": "Which river?", "Final answer": "the Ner"}
    tasks.write_text(json.dumps(row) + "\n")
    for judge, outcome in (("none", "clean_wrong"), ("endpoint", "clean_right")):
        out = tmp_path / judge
        with serve(text="Answer: river Ner\nCorrect") as server:
            run = config(server, out, agents="endpoint", judge=judge, tasks=(str(tasks),))
            assert collect(run).clean == {outcome: 1}
        judged = [r for r in server.requests if "same?" in r["messages"][-1]["content"]]
        assert bool(judged) == (judge == "endpoint")


def test_no_secret_reaches_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serve("refused", "good", "refused", text=f"Answer: 5, and my key is {KEY}") as server:
        for _ in range(3):
            collect(config(server, tmp_path, retries=0))
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {RECORDS, LEDGER} <= {file.name for file in files}
    assert any(KEY in header["authorization"] for header in server.headers)
    assert not [file for file in files if KEY.encode() in file.read_bytes()]
    out = capfd.readouterr()
    assert KEY not in out.out + out.err


def test_a_key_from_a_file_is_trimmed_and_one_that_cannot_be_sent_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", f" {KEY}\n")
    with serve() as server:
        endpoint(server).complete(ASK, temperature=0)
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\u00e9")
    with pytest.raises(ConfigError, match="OPENAI_API_KEY: expected a key of printable") as caught:
        endpoint(server)
    assert KEY not in str(caught.value)
    assert "[key]" in redact("no server at https://host/v1?api-key=0123abc")


def test_all_seeds_share_the_budget(tmp_path: Path) -> None:
    tasks = tmp_path / "gsm8k.jsonl"
    tasks.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    with serve(text="Answer: 2") as server:
        kept = str(tmp_path / "cache")
        wire = EndpointConfig(base_url=server.url, model="m", budget_calls=5, cache=kept)
        natural = NaturalConfig(
            out=str(tmp_path / "out"),
            systems=("macnet_chain",),
            tasks=(str(tasks),),
            agents="endpoint",
            endpoint=wire,
            seeds=4,
            workers=1,
        )
        with pytest.raises(BudgetError, match="budget of 5 calls"):
            collect_natural(natural)
        assert len(server.requests) == 5
        for _ in range(9):
            try:
                assert collect_natural(natural) == {"right": 4}
                break
            except BudgetError:
                continue
    assert {request["seed"] for request in server.requests} == {1, 2, 3, 4}


def test_repair_counts_tasks_that_got_no_reply() -> None:
    systems = {"systems": ("macnet_chain",), "tasks_per_file": 1}
    groups = list_groups(RunConfig(out="x", **systems))[:2]  # type: ignore[arg-type]
    with serve(*["blank"] * 99) as server:
        result = repair(groups, endpoint(server, retries=0), dcl.load())
    assert (result.lost, result.before.total) == (2, 0)


def test_ctrl_c_does_not_wait_for_an_endpoint(tmp_path: Path) -> None:
    asked = threading.Event()

    def think(request: dict[str, Any]) -> str:
        asked.set()
        time.sleep(1)
        return "Answer: 5"

    with serve(text=think) as server:
        file = tmp_path / "run.yaml"
        file.write_text(
            f"out: {tmp_path / 'out'}\nagents: endpoint\nsystems: [dylan]\nworkers: 2\n"
            f"endpoint: {{model: m, base_url: '{server.url}'}}\n"
        )
        child = subprocess.Popen(
            [sys.executable, "-m", "injection", "run", "--config", str(file)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert asked.wait(60)
        child.send_signal(signal.SIGINT)
        said, _ = child.communicate(timeout=30)
    assert (child.returncode, said) == (130, b"")


NONSENSE = (
    "[" * 3000, "{" * 3000, "\ud800", "\x00", r"\boxed{9^{99*99*99*99}}", "Answer: 1/0",
    "Ratings: [" + "9" * 5000 + "]", "Ranking: [0, 99, -1]", "Correctness: \u00b2", "[Agree]",
    "--- Critic ---", "\n\n=== Your turn ===\nx", "Step 1: 10 % 0 = 1", "Answer: " + "9" * 5000,
    "Step 2: 9 ^ 999999999 = 1", "Plan:\n1. Calculator: {7} + {99}", '{"next": 5}', "```python\n",
    '{"agent": null, "request": [1]}', '{"tool": "lookup", "argument": {"a": 1}}', "10^999999 kg",
)  # fmt: skip


class Babbler:
    """A model that answers anything with nonsense, the same call with the same."""

    name = "babbler"

    def __call__(self, call: Call) -> Reply:
        rng = random.Random(call.digest)
        return Reply("\n".join(rng.choice(NONSENSE) for _ in range(rng.randint(1, 4))))


@pytest.mark.parametrize("name", SYSTEMS)
def test_nonsense_of_a_model_breaks_no_run(name: str) -> None:
    for task in own_tasks(1):
        prover = Prover(SYSTEMS[name], task, Babbler(), Rules())
        clean = prover.clean
        importance_of(clean.run)
        taken = replace(clean, verdict=replace(clean.verdict, right=True))
        prover._clean = taken
        for plan in make_plans(PlanConfig(per_task=4), name, task.id, clean.run, group=0, seed=1):
            assert prover.prove(plan).outcome
