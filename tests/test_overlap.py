import random
import string

import numpy as np
import pytest

from reprune.overlap import RUN, Runs, _codes, _hashes


def letters(count, seed):
    return "".join(random.Random(seed).choices(string.ascii_lowercase, k=count))


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 200])
def test_runs_have_equal_hashes_if_they_are_equal(length):
    text = letters(300, 0)[:150] * 3
    hashes = _hashes(_codes(text), length)
    runs = [text[start : start + length] for start in range(len(text) - length + 1)]
    assert len(hashes) == len(runs)
    assert len(np.unique(hashes)) == len(set(runs))


def test_a_shared_run_is_found_whatever_the_spacing():
    shared = letters(RUN, 1)
    spaced = ", ".join(shared[start : start + 5].upper() for start in range(0, RUN, 5))
    runs = Runs([letters(5000, 2), letters(900, 3) + shared + letters(900, 4)])
    assert runs.sharing({"with": f"{letters(400, 5)}; {spaced}! {letters(300, 6)}", "without": letters(5000, 7)}) == {
        "with"
    }


def test_a_run_that_is_a_letter_short_is_not_enough():
    shared = letters(RUN - 1, 1)
    assert Runs([shared + "a" + letters(300, 2)]).sharing({"x": shared + "b" + letters(300, 3)}) == set()


def test_a_short_document_must_be_there_whole():
    runs = Runs([letters(5000, 1)])
    assert runs.sharing({"in": letters(5000, 1)[70:130], "out": letters(60, 2), "empty": "..."}) == {"in"}


def test_nothing_shares_with_nothing():
    assert Runs([]).sharing({"x": letters(500, 0)}) == set()
    assert Runs(["short"]).sharing({"x": letters(500, 0)}) == set()
