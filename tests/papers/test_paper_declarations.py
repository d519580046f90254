"""Declarations of the papers' tables and figures: each makes runs that can be run, beside values in print."""

import dataclasses

import pytest

from jaxpfl import JaxpflError, algorithms
from jaxpfl.algorithms.parts import optimizers
from jaxpfl.benchmarks.papers import board, estimate, reaching, registry, results, run, train
from jaxpfl.benchmarks.papers.declared import UNPRINTED, Estimation, Reaching, Students, Training, slug
from jaxpfl.runs.config import resolve, spec_for
from jaxpfl.runs.setup import prepare

EVERY = list(registry.EXPERIMENTS.values())
CASES = [(one, case) for one in EVERY for case in one.cases]
TRAININGS = [case for _, case in CASES if isinstance(case, Training)]
TRAININGS += [case.training for _, case in CASES if isinstance(case, Students | Reaching)]
KINDS = {
    (case.config.get("partition"), case.config.get("participation"), "privacy" in str(case.config)): case
    for case in TRAININGS
}
"""One training of each kind of split, cohort and privacy."""
ESTIMATIONS = [case for _, case in CASES if isinstance(case, Estimation)]


def rows_of(case):
    """Label, own setting and printed value of each row."""
    if isinstance(case, Students):
        return [(label, "", value) for label, value in case.printed.items()]
    if isinstance(case, Reaching):
        rows, parts, printed = case.training.contenders, reaching.PARTS, reaching.ROUNDS
    elif isinstance(case, Training) and case.every is not None:
        rows, parts, printed = case.contenders, board.PARTS, board.BEST
    else:
        rows = case.contenders if isinstance(case, Training) else case.estimates
        return [(row.label, getattr(row, "setting", ""), row.printed) for row in rows]
    # Two or three rows of each, one of which has the printed value.
    return [(row.label, part, row.printed if part == printed else UNPRINTED) for row in rows for part in parts]


def setting(case):
    return case.setting


def test_the_four_papers_have_their_tables():
    assert len(EVERY) >= 20
    papers = {one.paper.partition(",")[0] for one in EVERY}
    assert papers == {
        "Ozkara et al. 2022",
        "Ozkara et al. 2023",
        "Divi et al. 2021",
        "Setlur et al. 2023",
        "Zhao et al.",
        "PFLlib",
        "fedjax",
        "Marfoq et al. 2021 (FedEM)",
        "Li et al. 2021 (Ditto)",
    }
    assert all(slug(one.name) == one.name and one.minutes > 0 and one.what for one in EVERY)


@pytest.mark.parametrize("one", EVERY, ids=lambda one: one.name)
def test_an_experiment_has_rows_of_its_own_and_printed_values_or_says_why_not(one):
    rows = [(case.setting, own, label) for case in one.cases for label, own, _ in rows_of(case)]
    assert rows
    assert len(set(rows)) == len(rows)
    assert len({slug(f"{case} {label}") for case, _, label in rows}) == len({(case, label) for case, _, label in rows})
    values = [printed.value for case in one.cases for *_, printed in rows_of(case)]
    if all(value is None for value in values):
        assert any(why in one.note for why in ("without numbers", "no published values", "not the paper's data"))
    if one.figure is not None:
        assert all(case.x is not None for case in one.cases)
    assert all(0 <= place < len(one.cases) for place in one.quick_cases)
    assert run.units(one, quick=True) <= run.units(one, quick=False)


@pytest.mark.parametrize("case", TRAININGS, ids=setting)
def test_trainings_are_sweeps_whose_settings_exist(case):
    for contender in case.contenders:
        algorithms.get(contender.method)
        for quick in (False, True):
            config = train.config_of(case, contender, quick=quick)
            resolved = resolve(config)
            optimizers.resolve(resolved.server_optimizer)
            named = dataclasses.replace(resolved, model=resolved.model or "cnn")
            assert spec_for(named, contender.method, (contender.method,)).hp is not None
            search = train.search_of(case, contender, config)
            if search is not None:
                assert search.config.rounds < resolved.rounds
                assert not set(search.seeds) & set(train.final_of(contender, config, {}).seeds)
                assert search.config.validation_share > 0
            final = train.final_of(
                contender, config, {name: own[0] for name, own in train.axes_of(case, contender).items()}
            )
            assert final.config.validation_share == config.validation_share
            assert resolved.data == "digits" or not quick


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* has no effect:jaxpfl.JaxpflWarning")  # a setting of the case's other rows
@pytest.mark.parametrize("case", KINDS.values(), ids=setting)
def test_rows_can_be_run(case):
    """Also those that a quick run leaves out: with the case's participation, validation examples and privacy."""
    for contender in case.contenders[:2]:
        config = resolve(train.config_of(case, contender, quick=True))
        prepare(config, (contender.method,)).simulation(contender.method)


@pytest.mark.parametrize("case", ESTIMATIONS, ids=setting)
def test_estimations_have_settings_that_can_be_studied(case):
    for quick in (False, True):
        estimate.settings_of(case, quick=quick)


@pytest.mark.parametrize("found", results.committed(), ids=lambda one: one.name)
def test_results_that_come_with_the_package_are_of_the_declared_rows(found):
    one = registry.get(found.name)
    declared = {
        (label, ", ".join(text for text in (case.setting, own) if text)): (value.value, value.std)
        for case in one.cases
        for label, own, value in rows_of(case)
    }
    assert {(row.method, row.setting): (row.printed, row.printed_std) for row in found.rows}.items() <= declared.items()
    assert (found.paper, found.what) == (one.paper, one.what)


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(JaxpflError, match="did you mean 'adaped-table2'"):
        registry.get("adapedtable2")


@pytest.mark.parametrize("found", results.committed(), ids=lambda one: one.name)
def test_remarks_are_not_cut_in_two(found):
    """A semicolon parts them, and so must stand in none."""
    for row in found.rows:
        for remark in row.note.split("; "):
            assert remark.count("(") == remark.count(")"), remark
