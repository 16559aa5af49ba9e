"""Class orders: each regenerated here in another way, and compared with published lists. Task splits."""

import hashlib

import numpy as np
import pytest
import torch

from krnet.data.protocol import CUSTOM_ORDER_NAME, ORDERS, class_order, imagenet_subset, order_hash, split, subset
from krnet.errors import SettingError

# As LUCIR, PyCIL, PASS and FACIL print it.
LUCIR = """
68 56 78 8 23 84 90 65 74 76 40 89 3 92 55 9 26 80 43 38 58 70 77 1 85 19 17 50 28 53 13 81 45 82 6 59 83 16 15 44 91
41 72 60 79 52 20 10 31 54 37 95 14 71 96 98 97 2 64 66 42 22 35 86 24 34 87 21 99 0 88 27 18 94 11 12 47 25 30 46 62
69 36 61 7 63 75 5 32 4 51 48 73 93 39 67 29 49 57 33
"""
# As PODNet copied it from a run of iCaRL's code: the first list of its options/data/cifar100_3orders.yaml.
ICARL = """
87 0 52 58 44 91 68 97 51 15 94 92 10 72 49 78 61 14 8 86 84 96 18 24 32 45 88 11 4 67 69 66 77 47 79 93 29 50 57 83 17
81 41 12 37 59 25 20 80 73 1 28 6 46 62 82 53 9 31 75 38 63 33 74 27 22 36 3 16 21 60 19 70 90 89 43 5 42 65 76 40 30
23 85 2 95 56 48 71 64 98 13 99 7 34 55 54 26 35 39
"""


def numbers(text):
    return [int(number) for number in text.split()]


# ------------------------------------------------------------------ orders


def test_lucir1993_is_numpys_shuffle_of_seed_1993_and_the_published_list():
    np.random.seed(1993)
    order = np.arange(100)
    np.random.shuffle(order)
    assert class_order("lucir1993") == order.tolist() == numbers(LUCIR)


def test_gfr1993_is_what_mapping_labels_by_the_permutation_gives():
    np.random.seed(1993)
    permutation = np.random.permutation(100)
    targets = permutation[np.arange(100)]  # GFR-IL: the class with target 0 is learned first
    order = [next(label for label in range(100) if targets[label] == place) for place in range(100)]
    assert class_order("gfr1993") == order
    assert order[:10] == [69, 23, 57, 12, 89, 87, 34, 84, 3, 15]


def test_icarl_is_the_class_shuffle_after_100_shuffles_of_500_indices_and_the_published_list():
    np.random.seed(1993)
    for _ in range(100):
        np.random.shuffle(np.arange(500))
    order = np.arange(100)
    np.random.shuffle(order)
    assert class_order("icarl") == order.tolist() == numbers(ICARL)


def test_natural_is_the_data_sets_own_order():
    assert class_order("natural", 5) == [0, 1, 2, 3, 4]


def test_orders_of_seed_1993_differ_in_half_of_their_base_classes():
    lucir, gfr, icarl = (set(class_order(name)[:50]) for name in ("lucir1993", "gfr1993", "icarl"))
    assert (len(lucir & gfr), len(lucir & icarl), len(gfr & icarl)) == (24, 23, 27)


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_every_order_is_a_permutation_with_a_provenance(name):
    assert sorted(class_order(name)) == list(range(100))
    assert ORDERS[name].name == name and len(ORDERS[name].provenance) > 20


def test_making_an_order_leaves_numpys_global_generator_alone():
    np.random.seed(7)
    expected = np.random.rand()
    np.random.seed(7)
    for name in ORDERS:
        class_order(name)
    assert np.random.rand() == expected


@pytest.mark.parametrize("order", [[2, 0, 1], (2, 0, 1), np.array([2, 0, 1]), iter([2, 0, 1]), "2,0,1", " 2, 0,1 "])
def test_an_order_can_be_listed(order):
    found = class_order(order, 3)
    assert found == [2, 0, 1] and all(type(label) is int for label in found)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("lucir1994", "did you mean 'lucir1993'"),
        ("shuffled", "known orders: lucir1993, gfr1993, icarl, natural"),
        ([0, 1], "lists 2 classes"),
        ([0, 1, 1], "holds 1 where it lacks 2"),
        ([0, 1, 3], "holds 3 where it lacks 2"),
        ([0, 1, -1], "holds -1 where it lacks 2"),
        ("0,1,x", "holds 'x'"),
        ("0,1,", "holds ''"),
        ([0, 1, 2.0], "holds 2.0"),
        ([0, 2, True], "holds True"),
        ("icarl", "100 classes"),
    ],
    ids=str,
)
def test_a_wrong_order_is_refused(order, said):
    with pytest.raises(SettingError, match=said):
        class_order(order, 3)


@pytest.mark.parametrize(
    ("name", "golden"),
    [
        ("lucir1993", "997a048a5344"),
        ("gfr1993", "cb02b2567bfc"),
        ("icarl", "62e36f48cf4f"),
        ("natural", "3aab9a67460e"),
    ],
)
def test_hashes_stay_as_results_have_named_them(name, golden):
    """Never to be renewed: a changed hash means a changed order or a changed rule."""
    order = class_order(name)
    listed = ",".join(str(label) for label in order)
    assert order_hash(order) == golden == hashlib.sha256(listed.encode("ascii")).hexdigest()[:12]


# ------------------------------------------------------------------ ImageNet-Subset

WNIDS = [f"n{number:08d}" for number in range(0, 3000, 3)]


