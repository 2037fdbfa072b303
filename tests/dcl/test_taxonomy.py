from __future__ import annotations

import pytest

from dcl.taxonomy import MODES, ErrorMode

CODES = [
    *("FM-1.1", "FM-1.2", "FM-1.3", "FM-1.4", "FM-1.5"),
    *("FM-2.1", "FM-2.2", "FM-2.3", "FM-2.4", "FM-2.5", "FM-2.6"),
    *("FM-3.1", "FM-3.2", "FM-3.3"),
]


def test_the_order_of_the_codes_is_fixed() -> None:
    assert [mode.value for mode in MODES] == CODES
    assert [mode.index for mode in MODES] == list(range(14))


def test_every_mode_is_described_once() -> None:
    assert len({mode.title for mode in MODES}) == 14
    assert len({mode.definition for mode in MODES}) == 14
    for mode in MODES:
        assert mode.definition.startswith("The agent")
        assert mode.definition.endswith(".")


def test_groups_follow_the_first_digit() -> None:
    groups = {mode.group: mode.value[3] for mode in MODES}
    assert groups == {
        "Specification issues": "1",
        "Inter-agent misalignment": "2",
        "Task verification": "3",
    }


@pytest.mark.parametrize("form", ["FM-{}", "EM-{}", "fm_{}", "FM {}", "FM{}", "{}", " {}\n"])
@pytest.mark.parametrize("mode", MODES)
def test_parse_reads_every_spelling(form: str, mode: ErrorMode) -> None:
    assert ErrorMode.parse(form.format(mode.value[3:])) is mode


@pytest.mark.parametrize(
    "text", ["", "FM-1.6", "FM-3.4", "FM-0.1", "FM-2.44", "FM-12.4", "XM-2.4", "2,4", "2"]
)
def test_parse_refuses_what_is_no_code(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected one of the 14 codes FM-1\.1 to FM-3\.3, got"):
        ErrorMode.parse(text)
