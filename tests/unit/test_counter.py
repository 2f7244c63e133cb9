import numpy as np

from epcross.harness.workload import counter


def test_stream_of_key_0_is_splitmix64_seeded_with_0():
    # the first outputs of Vigna's splitmix64.c for state 0 and for state 1234567
    assert [int(w) for w in counter.words(0, 0, 3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [int(w) for w in counter.words(1234567, 0, 2)] == [6457827717110365317, 3203168211198807973]


def test_keys_are_pinned_and_depend_on_order_and_number():
    assert counter.key(1, 2, 3) == 0x1072DECA7455826
    assert len({counter.key(1, 2), counter.key(2, 1), counter.key(1, 2, 0), counter.key(-1, 2)}) == 4


def test_any_part_of_a_stream_is_the_same_from_anywhere():
    whole = counter.words(42, 0, 100)
    assert np.array_equal(counter.words(42, 37, 20), whole[37:57])
    rows = counter.shuffle(7, 0, 6, 13)
    assert np.array_equal(counter.shuffle(7, 4, 2, 13), rows[4:])


def test_mix_agrees_with_the_integer_form_inside_key():
    # key(p) is one step of the chain: mix(((1 ^ p) + gamma) mod 2**64)
    assert counter.key(5) == int(counter.mix(np.array([(1 ^ 5) + 0x9E3779B97F4A7C15], np.uint64))[0])


def test_below_covers_its_range_evenly():
    drawn = counter.below(counter.words(3, 0, 60_000), 6)
    share = np.bincount(drawn.astype(np.int64), minlength=6) / 60_000
    assert len(share) == 6
    assert np.abs(share - 1 / 6).max() < 0.01  # 6 standard deviations


def test_shuffles_are_permutations_and_every_place_is_reached():
    rows = counter.shuffle(11, 0, 4000, 5)
    assert np.array_equal(np.sort(rows, axis=1), np.tile(np.arange(5), (4000, 1)))
    first = np.bincount(rows[:, 0], minlength=5) / 4000
    assert np.abs(first - 0.2).max() < 0.04
    assert counter.shuffle(11, 0, 3, 1).tolist() == [[0], [0], [0]]
