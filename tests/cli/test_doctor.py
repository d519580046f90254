"""``jaxpfl doctor`` where something is broken; `test_folder_commands` has it where all is well."""

from command import jaxpfl

from jaxpfl.runs.reports import doctor


def test_a_check_that_fails_is_told(capsys, monkeypatch):
    def broken() -> str:
        raise ImportError("no module named x")

    monkeypatch.setattr(doctor, "_CHECKS", {"training": broken})
    result = jaxpfl(capsys, "doctor")
    assert (result.status, result.err) == (2, "error: the self-check of training failed\n")
    assert "ImportError: no module named x" in result.out
