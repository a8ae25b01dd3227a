import json

import pytest

from sparkforge.compile import peaks
from sparkforge.compile.peaks import Cost, Peaks

GROUP = "120_cutlass_kernel_file_gemm_grouped_sm120_M128_BS_group{}.generated.cuda.o"


def test_what_is_learnt_counts_first_in_its_context_and_survives():
    Peaks("one").learn({"m/a.cuda.o": Cost(5, 1.0)})
    Peaks("one").learn({"m/a.cuda.o": Cost(3, 4.0), "m/b.cuda.o": Cost(7, 2.0)})
    assert Peaks("one").cost("m/a.cuda.o") == Cost(5, 4.0)
    assert Peaks("one").cost("m/b.cuda.o").peak == 7
    assert Peaks("two").cost("m/a.cuda.o").peak > 10**9
    Peaks("two").learn({"m/a.cuda.o": Cost(9, 1.0)})
    assert Peaks.of_any().cost("m/a.cuda.o") == Cost(9, 4.0)


def test_a_unit_never_measured_takes_after_its_namesake_elsewhere_with_room_and_no_further_than_the_last_resort():
    known = Peaks("one")
    known.learn({"page_64/page.cuda.o": Cost(10**9, 4.0), "page_128/page.cuda.o": Cost(2 * 10**9, 7.0)})
    expected = known.cost("page_256/page.cuda.o")
    assert (expected.peak, expected.cpu) == (4 * 10**9, 7.0)
    assert "page.cuda.o" in expected.source
    measured = "fused_moe_120_fp8xfp4/" + GROUP.format(2)
    known.learn({"other/" + GROUP.format(2): Cost(10, 1.0)})
    assert known.cost(measured).peak == 9.09e9, "a measured row counts before a namesake"
    known.learn({"page_512/page.cuda.o": Cost(10**10, 9.0)})
    assert known.cost("page_256/page.cuda.o").peak == 11_200_000_000
    assert known.cost("page_64/page.cuda.o").peak == 10**9, "its own history counts before a namesake's"
    assert known.cost("page_256/other.cuda.o").peak == 11_200_000_000
    assert Peaks("two").cost("page_256/page.cuda.o").peak == 11_200_000_000, "another compiler teaches nothing"


UNREADABLE = {
    "another shape": "[]",
    "an endless number": '{"schema": 1, "contexts": {"c": {"u": {"peak": 1e999, "cpu": 1}}}}',
    "deep": "[" * 200_000,
    "no UTF-8": "\udcff",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_learnt_file_that_is_not_understood_teaches_nothing_and_is_kept(name, capfd):
    data = UNREADABLE[name].encode(errors="surrogateescape")
    file = peaks.learnt_path()
    file.parent.mkdir(parents=True, exist_ok=True)
    for kept in ("peaks.json.unreadable", "peaks.json.unreadable1"):
        file.write_bytes(data)
        assert Peaks("c").cost("m/a.cuda.o").peak == 11_200_000_000
        Peaks("c").learn({"m/a.cuda.o": Cost(5, 1.0)})
        assert json.loads(file.read_text())["contexts"] == {"c": {"m/a.cuda.o": {"peak": 5, "cpu": 1.0}}}
        assert file.with_name(kept).read_bytes() == data
        assert kept in "".join(capfd.readouterr().err.split())
