"""Laws of the mesh: coordinates name ranks, groups partition them, and equal parameters are found as the plan says."""

from __future__ import annotations

import itertools
import time
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from regular_mesh import ParallelDegrees, regular

from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.parallel.mesh import (
    AXES,
    DATA,
    REPLICA,
    SEQUENCE,
    Coordinates,
    ProcessMesh,
    of_plan,
)
from espalier.plan.axes import placement as shards
from espalier.plan.base import Plan, Rank, Stage
from espalier.recipe.errors import UserError
from many_ranks import ranks

degrees = st.builds(ParallelDegrees, *(st.integers(1, 3) for _ in AXES)).filter(lambda one: prod(one) <= 96)
axes = st.lists(st.sampled_from(AXES), unique=True)


@given(degrees)
def test_coordinates_and_ranks_name_each_other(sizes: ParallelDegrees) -> None:
    mesh = regular(sizes)
    assert len(set(mesh.coordinates.values())) == len(mesh.coordinates) == prod(sizes)
    for rank, place in mesh.coordinates.items():
        number = 0
        for size, coordinate in zip(sizes, place, strict=True):
            number = number * size + coordinate
        assert number == rank


@given(degrees, axes)
def test_groups_partition_the_trainers_and_hold_who_differs_in_their_axes_only(
    sizes: ParallelDegrees, along: list[str]
) -> None:
    mesh = regular(sizes)
    groups = mesh.groups(*along)
    assert sorted(itertools.chain(*groups)) == list(mesh.trainers)
    fixed = [index for index, axis in enumerate(AXES) if axis not in along]
    for group in groups:
        assert len(group) == prod(getattr(sizes, axis) for axis in along)
        assert len({tuple(mesh.coordinates[rank][index] for index in fixed) for rank in group}) == 1
        assert all(mesh.members(rank, *along) == group for rank in group)


@given(degrees)
def test_ranks_with_the_same_parameters_differ_in_their_data_only(sizes: ParallelDegrees) -> None:
    mesh = regular(sizes)
    for rank, place in mesh.coordinates.items():
        same = mesh.same_parameters(rank)
        assert same == tuple(
            other
            for other, there in sorted(mesh.coordinates.items(), key=lambda item: item[1])
            if (there.replica, there.pp, there.tp) == (place.replica, place.pp, place.tp)
        )
        assert mesh.sequence_part(rank).total == sizes.cp_out * sizes.cp_in * sizes.hp
        assert mesh.data_part(rank).total == sizes.replica * sizes.dp


@given(degrees)
def test_each_part_of_the_data_is_counted_once(sizes: ParallelDegrees) -> None:
    mesh = regular(sizes)
    counted = [(mesh.data_part(rank), mesh.sequence_part(rank)) for rank in mesh.trainers if mesh.counts(rank)]
    assert len(counted) == len(set(counted)) == sizes.replica * sizes.dp * sizes.cp_out * sizes.cp_in * sizes.hp


@given(degrees, st.integers(1, 12))
def test_expert_groups_divide_the_ranks_with_the_same_parameters(sizes: ParallelDegrees, experts: int) -> None:
    same = sizes.dp * sizes.cp_out * sizes.cp_in * sizes.hp
    if same % experts:
        with pytest.raises(UserError, match=f"ep = {experts} does not divide"):
            regular(sizes, experts)
        return
    mesh = regular(sizes, experts)
    for rank in mesh.trainers:
        group, copies = mesh.expert_group(rank), mesh.same_experts(rank)
        assert len(group) == experts
        assert len(copies) == same // experts
        assert set(group) & set(copies) == {rank}
        assert sorted({other for copy in copies for other in mesh.expert_group(copy)}) == sorted(
            mesh.same_parameters(rank)
        )


def test_a_thousand_ranks_need_no_process_and_no_second() -> None:
    begun = time.process_time()
    mesh = regular(ParallelDegrees(replica=2, pp=4, dp=8, cp_in=2, tp=8))
    sizes = {tuple(along): len(mesh.groups(*along)) for along in ([axis] for axis in AXES)}
    assert sizes[("tp",)] == 128
    assert len(mesh.replicas) == 2
    assert len(mesh.same_parameters(1023)) == 16
    assert time.process_time() - begun < 1.0


# --- of a plan -----------------------------------------------------------------------------------------------------


def test_a_plan_without_stages_is_data_parallel() -> None:
    mesh = of_plan(Plan(ranks=(Rank(),) * 3))
    assert mesh.coordinates == {rank: Coordinates(dp=rank) for rank in range(3)}
    assert mesh.same_parameters(1) == (0, 1, 2)


