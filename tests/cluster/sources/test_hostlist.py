import random

import pytest

from holmes_ext.cluster.sources.hostlist import expand, folded, runs
from holmes_ext.errors import HolmesError


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("", []),
        ("a0", ["a0"]),
        ("gpu[003-005,012],login1", ["gpu003", "gpu004", "gpu005", "gpu012", "login1"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[08-10].site.org", ["n08.site.org", "n09.site.org", "n10.site.org"]),
        ("r[0-1]n[1-2]", ["r0n1", "r0n2", "r1n1", "r1n2"]),
        ("x-1,y[7]-ib", ["x-1", "y7-ib"]),
    ],
)
def test_what_slurm_writes(text, hosts):
    assert expand(text, "here") == hosts


@pytest.mark.parametrize(
    "text", ["a[", "a[1-3x]", "a[1-" + "9" * 19 + "]", "a b", "a[x]", "a,,b", ",a", "a[]", "a]1["]
)
def test_what_is_no_list(text):
    with pytest.raises(HolmesError, match=r"^SLURM_JOB_NODELIST: .* is not"):
        expand(text, "SLURM_JOB_NODELIST")


def test_a_range_that_runs_backwards():
    with pytest.raises(HolmesError, match=r"^here: range 3-1 in 'a\[0,3-1\]' runs backwards$"):
        expand("a[0,3-1]", "here")


def test_a_list_that_is_too_long_is_not_made():
    with pytest.raises(HolmesError, match="range 1-99999999 in .* names more than 100000 hosts"):
        expand("a[1-99999999]", "here")
    with pytest.raises(HolmesError, match="more than 100000 hosts"):
        expand("a[1-9999]b[1-9999]c[1-9999]", "here")


@pytest.mark.parametrize(
    "hosts, text",
    [
        (["a0", "a1", "a2", "b0"], "a[0-2],b0"),
        (["n9", "n10", "n11", "n8"], "n[8-9],n[10-11]"),
        (["n09", "n10", "n07"], "n[07,09-10]"),
        (["login", "gpu-7-ib", "gpu-8-ib"], "login,gpu-[7-8]-ib"),
        (["a1", "a1"], "a1"),
    ],
)
def test_folded(hosts, text):
    assert folded(hosts) == text


def test_a_list_of_texts_with_one_range_each():
    assert runs(["a0", "a1", "a5", "n08", "n09", "n10"]) == ["a[0-1]", "a5", "n[08-10]"]
    assert runs(["gpu1.lab", "gpu2.lab", "login"]) == ["gpu[1-2].lab", "login"] and runs([]) == []


@pytest.mark.parametrize("seed", range(20))
def test_folding_loses_nothing(seed):
    rng = random.Random(seed)
    names = {
        f"{rng.choice('ab')}{rng.choice(('', '0', 'r1-'))}{rng.randrange(120)}{rng.choice(('', '.x'))}"
        for _ in range(rng.randrange(1, 60))
    }
    assert set(expand(folded(names), "here")) == names


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("gpu[001-003,020]", ["gpu001", "gpu002", "gpu003", "gpu020"]),
        ("gpu00[1-2,7]", ["gpu001", "gpu002", "gpu007"]),
        ("a1, a2 ,a3", ["a1", "a2", "a3"]),
        ("n[0-6/2]", ["n0", "n2", "n4", "n6"]),
        ("n[01-09/4,20]", ["n01", "n05", "n09", "n20"]),
    ],
)
def test_notations_of_other_programs(text, hosts):
    assert expand(text, "here") == hosts
