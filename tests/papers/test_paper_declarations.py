"""Declarations of the papers' tables and figures: each makes runs that can be run, beside values in print."""

import dataclasses

import pytest

from jaxpfl import JaxpflError, algorithms
from jaxpfl.algorithms.parts import optimizers
from jaxpfl.benchmarks.papers import board, estimate, reaching, registry, results, run, train
from jaxpfl.benchmarks.papers.declared import UNPRINTED, Estimation, Reaching, Students, Training, slug
from jaxpfl.runs.config import resolve, spec_for
from jaxpfl.runs.setup import prepare
from jaxpfl.runs.sweep.grid import applied

EVERY = list(registry.EXPERIMENTS.values())
CASES = [(one, case) for one in EVERY for case in one.cases]
TRAININGS = [case for _, case in CASES if isinstance(case, Training)]
TRAININGS += [case.training for _, case in CASES if isinstance(case, Students | Reaching)]
ESTIMATIONS = [case for _, case in CASES if isinstance(case, Estimation)]


def rows_of(case):
    """Label, own setting and printed value of each row."""
    if isinstance(case, Students):
        return [(label, "", value) for label, value in case.printed.items()]
    if isinstance(case, Reaching):  # two rows of each, one of which has the printed value
        return [
            (row.label, part, row.printed if part == reaching.ROUNDS else UNPRINTED)
            for row in case.training.contenders
            for part in reaching.PARTS
        ]
    if isinstance(case, Training) and case.every is not None:  # three rows of each, one of which has the printed value
        parts = (board.LAST, board.BEST, board.EQUAL)
        return [
            (row.label, part, row.printed if part == board.BEST else UNPRINTED)
            for row in case.contenders
            for part in parts
        ]
    rows = case.contenders if isinstance(case, Training) else case.estimates
    return [(row.label, getattr(row, "setting", ""), row.printed) for row in rows]


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
        assert "without numbers" in one.note or "other data" in one.note
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
@pytest.mark.filterwarnings("ignore:.* changes nothing:jaxpfl.JaxpflWarning")  # a setting of the case's other rows
@pytest.mark.parametrize("case", TRAININGS, ids=setting)
def test_every_row_can_be_run(case):
    """Also those that a quick run leaves out: with the case's participation, validation examples and privacy."""
    for contender in case.contenders:
        config = resolve(train.config_of(case, contender, quick=True))
        prepare(config, (contender.method,)).simulation(contender.method)


@pytest.mark.parametrize("case", ESTIMATIONS, ids=setting)
def test_estimations_have_settings_that_can_be_studied(case):
    for quick in (False, True):
        estimate.settings_of(case, quick=quick)


def test_a_quick_run_of_a_table_that_is_not_scaled_down_is_the_full_one():
    assert [one.name for one in EVERY if not one.scales] == ["adaped-elections", "network-demo"]


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


def test_the_printed_values_of_table_1():
    of = {row.label: row.printed for row in registry.get("adaped-table1-mnist").cases[0].contenders}
    assert (of["AdaPeD"].value, of["AdaPeD"].std) == (98.53, 0.11)
    assert (of["FML"].value, of["FML"].std) == (97.93, 0.33)
    of = {row.label: row.printed for row in registry.get("persfl-ds2-mnist").cases[0].contenders}
    assert (of["PersFL"].value, of["PersFL"].std) == (88.0, 1.3)


def test_the_printed_choices_are_means_over_users():
    case = registry.get("persfl-table5-mnist").cases[0]
    assert case.printed["T"].value == pytest.approx(1.08)
    assert case.printed["lambda"].value == pytest.approx(0.035)


def test_the_printed_rounds_are_run():
    case = registry.get("persfl-ds3-cifar10").cases[0]
    rounds = {row.label: train.config_of(case, row).rounds for row in case.contenders}
    assert rounds == {"FedAvg": 100, "PersFL": 50, "FedPer": 100, "pFedMe": 800, "Per-FedAvg": 1000}


def test_methods_come_near_their_best_within_the_printed_rounds_or_a_hundred():
    first, second, _ = registry.get("persfl-table7-mnist").cases
    limits, printed = (
        [{row.label: of(case.training, row) for row in case.training.contenders} for case in (first, second)]
        for of in (lambda case, row: train.config_of(case, row).rounds, lambda case, row: row.printed.value)
    )
    assert limits == [{"FedAvg": 100, "PersFL": 100, "FedPer": 100, "pFedMe": 800, "Per-FedAvg": 800}] * 2
    assert printed[1] == {"FedAvg": 50, "PersFL": 25, "FedPer": 50, "pFedMe": 800, "Per-FedAvg": 800}
    assert reaching.stops_of(first, train.config_of(first.training, first.training.contenders[0]), quick=False)[0] == 5


@pytest.mark.parametrize(("data", "stops"), [("mnist", 20), ("cifar10", 10)])
def test_methods_are_scored_as_often_as_their_note_says(data, stops):
    experiment = registry.get(f"persfl-table7-{data}")
    assert f"first of {stops} scorings" in experiment.note
    for case in experiment.cases:
        for row in case.training.contenders:
            at = reaching.stops_of(case, train.config_of(case.training, row), quick=False)
            assert len(at) == stops
            assert at[-1] == row.rounds