def test_replicas_by_rounds_share_no_exchange_of_a_step() -> None:
    mesh = of_plan(Plan(ranks=(Rank(),) * 4, choices={"local_rounds": LocalRoundsState(replicas=((0, 1), (2, 3)))}))
    assert mesh.replicas == ((0, 1), (2, 3))
    assert mesh.same_parameters(3) == (2, 3)
    assert mesh.members(3, "replica") == (1, 3)
    assert [mesh.data_part(rank) for rank in range(4)] == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_stages_give_pipeline_sequence_and_tensor_axes() -> None:
    stages = tuple(
        Stage(ranks=tuple(range(8 * number, 8 * number + 8)), layers=(number, number + 1), tensor=2, heads=2)
        for number in range(2)
    )
    mesh = of_plan(Plan(ranks=(Rank(),) * 16, stages=stages))
    assert mesh.coordinates[0] == Coordinates()
    assert mesh.coordinates[15] == Coordinates(pp=1, dp=1, hp=1, tp=1)
    assert mesh.members(9, "tp") == (8, 9)
    assert mesh.members(9, "pp") == (1, 9)
    assert mesh.same_parameters(9) == (9, 11, 13, 15)
    assert [rank for rank in range(16) if mesh.counts(rank)] == [8, 10, 12, 14]


@pytest.mark.parametrize(
    ("placement", "heads", "inner", "outer"),
    [
        ("head_first", (0, 1), (0, 2), (0, 4)),
        ("context_first", (0, 4), (0, 1), (0, 2)),
        ("interleaved", (0, 4), (0, 2), (0, 1)),
    ],
)
def test_placement_says_which_of_the_ranks_that_share_a_sequence_are_neighbours(
    placement: Any, heads: tuple[int, ...], inner: tuple[int, ...], outer: tuple[int, ...]
) -> None:
    stage = Stage(ranks=tuple(range(8)), layers=(0, 1), heads=2, context=4, window=2)
    mesh = of_plan(Plan(ranks=(Rank(),) * 8, stages=(stage,), placement=placement))
    assert mesh.members(0, "hp") == heads
    assert mesh.members(0, "cp_in") == inner
    assert mesh.members(0, "cp_out") == outer
    assert len(set(mesh.coordinates.values())) == 8
    assert sorted(mesh.sequence_part(rank).number for rank in range(8)) == list(range(8))


@pytest.mark.parametrize("placement", ["head_first", "context_first", "interleaved"])
def test_shards_lie_on_neighbours_whatever_the_placement(placement: Any) -> None:
    """Two of eight ranks that hold the same parameters split them: ranks of one machine, however sequences are cut."""
    stage = Stage(ranks=tuple(range(8)), layers=(0, 4), heads=2, context=4, window=2)
    mesh = of_plan(Plan(ranks=(Rank(),) * 8, stages=(stage,), placement=placement))
    assert mesh.same_parameters(5) == tuple(range(8))
    placed = shards.place(shards.ShardFactors(2, 4, 8), [rank // 4 for rank in mesh.same_parameters(0)])
    assert [axis.members(0) for axis in placed.axes] == [(0, 1), (0, 2), (0, 4)]


def test_a_rank_of_interleaved_stages_stands_where_its_first_stage_is() -> None:
    stages = tuple(Stage(ranks=(number % 2,), layers=(number, number + 1)) for number in range(4))
    mesh = of_plan(Plan(ranks=(Rank(),) * 2, stages=stages, interleave=2))
    assert mesh.members(0, "pp") == (0, 1)
    assert [mesh.counts(rank) for rank in range(2)] == [False, True]


def test_pipelines_of_unequal_depth_and_width_stand_side_by_side() -> None:
    stages = (
        Stage(pipeline=0, ranks=(0, 1), layers=(0, 3), tensor=2),
        Stage(pipeline=0, ranks=(2,), layers=(3, 4)),
        Stage(pipeline=1, ranks=(3,), layers=(0, 4)),
    )
    mesh = of_plan(Plan(ranks=(Rank(),) * 4, stages=stages))
    assert [rank for rank in range(4) if mesh.counts(rank)] == [2, 3]
    assert mesh.members(0, "tp") == (0, 1)
    assert {mesh.coordinates[rank].dp for rank in (0, 1, 2)} == {0}
    assert mesh.coordinates[3].dp == 1


def test_ranks_of_other_roles_have_no_coordinates() -> None:
    mesh = of_plan(Plan(ranks=(Rank(), Rank(role="optimizer"), Rank())))
    assert mesh.trainers == (0, 2)
    assert mesh.roles == ("trainer", "optimizer", "trainer")
    assert mesh.same_parameters(2) == (0, 2)


# --- process groups ------------------------------------------------------------------------------------------------


def test_groups_sum_over_their_members_and_are_made_once() -> None:
    sizes = ParallelDegrees(replica=2, dp=2, tp=2)

    def sums(channel: dist.ProcessGroup) -> list[float]:
        here = ProcessMesh(regular(sizes), channel, channel.rank())
        found = []
        for along in (("tp",), DATA, REPLICA, AXES, SEQUENCE):
            group, value = here.group(*along), torch.tensor([2.0 ** channel.rank()])
            assert group is here.group(*along)
            if group is not None:
                dist.all_reduce(value, group=group)
            found.append(value.item())
        assert here.trainers is channel
        return found

    mesh = regular(sizes)
    for rank, found in enumerate(ranks(8, sums)):
        wanted = [mesh.members(rank, *along) for along in (("tp",), DATA, REPLICA, AXES, SEQUENCE)]
        assert found == [sum(2.0**member for member in group) for group in wanted]


def test_a_rank_alone_has_no_groups() -> None:
    here = ProcessMesh(regular(ParallelDegrees()))
    assert (here.replica, here.trainers, here.same_parameters) == (None, None, None)
