"""The same schedules in `torch.distributed.pipelining`: ours run there, theirs load here."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs

from fourfold.program import Costs, Schedule, build, simulate, split, synthesize, validate
from fourfold.testing.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch's runtime does not connect all pairs of gloo ranks before 2.12"
)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def model(stages: int) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(block() for _ in range(stages))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def step_in_torch(rank: int, ranks: int, schedule: Schedule, path: str) -> list[torch.Tensor]:
    """One step of torch's runtime from our CSV; the gradients of this rank's stages, stage by stage."""
    blocks = model(schedule.stages)
    mine = schedule.stages_of[rank]
    stages = [PipelineStage(blocks[s], s, schedule.stages, torch.device("cpu")) for s in mine]
    runtime = theirs._PipelineScheduleRuntime(stages, schedule.micro_batches, loss_fn=loss, scale_grads=False)
    runtime._load_csv(path)
    x, y = data(schedule.micro_batches)
    inputs = (x,) if 0 in mine else ()
    target = y if schedule.stages - 1 in mine else None
    runtime.step(*inputs, target=target, losses=[], return_outputs=False)
    dist.barrier()
    return [p.grad.clone() for s in mine for p in blocks[s].parameters()]


def data(micro_batches: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2 * micro_batches, 8, generator=generator), torch.randn(
        2 * micro_batches, 8, generator=generator
    )


def serial(schedule: Schedule) -> list[list[torch.Tensor]]:
    """By stage, the gradients of one process."""
    blocks = model(schedule.stages)
    x, y = data(schedule.micro_batches)
    for a, b in zip(x.chunk(schedule.micro_batches), y.chunk(schedule.micro_batches), strict=True):
        for layer in blocks:
            a = layer(a)
        loss(a, b).backward()
    return [[p.grad for p in layer.parameters()] for layer in blocks]


@pytest.mark.parametrize(
    "make",
    [
        lambda: build("wave", 2, 4, waves=2),
        lambda: build("zb-v", 2, 4),
        lambda: synthesize(2, 5, Costs(message=0.05), 2, stages_per_rank=4, evaluations=20),
        lambda: split(build("wave", 2, 3)),
    ],
    ids=["wave", "zb-v", "synthesized", "split wave"],
)
def test_our_schedules_run_in_torchs_runtime(make, tmp_path):
    schedule = make()
    path = tmp_path / "schedule.csv"
    schedule.save(path)
    torch.set_num_threads(1)
    found = run_ranks(step_in_torch, schedule.ranks, schedule, str(path))
    wanted = serial(schedule)
    for rank, grads in enumerate(found):
        expected = [g for s in schedule.stages_of[rank] for g in wanted[s]]
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


class Stand:
    """What torch's schedules ask of a stage before anything runs."""

    def __init__(self, index: int, stages: int, rank: int, ranks: int):
        self.stage_index, self.num_stages, self.group_rank, self.group_size = index, stages, rank, ranks
        self.group, self.has_backward, self.submod = None, True, nn.Identity()
        self.stage_index_to_group_rank = {s: s % ranks for s in range(stages)}
        self.is_first, self.is_last = index == 0, index == stages - 1


@pytest.mark.parametrize(
    ("cls", "stages"),
    [
        (theirs.ScheduleInterleaved1F1B, 2),
        (theirs.ScheduleInterleavedZeroBubble, 2),
        (theirs.ScheduleZBVZeroBubble, 2),
        (theirs.ScheduleDualPipeV, 2),
        (theirs.ScheduleLoopedBFS, 3),
    ],
)
def test_torchs_schedules_load_in_ours(cls, stages, tmp_path):
    ranks, micro_batches = 4, 8
    held = [Stand(s, ranks * stages, 0, ranks) for s in range(0, ranks * stages, ranks)]
    schedule = cls(held, micro_batches, loss_fn=loss)
    path = tmp_path / "theirs.csv"
    theirs.PipelineScheduleMulti._dump_csv(schedule, str(path))
    ours = Schedule.load(path)
    validate(ours)
    assert (ours.ranks, ours.stages, ours.micro_batches) == (ranks, ranks * stages, micro_batches)
    assert simulate(ours).makespan >= simulate(ours).lower_bound


def test_torchs_interleaved_is_ours():
    held = [Stand(s, 8, 0, 4) for s in (0, 4)]
    actions = theirs.ScheduleInterleaved1F1B(held, 8, loss_fn=loss).pipeline_order
    text = "\n".join(",".join("" if a is None else str(a) for a in actions[rank]) for rank in range(4))
    assert Schedule.from_csv(text) == build("interleaved", 4, 8, stages_per_rank=2)


def test_both_lower_to_the_same_messages():
    from fourfold.program import Send, lower

    schedule = build("wave", 4, 4, waves=2)
    actions = {rank: [theirs._Action.from_str(str(op)) for op in ops] for rank, ops in enumerate(schedule.order)}
    lowered = theirs._add_send_recv(actions, lambda s: schedule.placement[s], schedule.stages)
    kinds = {"SEND_F": "activation", "SEND_B": "gradient"}
    torch_messages = {
        (rank, a.stage_index, kinds[a.computation_type.value], a.microbatch_index)
        for rank, row in lowered.items()
        for a in row
        if a.computation_type.value in kinds
    }
    ours = {
        (p.rank, i.stage, i.kind, i.micro_batch)
        for p in lower(schedule).programs
        for i in p.instructions
        if isinstance(i, Send)
    }
    assert ours == torch_messages
