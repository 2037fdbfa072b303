from __future__ import annotations

import os
from pathlib import Path

import pytest

import dcl
from injection.endpoint import EndpointConfig
from injection.plans import PlanConfig
from injection.records import RECORDS
from injection.run import RunConfig, collect
from injection.tasks import DATA

pytestmark = pytest.mark.llm


@pytest.fixture
def wire() -> EndpointConfig:
    """The endpoint that the environment names."""
    url, model = os.environ.get("DCL_LLM_URL"), os.environ.get("DCL_LLM_MODEL")
    if not url or not model:
        pytest.skip("no language model; set DCL_LLM_URL and DCL_LLM_MODEL")
    return EndpointConfig(base_url=url, model=model, max_tokens=64, timeout=300.0, concurrency=1)


@pytest.mark.parametrize("agents", ["scripted", "endpoint"])
def test_a_real_model_goes_through_from_end_to_end(
    wire: EndpointConfig, agents: str, tmp_path: Path
) -> None:
    config = RunConfig(
        out=str(tmp_path),
        systems=("llm_debate",),
        tasks=(str(DATA / "gsm8k.jsonl"), str(DATA / "mmlu_pro.jsonl")),
        tasks_per_file=1,
        agents=agents,  # type: ignore[arg-type]
        manipulator="endpoint",
        endpoint=wire,
        plans=PlanConfig(per_task=2, max_faults=1, benign=1),
        workers=1,
    )
    found = collect(config)
    assert found.clean.total() == 2  # what a weak model cannot do is counted
    assert set(found.clean) <= {"clean_right", "clean_wrong"}
    kept = found.plans["proved"] + found.plans["benign"]
    assert len((tmp_path / RECORDS).read_text().splitlines()) == kept
    records = list(dcl.read_examples(tmp_path / RECORDS)) if kept else []
    for example in records:
        assert example.clean is not None
        for fault in example.faults or ():
            assert fault.agent in example.trajectory.agents
