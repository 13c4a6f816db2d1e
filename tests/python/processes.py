"""Several processes of torch.distributed on this machine."""

import os
import socket
import sys
from datetime import timedelta

import torch
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=60)  # of a process that waits for one that does not come


def spawn(work, size):
    """work(rank) in so many processes, each of one thread, which can make a process group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    mp.spawn(_begin, (work, port, size), nprocs=size)


def _begin(rank, work, port, size):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    work(rank)
    # Without the interpreter's own end, where such a process aborts now and then ("terminate called
    # without an active exception"). Most likely a thread of autograd asks for Python's lock then,
    # and Python before 3.14 ends it in the middle of C++.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
