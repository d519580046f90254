"""Execution plans: settings like all others, declared once for help, checks, files and documentation."""

import dataclasses

import pytest

from jaxpfl import ExecutionPlan, JaxpflError
from jaxpfl.runs.config import from_mapping

WRONG = [
    ("devices", 0, "plan.devices must be auto or a positive number, got 0"),
    ("devices", True, "plan.devices must be auto or a positive number, got True"),
    ("devices", "map", "plan.devices must be auto or a positive number, got 'map'"),
    ("clients", "seven", "plan.clients must be auto, map, vmap or a positive number, got 'seven'"),
    ("clients", 1.0, "plan.clients must be auto, map, vmap or a positive number, got 1.0"),
    ("clients", None, "plan.clients must be auto, map, vmap or a positive number, got None"),
    ("clients", "9" * 5000, "plan.clients must be auto, map, vmap or a positive number, got"),
    ("runs", 2, "plan.runs must be auto, map or vmap, got 2"),
    ("rounds_per_call", 0, "plan.rounds_per_call must be at least 1, got 0"),
    ("rounds_per_call", 2.5, "plan.rounds_per_call must be a whole number, got 2.5"),
    ("donate", "no", "plan.donate must be True or False, got 'no'"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_wrong_values_are_refused_by_name(name, value, message):
    with pytest.raises(JaxpflError, match=message):
        ExecutionPlan(**{name: value})


def test_every_field_is_a_setting_that_help_documents():
    text = " ".join((ExecutionPlan.__doc__ or "").split())
    for field in dataclasses.fields(ExecutionPlan):
        assert f"{field.name}: {field.metadata['help']}" in text
    assert "Allowed: >= 1 (rounds)." in text


def test_a_plan_of_a_file_is_that_of_python():
    plan = from_mapping({"plan": {"clients": 4, "devices": "2", "runs": "map", "donate": False}}, "here").plan
    assert plan == ExecutionPlan(clients=4, devices="2", runs="map", donate=False)
