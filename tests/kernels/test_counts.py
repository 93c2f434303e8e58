"""Operations are counted as by hand, by module, and joules by the cited constants."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from espalier.kernels import counts
from espalier.kernels.counts import ENERGY, Counter, Counts


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 4, bias=False), nn.Linear(4, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def test_products_are_counted_by_module_and_to_the_byte() -> None:
    model, x = Two(), torch.randn(10, 8)
    with Counter(model) as counter:
        model(x)
    assert {name: one.macs for name, one in counter.parts.items()} == {"": 0, "first": 320, "second": 80}
    assert counter.parts[""].other == 40
    assert counter.parts["first"].bytes_moved == 4 * (10 * 8 + 8 * 4 + 10 * 4)
    model(torch.randn(10, 8))
    assert counter.total.macs == 400, "nothing outside of the counter"


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_counts_its_window(groups: int) -> None:
    layer = nn.Conv2d(4, 6, 3, bias=False, groups=groups)
    with Counter(layer) as counter:
        layer(torch.randn(2, 4, 8, 8))
    assert counter.total.macs == 2 * 6 * 36 * 4 * 9 / groups


def test_backward_counts_twice_the_forward_products() -> None:
    layer, x = nn.Linear(8, 4, bias=False), torch.randn(10, 8, requires_grad=True)
    with Counter(layer) as counter:
        layer(x).sum().backward()
    assert counter.total.macs == 3 * 320


def test_a_kernel_says_what_it_does_and_what_stands_for_it_does_not_count() -> None:
    with Counter() as counter, counter.part("scan"):
        counts.record(Counts(acs=7))
        with counts.hidden():
            torch.ones(3, 3) @ torch.ones(3, 3)
    assert counter.parts == {"scan": Counts(acs=7)}
    counts.record(Counts(acs=5))
    assert counter.total.acs == 7
    assert not counts.is_counting()


def test_joules_are_the_sum_over_the_constants() -> None:
    found = Counts(macs=1000, acs=2000, int8_macs=10, other=5, bytes_moved=100)
    assert found.joules() == pytest.approx((4600 + 1800 + 3 + 4.5) * 1e-12)
    assert found.joules("dram") - found.joules() == pytest.approx(100 * 160e-12)
    assert found.times(2) == found + found
    assert all(one.source for one in ENERGY.values())


def test_few_bits_take_in_proportion_to_their_product_and_every_constant_is_told() -> None:
    assert counts.low_bit(640, 2, 4) == Counts(int8_macs=80)
    assert counts.low_bit(5, 8, 8).joules() == pytest.approx(5 * 0.3e-12)
    assert counts.integer_sums(640, 16) == Counts(int32_adds=320)
    assert counts.integer_sums(5, 16).joules() == pytest.approx(5 * 0.05e-12)
    assert {name: picojoules for name, picojoules, _ in counts.constants()}["hbm_byte"] == pytest.approx(7 * 8)
    assert Counts(bytes_moved=2).joules("hbm") == pytest.approx(112e-12)


def test_an_error_inside_leaves_no_counter_open() -> None:
    layer = nn.Linear(8, 4)
    with pytest.raises(RuntimeError), Counter(layer):
        layer(torch.randn(3, 5))
    assert not counts.is_counting()
    assert not layer._forward_hooks


def test_the_table_begins_with_the_most_expensive_part() -> None:
    parts = {"": Counts(other=1), "head": Counts(macs=10, bytes_moved=40)}
    assert [row[0] for row in counts.table(parts)] == ["head", "outside of modules"]
