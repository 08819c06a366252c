import pytest
import torch

from fedloom.core import errors


def test_exit_codes():
    codes = {e.__name__: e.exit_code for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)}
    assert codes.pop("Interrupted") == 130
    assert {n for n, c in codes.items() if c == 2} == {"ConfigError", "DataError", "CheckpointError"}
    assert {c for n, c in codes.items()} == {1, 2}
    assert issubclass(errors.ConfigError, ValueError)


def test_the_line_that_raised_is_the_users_own():
    def broken():
        return torch.zeros(2).reshape(3)

    for call in (broken, lambda: torch.nn.functional.linear(torch.zeros(2), torch.zeros(3, 3))):
        with pytest.raises(RuntimeError) as caught:
            call()
        line = call.__code__.co_firstlineno + (call is broken)
        assert errors.origin(caught.value) == f"test_errors.py:{line}"
    assert errors.origin(ValueError("never raised")) == ""


def test_unknown_names_get_the_closest_match():
    text = errors.unknown("method", "fedprx", ["fedprox", "fedavg"])
    assert text == "unknown method 'fedprx'. Did you mean 'fedprox'? Known: fedavg, fedprox."
    assert errors.closest("zzz", ["fedavg"]) == ""
