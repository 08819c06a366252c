import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core.errors import DataError
from fedloom.evaluate.matrix import AccuracyMatrix, forgetting_lander_compat, forgetting_mfcl_compat

FALLING = AccuracyMatrix.from_lists([[0.8], [0.5, 0.7], [0.4, 0.6, 0.9]])
RISING = AccuracyMatrix.from_lists([[0.1], [0.4, 0.7], [0.3, 0.6, 0.9]])
fractions = st.floats(0, 1)


def lower_triangles(min_size=1):
    return st.integers(min_size, 6).flatmap(
        lambda t: st.tuples(*(st.lists(fractions, min_size=i + 1, max_size=i + 1) for i in range(t)))
    )


def test_worked_examples():
    assert FALLING.curve() == pytest.approx([0.8, 0.6, 0.633333], abs=1e-6)
    assert FALLING.final_accuracy == pytest.approx(0.633333, abs=1e-6)
    assert FALLING.average_incremental_accuracy == pytest.approx(0.677778, abs=1e-6)
    assert FALLING.forgetting == pytest.approx(0.25)
    assert FALLING.backward_transfer == pytest.approx(-0.25)
    assert RISING.forgetting == pytest.approx(0.10)
    assert RISING.backward_transfer == pytest.approx(0.05)


def test_official_scripts_worked_examples():
    assert forgetting_lander_compat(FALLING) == pytest.approx(0.166667, abs=1e-6)
    assert forgetting_lander_compat(RISING) == pytest.approx(-0.033333, abs=1e-6)
    assert forgetting_mfcl_compat(FALLING) == pytest.approx(-0.097333, abs=1e-6)


def test_accuracy_is_weighted_by_examples():
    matrix = AccuracyMatrix.from_lists([[0.5], [1.0, 0.0]], examples=[30, 10])
    assert matrix.curve() == [0.5, 0.75]
    assert AccuracyMatrix.from_lists([[0.5, None]], examples=[30, 0]).final_accuracy == 0.5


def test_one_stage_has_no_forgetting():
    matrix = AccuracyMatrix.from_lists([[0.7]])
    assert matrix.final_accuracy == matrix.average_incremental_accuracy == 0.7
    assert matrix.forgetting is matrix.backward_transfer is None
    assert forgetting_lander_compat(matrix) is forgetting_mfcl_compat(matrix) is None


def test_no_stage():
    matrix = AccuracyMatrix(examples=(10, 10))
    assert matrix.final_accuracy is matrix.average_incremental_accuracy is matrix.forgetting is None
    assert matrix.curve() == matrix.to_lists() == []


def test_stages_without_evaluation_are_left_out():
    matrix = AccuracyMatrix.from_lists([[0.8, None], [None, None], [0.6, 0.9]])
    assert matrix.curve() == [0.8, None, 0.75]
    assert matrix.average_incremental_accuracy == pytest.approx(0.775)
    assert matrix.forgetting == pytest.approx(0.2)


def test_tasks_that_arrive_early_or_together():
    early = AccuracyMatrix.from_lists([[0.5, 0.9], [0.6, 0.4], [0.5, 0.6]])
    assert early.forgetting == pytest.approx((0.1 + 0.3) / 2)
    assert early.backward_transfer == pytest.approx((0.0 - 0.3) / 2)


def test_entries_before_the_arrival_enter_no_formula():
    full = AccuracyMatrix.from_lists([[0.8, 1.0, 0], [0.5, 0.7, 1.0], [0.4, 0.6, 0.9]], arrival=[0, 1, 2])
    assert full.curve() == FALLING.curve()
    assert (full.forgetting, full.backward_transfer) == (FALLING.forgetting, FALLING.backward_transfer)
    assert full.arrived_at(2) == 2
    assert FALLING.arrived_at(2) == 2


def test_growing_row_by_row():
    matrix = AccuracyMatrix(examples=(1, 1, 1))
    for row in ([0.8, None, float("nan")], [0.5, 0.7, None], [0.4, 0.6, 0.9]):
        matrix = matrix.with_row(row)
    assert matrix == FALLING
    assert (matrix.num_stages, matrix.num_tasks) == (3, 3)


def test_bad_matrices_are_refused():
    with pytest.raises(ValueError, match="needs 2 entries"):
        AccuracyMatrix(((0.5,),), (1, 1))
    with pytest.raises(ValueError, match="got 80"):
        AccuracyMatrix.from_lists([[80.0]])
    with pytest.raises(ValueError, match="one stage per task"):
        AccuracyMatrix.from_lists([[0.5]], arrival=[0, 1])


@pytest.mark.parametrize("text", ["", "a,b\n", "stage,task_0\n", "stage,task_0,examples_0\n0,x,1\n"])
def test_unreadable_csv(text):
    with pytest.raises(DataError, match="not readable"):
        AccuracyMatrix.from_csv(text)


def test_csv_layout():
    assert AccuracyMatrix.from_lists([[0.5], [1.0, 0.25]], [3, 4]).to_csv() == (
        "stage,task_0,task_1,examples_0,examples_1\n0,0.5,,3,4\n1,1.0,0.25,3,4\n"
    )


@given(lower_triangles(), st.integers(1, 99))
def test_csv_and_lists_round_trip(rows, n):
    matrix = AccuracyMatrix.from_lists(rows, [n + j for j in range(len(rows))])
    assert AccuracyMatrix.from_csv(matrix.to_csv()) == matrix
    assert AccuracyMatrix.from_lists(matrix.to_lists(), matrix.examples) == matrix


@given(lower_triangles(min_size=2))
def test_forgetting_bounds_backward_transfer(rows):
    matrix = AccuracyMatrix.from_lists(rows)
    assert matrix.forgetting >= -matrix.backward_transfer - 1e-12
    assert -1 <= matrix.forgetting <= 1
    assert 0 <= matrix.final_accuracy <= 1
