from fedloom.core import errors


def test_exit_codes():
    codes = {e.__name__: e.exit_code for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)}
    assert codes.pop("Interrupted") == 130
    assert {n for n, c in codes.items() if c == 2} == {"ConfigError", "DataError", "CheckpointError"}
    assert {c for n, c in codes.items()} == {1, 2}
    assert issubclass(errors.ConfigError, ValueError)


def test_unknown_names_get_the_closest_match():
    text = errors.unknown("method", "fedprx", ["fedprox", "fedavg"])
    assert text == "unknown method 'fedprx'. Did you mean 'fedprox'? Known: fedavg, fedprox."
    assert errors.closest("zzz", ["fedavg"]) == ""
