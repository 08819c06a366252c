import pytest

from fedloom.report import units


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (units.percent, 0.63333, "63.3 %"),
        (units.percent, 1.0, "100.0 %"),
        (units.percent, -0.00001, "0.0 %"),
        (units.points, 0.25, "25.0 pp"),
        (units.points, -0.05, "−5.0 pp"),
        (units.signed_points, 0.05, "+5.0 pp"),
        (units.signed_points, -0.25, "−25.0 pp"),
        (units.signed_points, 0.0001, "0.0 pp"),
        (units.decimal, 2.302585, "2.303"),
        (units.count, 1234567, "1\u2009234\u2009567"),
        (units.short_count, 1_540_000, "1.54 M"),
        (units.short_count, 999, "999"),
        (units.short_count, 0, "0"),
        (units.byte_size, 0, "0 B"),
        (units.byte_size, 1536, "1.5 KiB"),
        (units.byte_size, 512 * 2**20, "512 MiB"),
        (units.byte_size, 2**70, "1048576 PiB"),
        (units.duration, 0.0, "0 ms"),
        (units.duration, 0.85, "850 ms"),
        (units.duration, 0.9996, "1.0 s"),
        (units.duration, 12.34, "12.3 s"),
        (units.duration, 59.96, "1 min 00 s"),
        (units.duration, 245, "4 min 05 s"),
        (units.duration, 7380, "2 h 03 min"),
    ],
)
def test_written_values(write, value, text):
    assert write(value) == text
    assert write(None) == "–"
