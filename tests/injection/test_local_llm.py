from __future__ import annotations

import os
from pathlib import Path

import pytest

import dcl
from injection.endpoint import EndpointConfig
from injection.plans import PlanConfig
from injection.records import RECORDS, Store
from injection.run import RunConfig, collect

pytestmark = pytest.mark.llm


@pytest.fixture
def wire() -> EndpointConfig:
    """The endpoint that the environment names."""
    url, model = os.environ.get("DCL_LLM_URL"), os.environ.get("DCL_LLM_MODEL")
    if not url or not model:
        pytest.skip("no language model; set DCL_LLM_URL and DCL_LLM_MODEL")
    return EndpointConfig(base_url=url, model=model, max_tokens=96, timeout=300.0, concurrency=1)


@pytest.mark.parametrize("agents", ["scripted", "endpoint"])
def test_a_real_model_goes_through_from_end_to_end(
    wire: EndpointConfig, agents: str, tmp_path: Path
) -> None:
    config = RunConfig(
        out=str(tmp_path),
        systems=("llm_debate",),
        tasks_per_file=1,
        agents=agents,  # type: ignore[arg-type]
        manipulator="endpoint",
        endpoint=wire,
        plans=PlanConfig(per_task=2, max_faults=1, benign=1),
        workers=1,
    )
    counts = collect(config)
    outcomes = Store(tmp_path).outcomes()
    groups = [outcome for id, outcome in outcomes.items() if id.startswith("group-")]
    assert len(groups) == 6  # what a weak model cannot do is counted
    assert set(groups) <= {"clean_right", "clean_wrong"}
    records = list(dcl.read_examples(tmp_path / RECORDS))
    assert len(records) == counts.get("proved", 0) + counts.get("benign", 0)
    for example in records:
        assert example.clean is not None
        for fault in example.faults or ():
            assert fault.agent in example.trajectory.agents
