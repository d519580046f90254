"""The studies of planted clusters and of compressed updates as commands: JSON, tables, plots, refusals in one line."""

import json

import pytest
from command import jaxpfl

PLANTED = "planted:clients=3,clusters=1,examples=20,dim=4"
SMALL = {
    "network": [
        *("--clients", "8", "--clusters", "2", "--samples", "20", "--dim", "3", "--rounds", "5", "--repetitions", "1"),
        *("--neighbours", "3", "--methods", "network-lasso", "ifca", "--strengths", "0.01", "0.1"),
    ],
    "compression": [
        *("--data", PLANTED, "--steps", "20", "--rates", "1"),
        *("--compressors", "lossless", "sign", "tv:gamma=0.01", "tv:gamma=0.01,codebook=3"),
    ],
}
PLOTS = {"network": {"path.png"}, "compression": {"bits.png", "bits-total-variation.png"}}


@pytest.mark.slow
@pytest.mark.parametrize("study", ["network", "compression"])
def test_results_and_plots(capsys, tmp_path, study):
    result = jaxpfl(capsys, "estimate", study, *SMALL[study], "--json", "--output", tmp_path / "out")
    assert result.status == 0, result.err
    assert result.json["study"] == study
    assert {path.name for path in (tmp_path / "out" / "plots").iterdir()} == PLOTS[study]
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == result.json
    if study == "network":
        assert set(result.json["methods"]) == {"network-lasso", "ifca"}
        assert len(result.json["methods"]["ifca"]["path"]["ari"]) == 2
    else:
        assert list(result.json["compressors"]) == SMALL["compression"][7:]
        assert result.json["demo"]["points"]["constant"]["100"] == pytest.approx([0.4, 0, 0, 0], abs=1e-6)


@pytest.mark.slow
def test_the_tables(capsys):
    result = jaxpfl(capsys, "estimate", "compression", *SMALL["compression"])
    assert result.status == 0, result.err
    for words in ("tv:gamma=0.01,codebook=3", "to 0.001", "constant: (0.4, 0, 0, 0)", "5 parameters, 20 steps"):
        assert words in result.out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["network", "--clusters", "1"], "clusters must be 2 to the 50 clients, got 1"),
        (["network", "--neighbours", "50"], "neighbours must be fewer than the 50 clients, got 50"),
        (["network", "--methods", "fedprox"], "unknown method of the study 'fedprox'"),
        (["compression", "--data", "digits"], "data set 'digits' has 10 classes, expected 2 of plain inputs"),
        (["compression", "--compressors", "qsgd:level=4"], "unknown argument of compressor qsgd 'level'"),
        (["compression", "--targets", "0"], "targets must be > 0 and finite, got 0.0"),
    ],
)
def test_refusals(capsys, args, message):
    result = jaxpfl(capsys, "estimate", *args, "--json")
    assert result.status == 2
    assert result.out == ""
    assert message in result.err
    assert result.err.count("\n") == 1
