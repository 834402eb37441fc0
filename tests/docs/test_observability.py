"""Every alert is on the page, with its severity, and nothing else is."""

import re
from pathlib import Path

import yaml

from maitred.config.loader import load

ROOT = Path(__file__).parents[2]


def test_the_page_and_the_rules_name_the_same_alerts():
    groups = yaml.safe_load((ROOT / "deploy/prometheus/rules/alerts.yml").read_text())["groups"]
    real = {rule["alert"]: rule["labels"]["severity"] for group in groups for rule in group["rules"]}
    page = (ROOT / "docs/observability.md").read_text()
    assert dict(re.findall(r"^\| `(Maitred\w+)` \| (\w+) \|", page, re.MULTILINE)) == real


def test_the_example_of_objectives_is_one(tmp_path):
    example = re.search(r"```yaml\n(slos:.*?)```", (ROOT / "docs/observability.md").read_text(), re.DOTALL)
    assert example is not None
    (tmp_path / "maitred.yaml").write_text(example[1])
    slos = load(tmp_path / "maitred.yaml").config.slos
    assert [slos[name].within_s for name in ("answers", "chat-first-token", "chat-flow")] == [None, 0.5, 0.1]
