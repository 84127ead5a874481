"""Every wrong option is one line, raised before anything starts."""

import pytest

from hp_integration.errors import InputError
from hp_integration.inputs import read_options
from hp_integration.options import Options, parse_mesh, parse_options


def test_the_mesh_is_ordered_from_slow_to_fast_axis_whatever_the_user_wrote() -> None:
    mesh = Options(mesh=parse_mesh("tp=2,dp_shard=3,dp_replicate=4")).mesh
    assert list(mesh.items()) == [("dp_replicate", 4), ("dp_shard", 3), ("tp", 2)]
    assert list(Options(mesh={"tp": 2}).mesh) == ["dp_shard", "tp"]


def test_experts_are_shared_between_rows_and_sequences_are_not() -> None:
    options = Options(mesh=parse_mesh("dp_shard=2,ep=3,cp=5,tp=7"))
    assert list(options.mesh) == ["dp_shard", "ep", "cp", "tp"]
    assert options.data_ranks == 6
    assert options.sequence_parts == 35
    assert Options(mesh=options.mesh, sequence_parallel=False).sequence_parts == 5


def test_the_command_line_gives_the_same_defaults_as_the_value() -> None:
    assert parse_options([]) == Options()


def test_every_option_can_be_given_on_the_command_line() -> None:
    line = "--mesh dp_shard=2,tp=2 --no-sequence-parallel --no-checks --resume --model dense"
    options = parse_options(line.split())
    assert options.world_size == 4
    assert options.data_ranks == 2
    assert (options.sequence_parallel, options.checks, options.resume) == (False, False, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=2", "unknown axis 'dp'"),
        ("tp", "axis 'tp' needs a size"),
        ("tp=two", "axis 'tp' needs a size"),
        ("tp=0", "axis 'tp' needs a size"),
        ("tp=2,tp=2", "given twice"),
        ("", "unknown axis ''"),
    ],
)
def test_a_mesh_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--mesh tp=2", "^--mesh tp=2 needs 2 ranks, this run has 4"),
        ("", "^a run without --mesh needs 1 rank, this run has 4"),
        ("--mesh dp_shard=4 --batch-size 6", "divided evenly over 4"),
        ("--mesh dp_shard=2,tp=2 --seq-len 7", "divided evenly over tp=2"),
        ("--mesh cp=2,tp=2 --seq-len 6", "divided evenly over cp=2, tp=2"),
        ("--mesh dp_shard=2,ep=2 --batch-size 6", "divided evenly over 4"),
        ("--mesh dp_shard=4 --steps 0", "--steps must be at least 1, found 0"),
        ("--mesh dp_shard=4 --lr -1", "--lr must be positive"),
        ("--mesh dp_shard=4 --lr nan", "--lr must be positive"),
        ("--mesh dp_shard=4 --adamw-lr 0", "--adamw-lr must be positive"),
        ("--mesh dp_shard=4 --weight-decay -1", "--weight-decay must not be negative"),
        ("--mesh dp_shard=4 --warmup -1", "--warmup must not be negative"),
        ("--mesh dp_shard=4 --ns-dtype fp8", "expected one of fp32, bf16"),
        ("--mesh dp_shard=4 --single", "--single runs without a mesh"),
        ("--mesh dp_shard=4 --devices-per-host 3", "does not divide 4 ranks"),
        ("--setps 3", "unrecognized arguments: --setps"),
        ("--steps many", "invalid int value"),
    ],
)
def test_a_wrong_option_is_one_line(line: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse_options(line.split()).check(world_size=4)
    assert "\n" not in str(caught.value)


def test_all_mistakes_of_a_command_line_are_told_at_once() -> None:
    line = "--mesh tp=two --steps 0 --lr -1 --setps 3 --data /no/such --config /no/such.json"
    with pytest.raises(InputError) as caught:
        read_options(line.split(), world_size=4)
    first, *mistakes = str(caught.value).splitlines()
    assert first == "6 mistakes:"
    parts = (
        "--setps 3",
        "'tp' needs a size",
        "--steps",
        "--lr",
        "/no/such: no",
        "/no/such.json: no",
    )
    assert all(part in mistake for part, mistake in zip(parts, mistakes, strict=True))