def settings_of(name, *, at=None):
    """Hyper-parameters of each row, as its runs have them: at a value of its search, if it has one."""
    found, searched = {}, {}
    (case,) = registry.get(name).cases
    for row in case.contenders:
        searched[row.label] = axes = train.axes_of(case, row)
        config = applied(train.config_of(case, row), dict.fromkeys(axes, at))
        config = dataclasses.replace(resolve(config), model="cnn")
        found[row.label] = vars(spec_for(config, row.method, (row.method,)).hp)
    return found, searched


@pytest.mark.parametrize(
    ("name", "epoch", "adaped", "perfedavg", "pfedme"),
    [
        ("adaped-table1-mnist", 60, (0.1, 4, 0.5, 0.03), (0.075, 0.001), (0.5, 0.2)),
        ("adaped-table1-femnist", 60, (0.1, 3.5, 0.5, 0.05), (0.075, 0.001), (0.5, 0.2)),
        ("adaped-table1-cifar10", 60, (0.1, 3.5, 0.5, 0.05), (0.075, 0.001), (0.5, 0.2)),
        ("adaped-table1-cifar100", 40, (0.075, 4, 1, 0.05), (0.075, 0.001), (0.5, 0.2)),
        ("adaped-table4", 40, (0.1, 3, 1, 0.05), (0.1, 0.0001), (0.1, 0.1)),
        ("adaped-table5", 40, (0.075, 4, 1, 0.05), (0.1, 0.0001), (0.1, 0.1)),
    ],
)
def test_rows_have_the_rates_that_print_states_and_search_the_others(name, epoch, adaped, perfedavg, pfedme):
    """Ozkara et al. 2023, appendices K.1 and K.2; the first version for MNIST."""
    found, searched = settings_of(name, at=0.15)
    assert {own["decay_every"] for own in found.values()} == {epoch}
    own = found["AdaPeD"]
    assert (own["lr"], own["psi_init"], own["psi_floor"], own["lr_psi"]) == adaped
    assert own["lr_global"] == own["lr"]
    assert (found["Per-FedAvg"]["lr"], found["Per-FedAvg"]["alpha"]) == perfedavg
    assert (found["pFedMe"]["lam"], found["pFedMe"]["lr_global"]) == pfedme
    assert found["pFedMe"]["lr"] == 0.15
    own = found["QuPeD (FP)"]
    assert (own["lr"], own["lr_global"], own["lam"]) == (0.1, 0.1, 0.25)
    own = found["FML"]
    assert (own["lr"], own["lr_global"], own["alpha"], own["beta"]) == (0.15, 0.15, 0.25, 0.25)
    assert [label for label, axes in searched.items() if axes] == ["FedAvg", "FedAvg+", "pFedMe", "FML"]
    largest = {max(values) for axes in searched.values() for values in axes.values()}
    assert largest == {0.2 if name == "adaped-table1-mnist" else 0.3}


def test_the_writers_digits_search_the_papers_sets_of_rates():
    early, late = registry.get("adaped-table1-writers").cases
    for case, largest in ((early, 0.2), (late, 0.3)):
        values = [own for row in case.contenders for own in train.axes_of(case, row).values()]
        assert {(min(own), max(own)) for own in values} == {(0.05, largest)}


def test_the_rate_of_pfedmes_global_step_stays_where_print_is_silent():
    case = registry.get("persfl-ds1-mnist").cases[0]
    axes = {row.label: set(train.axes_of(case, row)) for row in case.contenders}
    assert axes.pop("pFedMe") == {"pfedme.lr"}
    assert all(own == {"lr"} for own in axes.values())


def test_the_printed_deviations_of_the_variants():
    for name, expected in {
        "persfl-table4-cifar10": [5.0, 1.8, 7.5],
        "persfl-table4-mnist": [0.3, 1.2, 0.3],
        "persfl-table6-cifar10": [4.9, 1.6, 7.4],
        "persfl-table6-mnist": [0.3, 1.3, 0.4],
    }.items():
        assert [case.contenders[1].printed.std for case in registry.get(name).cases] == expected


def test_readings_of_print_are_in_the_notes():
    def said(name):
        one = registry.get(name)
        return "; ".join([one.note, *(getattr(case, "note", "") for case in one.cases)])

    assert "K.2" in said("adaped-table1-cifar100")
    assert "tau is unstated" in said("adaped-table4")
    assert "2000" in said("histograms-table1")
    assert "95 %" in said("histograms-table1")
    assert "are ours" in said("persfl-table5-mnist")
    assert "one seed" in said("persfl-lambda-T")


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(JaxpflError, match="did you mean 'adaped-table2'"):
        registry.get("adapedtable2")


@pytest.mark.parametrize("found", results.committed(), ids=lambda one: one.name)
def test_remarks_are_not_cut_in_two(found):
    """A semicolon parts them, and so must stand in none."""
    for row in found.rows:
        for remark in row.note.split("; "):
            assert remark.count("(") == remark.count(")"), remark
