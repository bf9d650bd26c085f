"""The comparison itself: a wrong method fails, a stale list fails, an exchange without a tie fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from comparators import one_unit
from compare_codecs import same_signs
from harness import make
from missing import Entry, offered, read
from test_conformance import ENTRIES, SHIPPED, faults_of_the_list, verdict
from wrong import notices

from mmaccel.method import registry
from mmaccel.pruning.divprune import DivPrune


# --- methods that are wrong -------------------------------------------------------------------------------------------
def test_a_comparator_that_does_not_look_is_found_out() -> None:
    def blind(params: Any, arrays: Any) -> None:
        x = torch.rand(1, 6, 4, generator=torch.Generator().manual_seed(0))
        make("divprune").reduce(one_unit(x[0]), torch.tensor([2]))

    def looks(params: Any, arrays: Any) -> None:
        x = torch.rand(1, 6, 4, generator=torch.Generator().manual_seed(0))
        ours = make("divprune").reduce(one_unit(x[0]), torch.tensor([2]))
        assert torch.equal(ours.kept, DivPrune().reduce(one_unit(x[0]), torch.tensor([2])).kept)

    for compare, sees in ((blind, False), (looks, True)):
        harness.made.clear()
        compare({}, {})
        assert notices(compare, {}, {}) is sees
    assert registry.get_method("divprune") is DivPrune


# --- ties -------------------------------------------------------------------------------------------------------------
def test_an_exchange_passes_only_where_scores_are_equal() -> None:
    score = torch.tensor([3.0, 2.0, 2.0, 1.0])
    ours, theirs = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    assert torch.equal(harness.in_their_order(score, theirs), torch.tensor([4.0, 2.0, 3.0, 1.0]))
    assert torch.equal(harness.in_their_order(score, ours), torch.tensor([4.0, 3.0, 2.0, 1.0]))
    # one unit in the last place is no tie: the worse one does not come in front because it was chosen
    score[2] = torch.nextafter(score[2], torch.tensor(0.0))
    assert torch.equal(harness.in_their_order(score, theirs), torch.tensor([4.0, 3.0, 2.0, 1.0]))


def test_codes_may_differ_where_the_transform_is_zero_only() -> None:
    x = torch.zeros(1, 1, 3, 4)
    x[0, 0, 1], x[0, 0, 2] = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 1.0, 1.0, 1.0])
    ours = torch.zeros(1, 1, 4, 3, dtype=torch.int32)
    theirs = ours.clone()
    theirs[..., 0] = 1
    theirs[0, 0, 1:, 2] = 1
    assert same_signs(ours, theirs, x) is ours
    theirs[0, 0, 0, 1] = 1
    with pytest.raises(AssertionError, match="not zero"):
        same_signs(ours, theirs, x)


# --- the list ---------------------------------------------------------------------------------------------------------
ABOUT = {"method": "fastv", "repo": "a/b", "function": "f", "params": {}, "outputs": []}
OURS = ("layer",)


def test_an_entry_of_what_is_registered_is_stale() -> None:
    entry = Entry("not_built", "method not built", ("tokens/x",), "unwritten")
    assert entry.stale() is None and entry.stale({"unwritten", "fastv"}) is not None
    assert entry.stale({"unwritten-merge"}) is not None and entry.stale({"unwrittenness"}) is None
    with pytest.raises(AssertionError, match="fastv is registered now"):
        verdict(None, ABOUT, {}, replace(entry, name="fastv"))


def test_an_entry_of_a_variant_is_stale_when_options_change() -> None:
    entry = Entry("variant", "not offered", ("tokens/x",), "fastv", {"fastv": OURS})
    assert entry.stale() is None
    for options in ((), ("layer", "scope")):
        assert "have changed" in str(replace(entry, methods={"fastv": options}).stale())
    assert "no method" in str(replace(entry, methods={"no-such": ()}).stale())
    assert "fastv-more" in str(entry.stale({"fastv", "fastv-more"}))


def test_a_listed_vector_that_passes_is_stale() -> None:
    def passes(params: Any, arrays: Any) -> None:
        harness.make("fastv")

    entry = Entry("variant", "not offered", ("tokens/x",), "fastv", {"fastv": OURS})
    with pytest.raises(AssertionError, match="whatever the registered method chooses"):
        verdict(passes, ABOUT, {}, None)
    for listed in (entry, Entry("fault", "theirs", ("tokens/x",))):
        with pytest.raises(AssertionError, match="the vector passes"):
            verdict(passes, ABOUT, {}, listed)


def test_a_comparator_without_a_registered_method_fails_unless_it_says_so() -> None:
    def inner(params: Any, arrays: Any) -> None:
        """Compares something of its own."""

    with pytest.raises(AssertionError, match="runs no registered method"):
        verdict(inner, ABOUT, {}, None)
    harness.beneath("something")(inner)
    assert verdict(inner, ABOUT, {}, None) == "something is reached by tests only"
    assert verdict(inner, ABOUT, {}, Entry("variant", "later", ("tokens/x",), "fastv", {"fastv": OURS})) == "later"


def test_a_fault_is_one_only_while_the_comparison_fails() -> None:
    def compare(there: bool, same: bool) -> None:
        with harness.fault(there, "theirs"):
            assert same

    compare(False, True)
    with pytest.raises(harness.Fault, match="theirs"):
        compare(True, False)
    with pytest.raises(AssertionError, match="no fault any more"):
        compare(True, True)
    with pytest.raises(AssertionError):
        compare(False, False)


def test_vectors_without_a_comparator() -> None:
    with pytest.raises(AssertionError, match="fastv is registered, but no comparator answers for a/b, f"):
        verdict(None, ABOUT, {}, None)
    with pytest.raises(AssertionError, match="SnapKV|snapkv"):
        verdict(None, {**ABOUT, "method": "kvpress", "function": "SnapKVPress.other"}, {}, None)
    assert verdict(None, {**ABOUT, "method": "unheard"}, {}, None) == "method not built: unheard (a/b, f)"
    unheard = {**ABOUT, "method": "kvpress", "function": "UnheardPress.score"}
    assert verdict(None, unheard, {}, None) == "method not built: Unheard (a/b, UnheardPress.score)"


def test_a_lacking_variant_is_listed_as_one() -> None:
    def lacks(params: Any, arrays: Any) -> None:
        raise harness.NotOffered("a fused token")

    assert verdict(lacks, ABOUT, {}, None) == "variant not offered: a fused token"
    with pytest.raises(AssertionError, match="it is a variant: a fused token"):
        verdict(lacks, ABOUT, {}, Entry("fault", "theirs", ("tokens/x",)))


def test_what_the_list_lacks_or_has_too_many() -> None:
    assert faults_of_the_list(SHIPPED, ENTRIES, full=False) == []
    assert any("is listed, but not there" in one for one in faults_of_the_list(SHIPPED, ENTRIES, full=True))
    without = [entry for entry in ENTRIES if "tokens/divprune_duplicates_edge" not in entry.vectors]
    (said,) = faults_of_the_list(SHIPPED, without, full=False)
    assert said.startswith("divprune_duplicates_edge is not listed: fault of the authors' program")


def test_names_of_papers() -> None:
    # by choice: names with a hyphen and without, and of which one begins another
    known = {"vl-cache", "snapkv", "prunevid-merge", "dycoke", "dycoke-cache"}
    assert offered("vlcache", known) == ["vl-cache"] and offered("dycoke", known) == ["dycoke", "dycoke-cache"]
    assert offered("prunevid", known) == ["prunevid-merge"] and not offered("prune", known)


def test_the_list_is_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "missing.toml"
    for text, said in (
        ('[[later]]\nreason = "a"\nvectors = ["x"]', "no kind of entry"),
        ('[[fault]]\nreason = "a"\nvectors = []', "needs a reason and vectors"),
        ('[[not_built]]\nreason = "a"\nvectors = ["x"]', "needs the name"),
        ('[[fault]]\nreason = "a"\nvectors = ["x"]\n[[fault]]\nreason = "b"\nvectors = ["x"]', "names twice"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(AssertionError, match=said):
            read(path)
