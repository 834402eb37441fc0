"""Every alert is on the page, with its severity, and nothing else is."""

import re
from pathlib import Path

import yaml

from maitred.config.loader import load
from maitred.observe.diagnosis.diagnosis import diagnose
from maitred.observe.diagnosis.snapshot import GrowthVitals, HealthSnapshot

ROOT = Path(__file__).parents[2]


def test_the_page_and_the_rules_name_the_same_alerts():
    groups = yaml.safe_load((ROOT / "deploy/prometheus/rules/alerts.yml").read_text())["groups"]
    real = {rule["alert"]: rule["labels"]["severity"] for group in groups for rule in group["rules"]}
    page = (ROOT / "docs/observability.md").read_text()
    assert dict(re.findall(r"^\| `(Maitred\w+)` \| (\w+) \|", page, re.MULTILINE)) == real


def test_the_alert_and_the_doctor_mean_the_same_by_a_leak():
    groups = yaml.safe_load((ROOT / "deploy/prometheus/rules/alerts.yml").read_text())["groups"]
    (rule,) = [rule for group in groups for rule in group["rules"] if rule["alert"] == "MaitredLeak"]
    least = {
        resource: float(value)
        for resources, value in re.findall(r'resource=~?"([\w|]+)"} >= (\d+)', rule["expr"])
        for resource in resources.split("|")
    }

    def leaks(resource, per_hour, trend, level):
        growth = GrowthVitals(process="gateway", resource=resource, per_hour=per_hour, trend=trend, level=level)
        return bool(diagnose(HealthSnapshot(seconds=5.0, growth=[growth])))

    assert least.keys() == {"memory_bytes", "open_fds", "tasks", "threads"}
    assert "trend >= 0.6" in rule["expr"]
    assert "per_hour >= 0.01 *" in rule["expr"]
    for resource, per_hour in least.items():
        assert leaks(resource, per_hour, 0.6, 100 * per_hour)
        assert not leaks(resource, per_hour * 0.99, 0.6, 100 * per_hour)
        assert not leaks(resource, per_hour, 0.59, 100 * per_hour)
        assert not leaks(resource, per_hour, 0.6, 101 * per_hour)


def test_the_example_of_objectives_is_one(tmp_path):
    example = re.search(r"```yaml\n(slos:.*?)```", (ROOT / "docs/observability.md").read_text(), re.DOTALL)
    assert example is not None
    (tmp_path / "maitred.yaml").write_text(example[1])
    slos = load(tmp_path / "maitred.yaml").config.slos
    assert [slos[name].within_s for name in ("answers", "chat-first-token", "chat-flow")] == [None, 0.5, 0.1]
