"""What the benchmark of schedules rests on: the exhaustive proof, the Chimera baseline, the rows it writes."""

import json
from fractions import Fraction

import pytest

from benchmarks import common, schedules
from benchmarks.exhaustive import pairings, possible
from fourfold.program import Costs, search, simulate

ZIGZAG = [(s, 7 - s) for s in range(4)]


@pytest.mark.parametrize("micro_batches", [3, 4, 5])
def test_half_the_memory_on_four_ranks_is_optimal(micro_batches):
    """6 B + 11 ticks of half an F are enough, one less is not, in any order; and the synthesizer needs no more."""
    ticks = 6 * micro_batches + 11
    assert possible(ZIGZAG, micro_batches, 4, ticks)
    assert not possible(ZIGZAG, micro_batches, 4, ticks - 1)
    assert search(4, micro_batches, Costs(), 2, stages_per_rank=2).makespan == Fraction(ticks, 2)


def test_exhaustive_search_agrees_where_the_bound_is_met():
    """With full memory and split backwards one wave ends after 3 B + 3/2."""
    assert possible(ZIGZAG, 4, 8, 6 * 4 + 3)
    assert not possible(ZIGZAG, 4, 8, 6 * 4 + 2)


def test_all_placements():
    assert len(list(pairings(range(8)))) == 105
    assert [(0, 7), (1, 6), (2, 5), (3, 4)] in list(pairings(range(8)))


@pytest.mark.parametrize(("ranks", "bubble"), [(4, Fraction(1, 4)), (8, Fraction(1, 3))])
def test_chimera_is_the_one_of_its_paper(ranks, bubble):
    timeline = simulate(*schedules.chimera(ranks, ranks, Costs()))
    assert timeline.bubble == bubble
    assert min(timeline.peak_activations) == ranks // 2 + 1
    assert max(timeline.peak_activations) == ranks


def test_rows_are_written_as_json(tmp_path):
    rows = list(schedules.full_memory(quick=True))
    common.show("rows", rows)
    common.finish("schedules", rows, tmp_path / "rows.json")
    data = json.loads((tmp_path / "rows.json").read_text())
    assert data["benchmark"] == "schedules"
    assert set(data["machine"]) == {"system", "processor", "cores", "python"}
    assert set(data["rows"][0]) == {"case", "peer", "metric", "ours", "theirs", "ratio", "spread"}
    assert all(row["ratio"] >= 1 for row in data["rows"])  # targets met, bounds met


def test_predictions_of_the_published_figure():
    """With one fitted message time a row, waves over GPipe are predicted to 5 %; with free messages two waves to 9 %."""
    rows = [row for row in schedules.published(quick=False) if "GPipe" in row.peer]
    assert len(rows) == 8 * 2 * 3
    for row in rows:
        if "free" not in row.case:
            assert abs(row.ratio - 1) < 0.05
        elif row.peer.startswith("wave 2"):
            assert abs(row.ratio - 1) < 0.09
