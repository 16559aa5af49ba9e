"""The numbers that papers print, against an example worked out by hand."""

import json

import pytest

from krnet.learners.scores import CIFAR_IMAGE_BYTES, forgetting, mean, scores, spread, storage, summarize

# A base task of 100 test images, then tasks of 20 and 40.
COUNTS = [100, 20, 40]
CORRECT = [[80], [60, 15], [50, 20, 30]]


@pytest.fixture
def found():
    return scores(CORRECT, COUNTS)


def test_a_row_of_the_matrix_holds_the_share_of_right_answers_by_task(found):
    assert found["accuracy_matrix"] == [[0.8], [0.6, 0.75], [0.5, 1.0, 0.75]]


def test_accuracy_weighs_every_image_the_same_and_task_mean_every_task(found):
    assert found["accuracy"] == pytest.approx([80 / 100, 75 / 120, 100 / 160])
    assert found["task_mean"] == pytest.approx([0.8, (0.6 + 0.75) / 2, (0.5 + 1.0 + 0.75) / 3])
    assert found["last"] == pytest.approx(0.625)
    # 0.625 against 0.75: with a large base task the two are far apart.
    assert found["task_mean"][-1] - found["last"] == pytest.approx(0.125)


def test_averages_are_over_tasks_with_and_without_the_base_task(found):
    assert found["average"] == pytest.approx((0.8 + 0.625 + 0.625) / 3)
    assert found["average_without_base"] == pytest.approx(0.625)
    assert found["average_task_mean"] == pytest.approx((0.8 + 0.675 + 0.75) / 3)
    assert found["average_task_mean_without_base"] == pytest.approx((0.675 + 0.75) / 2)


def test_forgetting_is_from_the_best_before_the_last_task(found):
    # Base task: best 0.8, now 0.5. Task 1: 0.75, now 1.0, which counts as negative. Task 2: new, not counted.
    assert found["forgetting"] == pytest.approx((0.3 - 0.25) / 2)
    assert "best" in found["forgetting_definition"]


def test_forgetting_looks_at_the_best_and_not_at_the_first():
    matrix = [[0.5], [0.9, 0.8], [0.7, 0.6, 1.0], [0.4, 0.7, 0.9, 1.0]]
    assert forgetting(matrix) == pytest.approx(((0.9 - 0.4) + (0.8 - 0.7) + (1.0 - 0.9)) / 3)


def test_after_one_task_there_is_nothing_to_forget_and_no_average_without_it():
    found = scores([[9]], [10])
    assert found["last"] == found["average"] == found["task_mean"][0] == 0.9
    assert found["forgetting"] is None and found["average_without_base"] is None
    assert found["average_task_mean_without_base"] is None


def test_scores_are_plain_fractions_for_json(found):
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert all(0 <= value <= 1 for row in found["accuracy_matrix"] for value in row)


def test_the_mean_of_nothing_is_none():
    assert mean([]) is None and mean([1.0, 2.0]) == 1.5


def test_storage_adds_up_its_parts_and_tells_how_many_images_that_would_be():
    assert storage({"old model": 3072, "exemplars": 6144}) == {
        "old model": 3072, "exemplars": 6144, "total": 9216, "equivalent_exemplars": 3.0,
    }  # fmt: skip
    assert CIFAR_IMAGE_BYTES == 3 * 32 * 32
    assert storage({"exemplars": 640}, image_bytes=64)["equivalent_exemplars"] == 10
    assert storage({}) == {"total": 0, "equivalent_exemplars": 0.0}


def test_a_task_that_was_left_out_leaves_no_averages_and_no_forgetting():
    found = scores([CORRECT[0], None, CORRECT[2]], COUNTS)
    assert found["accuracy_matrix"] == [[0.8], None, [0.5, 1.0, 0.75]]
    assert found["accuracy"] == [0.8, None, 0.625] and found["last"] == 0.625
    averages = [f"average{weighting}{base}" for weighting in ("", "_task_mean") for base in ("", "_without_base")]
    assert all(found[name] is None for name in [*averages, "forgetting"])


def test_spread_is_the_mean_and_the_sample_deviation():
    # Mean 5; squared deviations 9 + 1 + 1 + 1 + 0 + 0 + 4 + 16 = 32, over n - 1 = 7.
    assert spread([2, 4, 4, 4, 5, 5, 7, 9]) == {"mean": 5.0, "std": pytest.approx((32 / 7) ** 0.5)}
    assert spread([0.5, 0.7]) == {"mean": pytest.approx(0.6), "std": pytest.approx(0.02**0.5)}
    assert spread([3, 3, 3]) == {"mean": 3.0, "std": 0.0}


def test_one_run_has_no_deviation_and_a_number_that_a_run_lacks_has_no_mean():
    assert spread([0.5]) == {"mean": 0.5, "std": None}
    assert spread([0.5, None]) == {"mean": None, "std": None}
    assert spread([None]) == spread([]) == {"mean": None, "std": None}


def a_run(method, last, parts, **more):
    numbers = {"last": last, "average": last + 0.1, "average_without_base": last, "forgetting": None}
    return {
        "method": method, "row": "cnn", **numbers, "storage_bytes": storage(parts, 100), "network_bytes": 400,
        "seconds": 60.0, **more,
    }  # fmt: skip


def test_the_summary_is_by_method_with_bytes_by_part():
    kril = [a_run("kril", 0.4, {"recording": 1000}), a_run("kril", 0.6, {"recording": 1000, "means": 200}, seconds=64)]
    found = summarize([kril[0], a_run("joint", 0.8, {"images": 5000}), kril[1]])
    assert [(entry["method"], entry["row"], entry["num_runs"]) for entry in found] == [
        ("kril", "cnn", 2),
        ("joint", "cnn", 1),
    ]
    first, second = found
    assert first["last"] == {"mean": pytest.approx(0.5), "std": pytest.approx(0.02**0.5)}
    assert first["average"]["mean"] == pytest.approx(0.6) and first["forgetting"] == {"mean": None, "std": None}
    assert first["seconds"] == {"mean": 62.0, "std": pytest.approx(8**0.5)}
    assert first["network_bytes"] == {"mean": 400.0, "std": 0.0}
    # A part that one run does not have counts as 0 there.
    assert first["storage_bytes"]["recording"] == {"mean": 1000.0, "std": 0.0}
    assert first["storage_bytes"]["means"] == {"mean": 100.0, "std": pytest.approx(20_000**0.5)}
    assert first["storage_bytes"]["total"] == {"mean": 1100.0, "std": pytest.approx(20_000**0.5)}
    assert first["storage_bytes"]["equivalent_exemplars"]["mean"] == pytest.approx(11)
    assert second["last"] == {"mean": 0.8, "std": None}


def test_every_classifier_of_a_method_has_its_own_line_of_the_summary():
    def two_rows(cnn, nme):
        own = a_run("icarl", nme, {}, row="nme")
        return {**own, "rows": {"cnn": a_run("icarl", cnn, {}), "nme": own}}

    cnn, nme = summarize([two_rows(0.2, 0.5), two_rows(0.4, 0.5)])
    assert (cnn["row"], nme["row"]) == ("cnn", "nme")
    assert cnn["last"]["mean"] == pytest.approx(0.3) and nme["last"] == {"mean": 0.5, "std": 0.0}