def test_imagenet_subset_is_numpys_choice_of_seed_1993_numbered_by_name():
    np.random.seed(1993)
    drawn = np.random.choice(WNIDS, 100, replace=False)
    assert drawn[:3].tolist() == [WNIDS[54], WNIDS[7], WNIDS[894]]
    assert imagenet_subset(WNIDS) == sorted(drawn.tolist())


@pytest.mark.parametrize(
    ("names", "said"),
    [(WNIDS[:100], "found 100"), (WNIDS[::-1], "sort them"), ([*WNIDS[:999], WNIDS[0]], "found 999")],
    ids=["subset", "unsorted", "twice"],
)
def test_imagenet_subset_of_other_names_is_refused(names, said):
    with pytest.raises(SettingError, match=said):
        imagenet_subset(names)


def test_subsets_go_by_name_number_or_list():
    assert subset("lucir1993")(WNIDS) == imagenet_subset(WNIDS)
    assert subset("100")(WNIDS) == subset(100)(WNIDS) == WNIDS[:100]
    assert subset(f"{WNIDS[7]},{WNIDS[2]}")(WNIDS) == subset([WNIDS[7], WNIDS[2]])(WNIDS) == [WNIDS[7], WNIDS[2]]


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("lucir1992", "no class 'lucir1992' among the 3; did you mean 'lucir1993'"),
        ("dog", "no class 'dog' among the 3; did you mean 'dogs'"),
        ("zebra", "expected lucir1993, a number, or classes"),
        ("4", "subset is 4; expected 1 to 3"),
        (0, "subset is 0"),
        ("cats,cats", "names a class twice"),
        ("lucir1993", "drawn from 1000 class names; found 3"),
    ],
)
def test_a_subset_that_the_classes_do_not_have_is_refused(which, said):
    with pytest.raises(SettingError, match=said):
        subset(which)(["birds", "cats", "dogs"])


# ------------------------------------------------------------------ tasks


@pytest.mark.parametrize(
    ("num_classes", "settings", "sizes"),
    [
        (100, {}, [50] + [5] * 10),
        (100, {"tasks": 5}, [50] + [10] * 5),
        (100, {"tasks": 25}, [50] + [2] * 25),
        (100, {"base_classes": 40, "tasks": 7}, [40, 9, 9, 9, 9, 8, 8, 8]),
        (10, {"base_classes": 4, "tasks": 3}, [4, 2, 2, 2]),
        (7, {"tasks": 2}, [4, 2, 1]),
        (10, {"base_classes": 10, "tasks": 0}, [10]),
        (10, {"sizes": [1, 6, 3]}, [1, 6, 3]),
        (10, {"sizes": [5, 5], "base_classes": 5}, [5, 5]),
    ],
    ids=str,
)
def test_tasks_follow_the_order_and_hold_every_class_once(num_classes, settings, sizes):
    made = split("lucir1993", num_classes=num_classes, **settings)
    assert [len(task) for task in made.tasks] == sizes
    assert [label for task in made.tasks for label in task] == class_order("lucir1993", num_classes)
    assert made.num_tasks == len(sizes)
    assert made.classes_seen(made.num_tasks - 1) == list(made.order)
    assert made.classes_seen(0) == list(made.tasks[0])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tasks": 0}, "1 to 5 tasks"),
        ({"tasks": 6}, "tasks is 6; the base task leaves 5 of 10"),
        ({"tasks": 2.0}, "tasks is 2.0; expected a whole number"),
        ({"base_classes": 10}, "leaves 0 of 10 classes, enough for none"),
        ({"base_classes": 0}, "base_classes is 0; expected 1 to 10"),
        ({"base_classes": 11}, "base_classes is 11"),
        ({"sizes": [5, 4]}, "add up to 9 classes; expected all 10"),
        ({"sizes": []}, "add up to 0"),
        ({"sizes": [], "base_classes": 5}, "give one of them"),
        ({"sizes": [5, 0, 5]}, "sizes is 0"),
        ({"sizes": [5, 5], "base_classes": 4}, "give one of them"),
        ({"num_classes": 0}, "num_classes is 0"),
    ],
    ids=str,
)
def test_an_impossible_split_is_refused(settings, said):
    with pytest.raises(SettingError, match=said):
        split("natural", **{"num_classes": 10, **settings})


def test_a_split_names_its_order_and_hash():
    assert split("icarl", num_classes=100).order_name == "icarl"
    assert split("icarl", num_classes=100).hash == "62e36f48cf4f"
    for listed in ("2,0,1", [2, 0, 1]):
        made = split(listed, num_classes=3, tasks=1)
        assert (made.order_name, made.hash) == (CUSTOM_ORDER_NAME, order_hash([2, 0, 1]))


def test_output_k_of_a_classifier_is_the_k_th_class_learned():
    made = split("gfr1993", num_classes=20, tasks=5)
    for place, label in enumerate(made.order):
        assert made.position[label] == place
    assert made.position.dtype == torch.int64


def test_the_samples_of_all_tasks_are_every_sample_once():
    labels = torch.randint(10, (300,))
    made = split("lucir1993", num_classes=10, base_classes=4, tasks=3)
    ids = [made.samples(labels, task) for task in range(4)]
    for task, found in enumerate(ids):
        assert found.tolist() == [i for i, label in enumerate(labels.tolist()) if label in made.tasks[task]]
    assert sorted(torch.cat(ids).tolist()) == list(range(300))


def test_a_task_that_is_not_there_is_refused():
    made = split("natural", num_classes=4, tasks=2)
    for task in (-1, 3):
        with pytest.raises(SettingError, match=f"task is {task}; expected 0 to 2"):
            made.classes_seen(task)
        with pytest.raises(SettingError, match=f"task is {task}"):
            made.samples(torch.arange(4), task)
