"""Processes forked from a rank: however they end, their parent's groups go on; and they cannot use these.

One program forks two ranks; the first of them forks the children of all cases, one after the other.
"""

from __future__ import annotations

import re

import fresh
import pytest

pytestmark = pytest.mark.xdist_group("forks")
PROGRAM = """
import datetime, gc, multiprocessing, os, sys
import torch
import torch.distributed as dist
import ringattn
from ringattn.peer import watchdog
from ringattn.transport import group as transports

store, cases = STORE, {}
rank = 0 if os.fork() else 1
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=3000))
groups = [dist.group.WORLD, dist.new_group([0, 1], backend="cuda:gloo")]
plans = [ringattn.plan(16, group) for group in groups]
x = torch.ones(1, 8, 2, 8)

def attend():
    assert ringattn.attention(x, x, x, plans[0]).eq(1).all()
    assert plans[1].transport.gather_words(torch.tensor([rank])).tolist() == [[0], [1]]  # by a group of ringattn

def case(status):
    return lambda body: cases.update({body.__name__: (status, body)}) or body

@case(0)
def ends():
    sys.exit(0)

@case(1)
def raises():
    raise ValueError("of a child")

@case(7)
def ends_at_once():
    os._exit(7)

@case(0)
def attends():
    for plan in plans:
        for call in (lambda: ringattn.attention(x, x, x, plan), lambda: ringattn.plan(32, plan.transport)):
            try:
                call()
            except ringattn.errors.GroupBroken as error:
                assert f"this process is a fork of rank {rank}'s" in str(error), error
            else:
                os._exit(3)
    plans[0].transport.note_failure(MemoryError("of a child"))
    sys.exit(0)

@case(0)
def forks_again():
    if os.fork() == 0:
        raises()
    assert os.wait()[1] == 256
    sys.exit(0)

@case(0)
def starts_a_worker():
    worker = multiprocessing.get_context("fork").Process(target=sum, args=([],))
    worker.start()
    worker.join()
    sys.exit(worker.exitcode)

@case(0)
def drops_its_groups():
    global plans
    groups.clear()
    plans = []
    dist.destroy_process_group()
    gc.collect()
    sys.exit(0)

attend()
for name, (status, body) in cases.items():
    child = rank == 0 and os.fork()
    if child == 0 and rank == 0:
        body()
    answer = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else status
    states = [plan.transport.health.board.status(r) for plan in plans for r in range(2)]
    attend()
    if rank == 0:
        print("case", name, answer == status, states == [watchdog.RUNNING] * 4, flush=True)
dist.destroy_process_group()
if rank == 0:
    print("rank 1", os.wait()[1], flush=True)
"""
CASES = re.findall(r"^@case\(\d\)\ndef (\w+)", PROGRAM, re.MULTILINE)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    store = tmp_path_factory.mktemp("forks") / "store"
    done = fresh.run(PROGRAM.replace("STORE", repr(str(store))), GLOO_SOCKET_IFNAME="lo")
    return done.stderr + done.stdout


@pytest.mark.parametrize("case", CASES)
def test_the_parent_goes_on(said: str, case: str) -> None:
    """The child ends with its own status, and both ranks attend again, on boards that say that they run."""
    assert f"case {case} True True\n" in said, said


def test_all_ranks_end_in_order(said: str) -> None:
    assert said.endswith("rank 1 0\n"), said
