"""Ranks stop together, with one line, whichever of them found the mistake."""

from pathlib import Path

import pytest

from hp_integration.errors import InputError
from hp_integration.world import World, require_shared_folder
from hp_platform import RankFailure, Topology
from hp_platform.testing import run_ranks


@pytest.mark.ranks
def test_the_mistake_of_one_rank_stops_every_rank_with_the_same_line() -> None:
    def body(rank: int) -> str:
        def prepare() -> int:
            if rank == 1:
                raise InputError("rank 1 found this")
            return rank

        with pytest.raises(InputError) as caught:
            World.current().together(prepare)
        return str(caught.value)

    assert run_ranks(body, 3) == ["rank 1 found this"] * 3


@pytest.mark.ranks
def test_without_a_mistake_every_rank_gets_its_own_value() -> None:
    assert run_ranks(lambda rank: World.current().together(lambda: rank), 2) == [0, 1]


@pytest.mark.ranks
def test_a_folder_that_hosts_do_not_share_is_refused(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        with pytest.raises(InputError) as caught:
            require_shared_folder(tmp_path / f"host{rank}", World.current())
        return str(caught.value)

    first, second = run_ranks(body, 2)
    assert first == second
    assert "rank 1 does not see what rank 0 writes" in first


@pytest.mark.ranks
def test_a_shared_folder_is_left_as_it_was(tmp_path: Path) -> None:
    def body() -> None:
        require_shared_folder(tmp_path / "new", World.current())
        World.current().barrier()

    run_ranks(body, 2)
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.ranks
def test_declared_hosts_are_what_the_packages_see() -> None:
    from hp_integration.world import declare_hosts

    def body() -> tuple[str, ...]:
        declare_hosts(2, 4)
        return Topology.discover().hosts

    assert run_ranks(body, 4)[0] == ("host0", "host0", "host1", "host1")


@pytest.mark.ranks
def test_other_failures_are_not_mistaken_for_mistakes_in_the_inputs() -> None:
    def body(rank: int) -> None:
        def prepare() -> None:
            if rank == 0:
                raise ZeroDivisionError("a fault of the program")

        World.current().together(prepare)

    with pytest.raises(RankFailure, match="a fault of the program"):
        run_ranks(body, 2)


@pytest.mark.ranks
def test_meshes_make_groups_only_for_axes_of_several_ranks_and_only_once() -> None:
    from torch.distributed import distributed_c10d

    from hp_integration.world import device_mesh

    def body() -> list[int]:
        made = []
        for sizes in ({"dp": 2, "cp": 1, "tp": 2}, {"dp": 2, "cp": 1, "tp": 2}, {"dp": 4, "tp": 1}):
            mesh = device_mesh(sizes)
            assert dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True)) == sizes
            made.append(len(distributed_c10d._world.pg_map))
        return made

    # The default group, one for dp and one for tp; then nothing more.
    assert run_ranks(body, 4) == [[3, 3, 3]] * 4
