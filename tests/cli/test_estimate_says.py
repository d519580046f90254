"""Notes of ``jaxpfl estimate`` below its tables, about privacy and about own data that cannot be scored."""

import json
from pathlib import Path

import numpy as np
import pytest
from command import jaxpfl


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.csv"
    x = np.random.default_rng(0).normal(size=(20, 4))
    path.write_text("client,value\n" + "".join(f"c{i},{value}\n" for i, row in enumerate(x) for value in row))
    return path


@pytest.mark.slow
def test_own_private_means(capsys, own: Path):
    said = jaxpfl(capsys, "estimate", "gaussian", "--csv", own, "--epsilon", "1", "--radius", "2").out
    assert "private: every client's message by itself, epsilon 1, delta 1e-05, mechanism analytic, each entry" in said
    assert "taken for public: sigma_theta 0.1, sigma_x 0.5, radius 2, the clients' numbers of samples" in said
    assert "not private: the rest, with what is learned of all and the intervals" in said
    assert "private" not in jaxpfl(capsys, "estimate", "gaussian", "--csv", own).out


@pytest.mark.slow
def test_private_probabilities(capsys, tmp_path: Path):
    line = "private: every client's message by itself, epsilon 3, pure, mechanism one-bit"
    few = ["--clients", "20", "--samples", "3", "--repetitions", "2"]
    assert line in jaxpfl(capsys, "estimate", "bernoulli", *few, "--epsilon", "3").out
    path = tmp_path / "own.csv"
    path.write_text("id,x,y,z\na,1,0,1\nb,0,0,1\nc,1,1,1\nd,0,1,0\n")
    said = jaxpfl(capsys, "estimate", "bernoulli", "--csv", path, "--values", "x,y,z", "--epsilon", "3").out
    assert line in said
    assert "taken for public: the clients' numbers of samples; not private: the rest" in said


@pytest.mark.slow
def test_pairs(capsys, tmp_path: Path):
    path, folder = tmp_path / "own.csv", tmp_path / "o"
    path.write_text("id,x1,x2\na,1,2\nb,2,2.5\nc,3,1\n")
    pairs = ["--csv", path, "--values", "x1,x2"]
    result = jaxpfl(capsys, "estimate", "gaussian", *pairs, "--output", folder)
    assert result.status == 0, result.err
    assert "own.csv: 3 clients\nno errors on held-out samples: no client has 3 samples" in result.out
    assert "learned of all: mean 1.917" in result.out
    assert len((folder / "estimates.csv").read_text().splitlines()) == 4
    assert "not_scored" in json.loads((folder / "summary.json").read_text())
    assert "not_scored" in jaxpfl(capsys, "estimate", "gaussian", *pairs, "--json").json
