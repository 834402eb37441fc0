"""What can be wrong with a ladder."""

import re
from pathlib import Path

import pytest

from maitred.admission.degradation import DegradationStep, ladder_faults
from maitred.config.loader import load
from maitred.config.render import to_yaml
from maitred.core.errors import ConfigInvalid


@pytest.mark.parametrize(
    ("steps", "place", "text"),
    [
        ([DegradationStep(step="shorten")], "m[0].to_tokens", "Must be set"),
        ([DegradationStep(step="model")], "m[0].to", "Must be set"),
        ([DegradationStep(step="overflow")], "m[0].to", "Must be set: the step `overflow` needs to know it"),
        ([DegradationStep(step="shorten", to_tokens=8, to="x")], "m[0].to", "Belongs to the step `model`"),
        ([DegradationStep(step="model", to="x", to_tokens=9)], "m[0].to_tokens", "Belongs to the step `shorten`"),
        (
            [DegradationStep(step="shorten", to_tokens=8), DegradationStep(step="shorten", to_tokens=8)],
            "m[1].to_tokens",
            "shortens to 8 already",
        ),
        ([DegradationStep(step="overflow", to="x"), DegradationStep(step="overflow", to="x")], "m[1].step", "Keep one"),
        ([DegradationStep(step="model", to="x"), DegradationStep(step="model", to="x")], "m[1].step", "Keep one"),
    ],
)
def test_a_fault_names_its_setting(steps: list[DegradationStep], place: str, text: str) -> None:
    ((key, message),) = ladder_faults(steps, "m")
    assert key == place
    assert text in message


def test_a_sound_ladder_has_no_faults() -> None:
    steps = [
        DegradationStep(step="shorten", to_tokens=512),
        DegradationStep(step="shorten", to_tokens=128),
        DegradationStep(step="model", to="small"),
        DegradationStep(step="model", to="smaller"),
        DegradationStep(step="overflow", to="provider"),
    ]
    assert list(ladder_faults(steps, "m")) == []


LADDER = """
model:
  degradation:
    - step: shorten
      to_tokens: 128
    - {step: model, to: small}
    - {step: overflow, to: provider}
"""


def test_a_ladder_is_read_shown_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("maitred.yaml").write_text(LADDER)
    loaded = load()
    assert [step.step for step in loaded.config.model.degradation] == ["shorten", "model", "overflow"]
    shown = to_yaml(loaded, with_origins=True)
    assert re.search(r"    - step: shorten +# maitred.yaml:4\n      to_tokens: 128 +# maitred.yaml:5\n", shown), shown
    Path("shown.yaml").write_text(shown)
    assert load(Path("shown.yaml")).config == loaded.config


def test_a_faulty_ladder_is_found_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "maitred.yaml"
    file.write_text(LADDER.replace("to_tokens: 128", "to: small"))
    with pytest.raises(ConfigInvalid) as caught:
        load(file)
    assert "maitred.yaml:5: model.degradation[0].to: Belongs to the step `model`" in caught.value.message
    assert "model.degradation[0].to_tokens: Must be set" in caught.value.message
